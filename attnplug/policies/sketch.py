"""sketch: decode that reads the best tokens and estimates the rest from a sketch of the keys.

A step scores every cached token from 16 to 32 bytes a KV head, the key in the coordinates that the
queries weigh. The k tokens with the largest shares of attention are read exactly, as are the first
block and the last four. What the others weigh is known from the codes, and a regression on their
scores gives what they are worth:

    out = (N_r + rho Z_t v_t) / (Z_r + rho Z_t)

Sources: docs/log/sketch.md for the design and its measurements; low-rank keys as in Loki (Singhania
et al., 2024). Prefill is another phase's business.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape, PagedCall, StepReads
from attnplug.models.sync import may_sync
from attnplug.ops import encode_pages, sketch_decode, sketch_host_decode, sketch_pages
from attnplug.ops.sketch.kernels.codes import LOCAL
from attnplug.ops.sketch.merge_sketch import TAILS
from attnplug.ops.sketch.model_basis import BAND, size_for
from attnplug.ops.sketch.pages import LayerBasis, SketchedPages, empty_page_sketch
from attnplug.ops.sketch.state import BLOCK, COORDINATES
from attnplug.policies._few_queries import asks_for_few
from attnplug.policies._sketch_audit import Asked
from attnplug.policies._sketch_layer import HostSketchLayer, SketchLayer
from attnplug.policies.crossover import PagedDenseBelow
from attnplug.policies.paged import OWN_ROWS

FIXED = (1 + LOCAL.value) * BLOCK  # tokens that every step reads: the sink and the last blocks
# k=None: an eighth of a cache's slots as a power of two, which no long decode was seen to lose
# perplexity by (docs/reference/eval-results.md), between these. In host memory the least, as each
# token comes over the link.
LEAST_K, MAX_K = 2048, 16384
SHARE = 8
# A cache smaller than this many times the tokens that a step reads is read whole, and one below so
# many tokens in any case: on an H200 steps are faster than dense's from about 54,000 tokens on, and
# whole calls of 128 new tokens, which make the basis and codes of their prompt, were a little
# slower at 65,536 and a little faster at 100,000 (bench/results/sketch.json). On a CPU it was
# slower at every length that was tried, up to 262,144.
CROSSOVER_FACTOR = 4
CROSSOVER_FLOOR = {"cuda": 98304, "cpu": 524288}
# In a batch that has paid a step's fixed price, a row costs what dense takes for about so many
# times the tokens that it reads: steps of 1 and 8 rows on an H200 (docs/log/sketch.md).
ROW_FACTOR = 5


@dataclasses.dataclass(frozen=True)
class Sketch(PagedDenseBelow):
    """Decode over the best tokens, and an estimate of the others.

    bytes: of codes a token and KV head, 16, 24 or 32. k: tokens that each KV head picks at each
    step, beside the first block of 128 and the last four; None: as many as `picks` says. tail: what
    the tokens that are not read count as: their mass and a regression of the values on the scores
    ("regression"), or nothing ("drop"). min_tokens: caches below so many tokens are read whole, by
    `dense`. None is a multiple of what a step reads, but not below a floor for the kind of device.
    audit: after so many tokens the error of a step is estimated, between two steps; 0: only where
    `attnplug.policies.audit` asks for it. kv: where keys and values live, "gpu" or "host" (memory
    read over the link); the codes are on the GPU.
    """

    bytes: int = 24
    k: int | None = None
    tail: str = "regression"
    audit: int = 0
    min_tokens: int | None = None
    kv: str = "gpu"

    name: ClassVar[str] = "sketch"
    layer_type: ClassVar[type] = SketchLayer
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})
    takes_pending: ClassVar[bool] = True
    keeps_queries: ClassVar[bool] = True
    has_model_basis: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_integers("bytes", "audit", *([] if self.k is None else ["k"]))
        self.check("bytes", self.bytes in COORDINATES, ", ".join(map(str, COORDINATES)))
        self.check("k", self.k is None or 1 <= self.k <= MAX_K, f"1 to {MAX_K}, or None")
        self.check("tail", self.tail in TAILS, ", ".join(TAILS))
        self.check("audit", self.audit >= 0, "at least 0")
        self.check("kv", self.kv in ("gpu", "host"), "'gpu' or 'host'")
        self.check_min_tokens()

    def picks(self, slots: int) -> int:
        """Tokens that each KV head picks over a cache with so many slots."""
        if self.k is not None:
            return self.k
        size = MAX_K if self.kv == "gpu" else LEAST_K
        while size > LEAST_K and slots < SHARE * size:
            size //= 2
        return size

    @property
    def kept(self) -> int:
        """The tokens that a step reads at least, of a row that is long enough, but for a few
        equals."""
        return FIXED + self.picks(0)

    def step_reads(self, tokens: int, head_dim: int, room: int = 0) -> StepReads:
        kept = FIXED + self.picks(max(tokens, room))
        return StepReads(min(kept, tokens), tokens * self.bytes)

    @property
    def scales(self) -> bool:
        return self.kv == "gpu"  # else the link to the host decides

    def measured_crossover(self, kind: str) -> int:
        return max(CROSSOVER_FLOOR[kind], CROSSOVER_FACTOR * self.kept)

    def measured_row_crossover(self, kind: str) -> int:
        if kind == "cpu":
            return self.measured_crossover(kind)
        return ROW_FACTOR * self.kept

    def refusal(self, shape: LayerShape) -> str | None:
        rank = sum(COORDINATES[self.bytes])
        if rank > shape.head_dim:
            return f"sketch: {self.bytes} bytes are {rank} coordinates, the head {shape.head_dim}"
        return super().refusal(shape)

    def note(self, shape: LayerShape) -> str:
        rest = {"drop": "drops", "regression": "estimates"}[self.tail]
        dense = self.dense_caches(shape.device)
        scan = f"and {self.bytes} bytes a token to choose them, {rest} the rest"
        where = " from host memory" if self.kv == "host" else ""
        reads = f"{self.kept:,}"
        if self.picks(0) < self.picks(SHARE * MAX_K):
            reads += f" to {FIXED + MAX_K:,} tokens, an eighth of the cache"
        else:
            reads += " tokens"
        return f"reads {reads}{where}, {scan}; {dense}"

    def cache_layer(self, max_length: int) -> SketchLayer:
        kind = HostSketchLayer if self.kv == "host" else SketchLayer
        return kind(max_length, self.bytes, self.serves, self.audit)

    def note_queries(self, call: AttentionCall) -> None:
        if isinstance(call.state, SketchLayer):
            call.state.note_queries(call)
            self._note_asked(call, call.state)

    def _note_asked(self, call: AttentionCall, layer: SketchLayer) -> None:
        """What an audit must know of the calls."""
        if not torch.compiler.is_compiling():
            picks = self.picks(layer.max_cache_len)
            layer.asked = Asked(call.scale, call.softcap, call.sinks, picks, self.tail)

    def serves_few(self, call: AttentionCall) -> bool:
        layer = self._own_layer(call) if asks_for_few(self, call) else None
        if layer is None or layer.on_host:
            return False
        return layer.is_fitted or may_sync(call.q.is_cuda)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, alone = self._own_layer(call), call.q.shape[2] == 1
        if layer is not None:
            self._note_asked(call, layer)
            if not alone:  # a step's op keeps its own
                layer.keep_queries(call)
            layer.step_by_host(call)
        if layer is None or not (layer.is_fitted or layer.is_expected):
            return self.leave_to_dense(call)
        assert layer.codes is not None and layer.basis is not None  # of a layer that has its codes
        pending = layer.take_pending()
        count = not torch.compiler.is_compiling()  # the model reads its positions off it
        options: dict[str, Any] = {"lengths": call.lengths}
        if pending is not None:
            options = {"lengths": layer.cumulative_length, "new": pending, "count": count}
        step, fixed = sketch_decode, ()
        if isinstance(layer, HostSketchLayer) and layer.fixed is not None:
            step, fixed = sketch_host_decode, (layer.fixed,)
        out, _ = step(
            call.q,
            call.k,
            call.v,
            *layer.basis,
            *layer.codes,
            *fixed,
            scale=call.scale,
            top_k=self.picks(call.k.shape[2]),
            tail=self.tail,
            recent=layer.ring(call.q) if alone else None,
            hint=layer.hint,
            start=call.first_key,
            key_mask=call.key_mask,
            softcap=call.softcap,
            sinks=call.sinks,
            **options,
        )
        if pending is not None and not count:
            layer.cumulative_length.add_(1)
        return out

    def pages_refusal(self) -> str | None:
        return OWN_ROWS  # continuous batching has no basis of the model

    def for_requests(self, longest: int) -> "Sketch":
        """With as many picks as the longest has, which every row reads: its crossovers then count
        them."""
        return dataclasses.replace(self, k=self.picks(longest))

    def page_state(self, k: torch.Tensor, basis: LayerBasis | None = None) -> SketchedPages:
        """Codes by physical slot, so that requests share them as they share pages. Without a basis
        they say what they take."""
        size = size_for(k.shape[3])
        if basis is not None:
            rank = basis.scorer.shape[2] - 1
            size = next(size for size, pair in COORDINATES.items() if sum(pair) == rank)
        return SketchedPages(empty_page_sketch(k, size), basis)

    def code_pages(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        state: SketchedPages,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        assert state.basis is not None  # of pages that are served
        basis = state.basis
        encode_pages(k, v, basis.encoder, basis.turns, *state.codes, slots, positions)

    def attend_far(self, call: PagedCall) -> torch.Tensor:
        codes, basis = call.state
        # An engine's table may have room for more tokens than a request can have.
        room = len(basis.turns) * BAND // call.k.shape[2]
        out, _ = sketch_pages(
            call.q,
            call.k,
            call.v,
            basis.scorer,
            basis.turns,
            codes.fine,
            codes.coarse,
            codes.odd,
            call.table[:, :room],
            call.lengths,
            top_k=self.picks(call.room),
            **call.options,
        )
        return out

    def why_dense(self, call: AttentionCall) -> str:
        why = "its basis is not made yet: call attnplug.policies.refit between two steps"
        return why if self._own_layer(call) is not None else super().why_dense(call)

    def _own_layer(self, call: AttentionCall) -> SketchLayer | None:
        """The call's cache layer if its codes are those of the call's keys, else None: a small
        cache, one that this method did not make, or another layer's (Gemma 3n's share some)."""
        layer = call.state
        if not isinstance(layer, SketchLayer):
            return None
        if not layer.on_host and not self.serves(len(call.q), call.k.shape[2], call.q.device):
            return None
        own = layer.keys is call.k and layer.codes is not None and layer.size == self.bytes
        return layer if own else None
