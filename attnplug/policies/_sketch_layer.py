"""sketch's cache layers: keys and values (on the GPU or in host memory), the codes of the keys,
their basis and the last queries, of which it is made; and the audits of its steps."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from transformers import Cache
from transformers.cache_utils import StaticLayer

from attnplug.call import AttentionCall
from attnplug.models.buffers import lower_progress
from attnplug.models.cache import PlugLayer, RowBuffers
from attnplug.models.edits import first_filled
from attnplug.models.sync import may_sync
from attnplug.models.watched import Serves
from attnplug.ops.sketch.basis import Fit, fit_bases
from attnplug.ops.sketch.encode_keys import encode_keys
from attnplug.ops.sketch.host_decode import FixedPart
from attnplug.ops.sketch.state import BLOCK, Basis, Codes, empty_basis, empty_codes
from attnplug.policies._host_layer import HostLayer
from attnplug.policies._sketch_audit import Asked, Audit, audit_step

QUERIES = 512  # last ones of each head, that a basis is made of
SPARE = 8  # and more, which are still there where generate takes steps back
RING = QUERIES + SPARE
FEW = 64  # a basis of fewer queries is made again after as many steps
SOON, LATE = 512, 2048  # a basis is made again after as many tokens as it was made of, within
Rows = tuple[torch.Tensor | None, torch.Tensor | None]  # start and mask, as `refit` takes them


class SketchLayer(PlugLayer):
    """Keys and values, `codes` of `size` bytes a token, the `basis`, and `recent`, the last 520
    queries of each head `[B,Hq,520,D]`, a query at its position modulo 520. A basis is made of the
    last 512, so that a crop of eight steps leaves all that it needs.

    `hint` `[B,Hkv]` float32 is what the last step left for the scan of the next one, 0 where the
    tokens have changed since (`sketch_decode`).

    `audits` `[B,Hq,3]` float64 counts audits and sums their two results, see `audit_step`.
    The basis is made between steps (`refit`), never in a captured or compiled one: after a prefill,
    where `note_queries` has it; before steps of generate, which calls `prepare_steps`; in a step
    that is not compiled. The host starts that work and does not wait for it. It counts the tokens
    for that, `seen`; compiled code does not count.
    Codes follow `progress`: what shortens a row lowers it, and a new basis begins it anew. Caches
    that the method does not serve (`serves`: rows, slots, device) have neither: dense reads them.
    """

    row_buffers: ClassVar[RowBuffers] = {
        "codes": None,
        "basis": None,
        "recent": 0.0,
        "audits": 0.0,
        "hint": 0.0,
    }
    defers_write = True

    codes: Codes | None = None
    basis: Basis | None = None
    recent: torch.Tensor | None = None
    audits: torch.Tensor | None = None
    hint: torch.Tensor | None = None
    asked: Asked | None = None  # of the last call
    is_fitted = False
    is_expected: bool | None = False
    on_host = False
    seen = 0  # tokens, as far as the host knows
    without_query = 0  # of them, those that came without their queries
    served = 0, False  # so many rows, and whether the method serves them
    fitted_at = 0  # tokens that the basis was made of
    due = 0  # the basis is made again at so many tokens
    audit_due = 0  # and a step is audited

    def __init__(
        self,
        max_cache_len: int,
        size: int,
        serves: Serves,
        audit: int = 0,
    ):
        super().__init__(max_cache_len=max_cache_len)
        self.size, self.serves, self.audit = size, serves, audit

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._forget()
        self.asked = self.audits = None  # of other rows
        assert self.keys is not None
        if not self.wants_codes(self.keys):
            self.codes = self.basis = self.hint = self.recent = None
            return
        rows = self.keys.shape[:2]
        self.bind_rows(
            codes=empty_codes(self.keys, self.size),
            basis=empty_basis(self.keys, self.size),
            hint=self.keys.new_zeros(rows, dtype=torch.float32),
        )
        if self.query_heads is not None:
            self._make_ring(self.query_heads)

    def wants_codes(self, keys: torch.Tensor) -> bool:
        """Whether a cache with these buffers is to have codes; dense reads one that has none."""
        return self.holds_more(len(keys), keys.device)

    def _serves_its_rows(self) -> bool:
        """Whether steps read the codes; fewer rows than the cache began with may leave it to
        dense."""
        keys = self.keys
        if keys is None:
            return False
        if self.on_host:
            return True
        rows = len(keys)
        if self.served[0] != rows:  # asked before each step of every layer
            self.served = rows, self.serves(rows, self.max_cache_len, keys.device)
        return self.served[1]

    def _make_ring(self, heads: int) -> None:
        keys = self._buffers()[0]
        recent = keys.new_zeros((len(keys), heads, RING, keys.shape[3]))
        # With the first audit they would be new to compiled steps, which would be compiled again.
        audits = keys.new_zeros((len(keys), heads, 3), dtype=torch.float64)
        self.bind_rows(recent=recent, audits=audits)

    def _forget(self) -> None:
        self.is_fitted, self.seen, self.without_query = False, 0, 0
        self.fitted_at, self.due, self.audit_due = 0, 0, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = super().update(key_states, value_states, *args, **kwargs)
        if not (torch.compiler.is_compiling() or self.is_expected):
            self.seen += key_states.shape[2]
        return both

    def reset(self) -> None:
        super().reset()
        self._forget()
        if self.codes is not None:
            self.codes.progress.zero_()

    def renew(self) -> None:
        self._forget()
        self.seen = int(self.cumulative_length)
        if self.codes is not None:
            self.codes.progress.zero_()
            self._forget_hint()

    @classmethod
    def take_back_all(cls, layers: Sequence[PlugLayer], tokens: int | torch.Tensor) -> None:
        super().take_back_all(layers, tokens)
        own = cast(Sequence[SketchLayer], layers)
        for layer in own if isinstance(tokens, int) else ():
            layer.seen = max(0, layer.seen - tokens)
        done = [layer.codes.progress for layer in own if layer.codes is not None]
        if done:
            lower_progress(done, first_filled(own).cumulative_length, BLOCK)
            hints = [layer.hint for layer in own if layer.hint is not None]
            torch._foreach_zero_(hints)  # pyright: ignore[reportPrivateImportUsage]

    def _forget_hint(self) -> None:
        if self.hint is not None:
            self.hint.zero_()

    def adopt(self, source: StaticLayer) -> None:
        """Append the tokens of another layer, and take its queries where it has kept some. The
        basis is made at the next step."""
        before = self.seen
        super().adopt(source)
        queries = getattr(source, "recent", None)
        if queries is None:
            self.without_query = self.seen - before
        elif self.codes is not None:
            self._make_ring(queries.shape[1])
            assert self.recent is not None
            self.recent.copy_(queries)

    def continue_from(self, source: PlugLayer) -> None:
        if isinstance(source, SketchLayer) and source.audits is not None:
            self.bind_rows(audits=source.audits.clone())

    def ring(self, q: torch.Tensor) -> torch.Tensor | None:
        """`recent`, if it fits these queries: a module with other heads may share the cache."""
        recent = self.recent
        return recent if recent is not None and recent.shape[1] == q.shape[1] else None

    def note_queries(self, call: AttentionCall) -> None:
        """After a call of several queries, whose tokens are in the cache: keep the last queries,
        and make what codes are missing. generate leaves the basis to its first step, which makes
        those of all layers together. In other prefills it is made whenever they have grown by a
        quarter (with the last piece, where `prefill_tokens` says which that is), and the first step
        behind has it made of the rest."""
        if self.codes is None or not self.exposes_buffers:
            return
        compiling = torch.compiler.is_compiling()
        if self.recent is None and not compiling:
            self._make_ring(call.q.shape[1])
        self.keep_queries(call)
        self._forget_hint()
        mask = self.mask_of_buffer(call.key_mask)
        # Traced code must not look at the counts.
        grown = self.seen >= max(self.fitted_at * 5 // 4, self.prefill_tokens)
        now = grown and not self.steps_are_prepared and may_sync(call.q.is_cuda)
        if now and self._is_due():
            self.refit(call.start, mask)
        elif self.is_fitted:
            self._encode(call.start, mask)

    def keep_queries(self, call: AttentionCall) -> None:
        """Write the last queries of a call to the ring; what stands for padding is zero there."""
        recent, count = self.ring(call.q), min(call.q.shape[2], QUERIES)
        if recent is None:
            return
        at = self.cumulative_length - count + torch.arange(count, device=recent.device)
        queries = call.q[:, :, -count:]
        if call.key_mask is not None:
            hidden = ~call.key_mask.index_select(1, at)
            queries = queries.masked_fill(hidden[:, None, :, None], 0.0)
        recent.index_copy_(2, at % RING, queries.to(recent.dtype))

    @property
    def _written(self) -> int:
        """Tokens in the cache, as far as the host knows."""
        return self.seen - (self.pending is not None)

    def _is_due(self) -> bool:
        return not self.is_fitted or self._written >= self.due

    def step_by_host(self, call: AttentionCall) -> None:
        """Audit the step before, and make the basis anew, where they are due and the host may wait
        for the device. Not of tokens that only draft."""
        if self.round_part or not may_sync(call.q.is_cuda):
            return
        if self.pending is not None and self._audit_is_due():
            self._audit(call.first_key, call.key_mask)
        if self._is_due():
            self.refit(call.first_key, call.key_mask)

    def _can_audit(self) -> bool:
        return self.is_fitted and self.asked is not None and self.recent is not None

    def _audit_is_due(self) -> bool:
        return self.audit > 0 and self._can_audit() and self._written >= self.audit_due

    def _audit(self, start: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Estimate the error of the last step: its query is in the ring, its token in the cache."""
        assert self.codes is not None and self.basis is not None
        assert self.asked is not None and self.recent is not None  # _can_audit has looked
        self.audit_due = self._written + self.audit
        lengths = self.cumulative_length.reshape(1)
        found = audit_step(
            self.recent.index_select(2, (lengths - 1) % RING),
            *self._buffers(),
            self.basis,
            self.codes,
            self.asked,
            **{"lengths": lengths, "start": start, "key_mask": mask, "seed": self._written},
        )
        assert self.audits is not None  # as the ring is there
        self.audits += torch.stack([torch.ones_like(found[0]), *found], -1)

    @property
    def crops_exactly(self) -> bool:
        return True  # of SPARE steps at most: more of generate's are never taken back

    def prepare_step(self, tokens: int, mask: torch.Tensor | None) -> None:
        self.prepare_steps([self], tokens, mask)

    @classmethod
    def due_layers(cls, layers: Sequence["PlugLayer"], tokens: int) -> Sequence["PlugLayer"]:
        return [each for each in layers if isinstance(each, SketchLayer) and each._has_work(tokens)]

    def _has_work(self, tokens: int) -> bool:
        """Whether an audit or a basis is due before a step, with so many tokens in the cache."""
        self.seen = max(self.seen, tokens)
        if self.codes is None or self.seen == 0 or not self._serves_its_rows():
            return False
        return self._audit_is_due() or self._is_due()

    @classmethod
    def prepare_steps(
        cls, layers: Sequence["PlugLayer"], tokens: int, mask: torch.Tensor | None
    ) -> None:
        due = []
        for layer in layers:
            assert isinstance(layer, SketchLayer)
            rows = layer._prepare(tokens, mask)
            if rows is not None:
                due.append((layer, rows[0], rows[1]))
        refit_layers(due)

    def _prepare(self, tokens: int, mask: torch.Tensor | None) -> Rows | None:
        """Audit the step before where that is due. (start, mask), as `refit` takes them, where the
        basis is due."""
        if not self.is_initialized or not self._has_work(tokens):
            return None
        audit, fit = self._audit_is_due(), self._is_due()
        start, mask = self._rows_of(mask)
        if audit:
            self._audit(start, mask)
        return (start, mask) if fit else None

    def _rows_of(self, mask: torch.Tensor | None) -> Rows:
        """(start, mask), as `refit` takes them, of a model's mask `[B,T]`."""
        if mask is None:
            return None, None
        mask = mask.bool().to(self._buffers()[0].device)[:, : self.max_cache_len]
        return mask.int().argmax(-1).to(torch.int32), self.mask_of_buffer(mask)

    def refit(self, start: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Make the basis of the tokens that are in the cache and the queries that were kept, and
        all codes. `start` `[B]` and `mask` `[B,S]` as in `AttentionCall`."""
        refit_layers([(self, start, mask)])

    def _fit(self, start: torch.Tensor | None, mask: torch.Tensor | None) -> Fit:
        keys, values = self._buffers_to_read()
        queries = self.recent
        lengths = self.cumulative_length.reshape(1)
        if queries is None:  # none was ever kept: zeros stand for no preference
            queries = keys.new_zeros((*keys.shape[:2], 1, keys.shape[3]))
        else:
            age = (lengths - 1 - torch.arange(RING, device=queries.device)) % RING
            queries = queries.masked_fill((age >= QUERIES)[:, None], 0.0)
        return Fit(keys, values, queries, lengths, start, mask)

    def _take_basis(self, fitted: Basis, of: Fit) -> None:
        """Have a basis, and all codes made anew in it."""
        assert self.codes is not None and self.basis is not None
        for own, new in zip(self.basis, fitted, strict=True):
            own.copy_(new)
        self.codes.progress.zero_()
        rows = {"lengths": of.lengths, "start": of.start, "key_mask": of.key_mask}
        encode_keys(of.keys, of.values, self.basis.encoder, *self.codes, **rows)
        tokens = self.fitted_at = self._written
        few = tokens - self.without_query < FEW
        self.due = tokens + (FEW if few else min(max(tokens, SOON), LATE))
        self.is_fitted = True

    def _buffers_to_read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for a look at all tokens."""
        return self._buffers()

    def _encode(self, start: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        assert self.codes is not None and self.basis is not None
        rows = {"lengths": self.cumulative_length.reshape(1), "start": start, "key_mask": mask}
        encode_keys(*self._buffers(), self.basis.encoder, *self.codes, **rows)


class HostSketchLayer(SketchLayer, HostLayer):
    """Keys and values in host memory; on the GPU all that `SketchLayer` has beside them, and
    the tokens that every step reads (`fixed`), which a cache on the GPU has not.

    A step that writes its own token keeps `fixed` true, and finds out by itself where the row's
    padding or length has changed. After tokens that come otherwise it is read from the host again.
    A new basis has one layer's keys and values copied to the GPU, for as long as it takes.
    """

    row_buffers: ClassVar[RowBuffers] = {**SketchLayer.row_buffers, "fixed": None}
    is_expected: bool | None = None
    fixed: FixedPart | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.fixed = None
        if self.on_host:
            self.bind_rows(fixed=FixedPart.empty(self._buffers()[0]))

    def reset(self) -> None:
        super().reset()
        self._release_fixed()

    def renew(self) -> None:
        super().renew()
        self._release_fixed()

    def _write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._release_fixed()
        return super()._write(key_states, value_states, *args, **kwargs)

    def _release_fixed(self) -> None:
        if self.fixed is not None:
            self.fixed.held.fill_(-1)

    def _buffers_to_read(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._buffers()
        if not self.on_host or not keys.is_cuda:
            return keys, values
        tokens = int(self.cumulative_length)
        there = torch.empty_like(keys), torch.empty_like(values)
        for near, far in zip(there, (keys, values), strict=True):
            near[:, :, :tokens] = far[:, :, :tokens]
        return there


def refit_layers(layers: Iterable[tuple[SketchLayer, *Rows]]) -> None:
    """`refit` of layers, those that are alike together; of keys and values in host memory one
    after the other, as each layer's are copied to the GPU."""
    alike: dict[Any, list[tuple[SketchLayer, *Rows]]] = {}
    for number, (layer, start, mask) in enumerate(layers):
        keys = layer._buffers()[0]
        heads = None if layer.recent is None else layer.recent.shape[1]
        kind = *keys.shape[:2], keys.shape[3], keys.dtype, keys.device, heads, layer.size
        alike.setdefault(number if layer.on_host else kind, []).append((layer, start, mask))
    for group in alike.values():
        fits = [layer._fit(start, mask) for layer, start, mask in group]
        fitted = fit_bases(fits, size=group[0][0].size)
        for (layer, _, _), basis, of in zip(group, fitted, fits, strict=True):
            layer._take_basis(basis, of)


def refit(cache: Cache, attention_mask: torch.Tensor | None = None) -> None:
    """Make sketch's basis anew in every layer of a cache, from its tokens and the last queries,
    now and not when it is due: for loops of compiled steps, between two of them. `attention_mask`
    `[B,T]` is the model's, where it hides anything."""
    layers = [layer for layer in cache.layers if isinstance(layer, SketchLayer)]
    for layer in layers:
        layer.due, layer.seen = 0, max(layer.seen, int(layer.cumulative_length))
    SketchLayer.prepare_steps(layers, 0, attention_mask)


def audit(cache: Cache, attention_mask: torch.Tensor | None = None) -> list[Audit]:
    """Estimate the error of the last step in every layer of sketch's that has made one, now, and
    return what all audits of the cache have found. `attention_mask` `[B,T]` is the model's, where
    it hides anything. For between two steps: each layer repeats its step."""
    for layer in cache.layers:
        if isinstance(layer, SketchLayer) and layer.is_initialized and layer._can_audit():
            layer._audit(*layer._rows_of(attention_mask))
    return audits(cache)


def audits(cache: Cache) -> list[Audit]:
    """What the audits of every layer of sketch's have found, of layers that had some. Reads them on
    the host: not for a step."""
    rows = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, SketchLayer) and layer.audits is not None:
            found = layer.audits.flatten(0, 1).cpu()
            count, error, size = (float(x) for x in found.sum(0))
            steps = int(found[:, 0].max())
            if steps > 0:
                # Estimates may be negative, and so may their sum be, where there is no error.
                error = max(error, 0.0) if error == error else error
                relative = (error / size) ** 0.5 if size > 0 else 0.0
                rows.append(Audit(index, steps, (error / count) ** 0.5, relative))
    return rows
