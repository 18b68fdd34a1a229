"""One attention layer's work on an engine's pages, for any of its attention backends: which rows a
method serves, prompts by momo, steps by gather, gvr or sketch, and which prompts stream looks on
at. It knows tensors, and not the engine."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from attnplug.call import AttentionCall, Edges, LayerShape, PagedCall
from attnplug.ops.sketch.pages import LayerBasis
from attnplug.policies import Dense, Phase
from attnplug.policies.momo import LEAST_CHUNK, Momo
from attnplug.serve.paged.pages import Pages, contiguous_row
from attnplug.serve.paged.phases import Phases
from attnplug.serve.paged.rows import Row
from attnplug.serve.paged.state import LayerState
from attnplug.serve.paged.tally import PromptRows, StepRows, in_words

# An engine fills a batch with as much of a prompt as the steps beside it leave: a chunk that has
# the measured crossover's keys alone must not fall below it. There momo is 1.5 times as fast as
# FlashAttention-3, at 12,288 keys 1.2 times, at 8,192 0.90 times (bench/results/momo.json).
CUT_SHORT = 0.25

FEW = (8, 16, 24, 32)  # queries of a chunk that is traced: plans for them are others
NOTED = (1, 4096)  # keys of a batch: kernels that note few and many


@dataclasses.dataclass(frozen=True)
class LayerTraits:
    """What decides whether a method can serve a layer."""

    head_dim: int
    longest: int  # tokens that a request can have
    rows: int  # requests that a batch can have
    device: torch.device
    softcap: float = 0.0
    left_dense: str = ""  # why the engine's own attention must serve it, "" where it need not


def phases_for(asked: Phases, traits: LayerTraits) -> tuple[Phases, str]:
    """The methods that serve such a layer, and why not those that were asked for."""
    if traits.left_dense:
        return Phases(), traits.left_dense
    kept, reasons = {}, []
    # What methods refuse of a layer does not depend on the number of heads.
    shape = LayerShape(1, 1, traits.head_dim, traits.softcap, False, traits.device)
    for slot in ("prefill", "decode"):
        phase = getattr(asked, slot)
        if phase is None:
            continue
        refusal = phase.refusal(shape)
        if refusal:
            reasons.append(refusal)
            continue
        if slot == "decode":
            phase = phase.for_requests(traits.longest)
            alone = phase.crossover(traits.device)
            served = phase.row_crossover(traits.device).reachable(traits.rows, traits.longest)
        else:
            alone = _prefill_from(phase, traits.device)
            served = traits.longest >= alone
        if served:
            kept[slot] = phase
        else:
            reasons.append(
                f"{phase.name} serves from {alone:,} tokens on, requests have up to "
                f"{traits.longest:,}"
            )
    if asked.trace is not None:
        why = _untraced(asked, kept, shape)
        if why:
            reasons.append(why)
        else:
            kept["trace"] = asked.trace
    return Phases(**kept), "; ".join(reasons)


def _prefill_from(phase: Momo, device: torch.device) -> int:
    """The keys that a chunk must see for momo to serve it."""
    crossover = phase.crossover(device)
    return crossover if phase.min_tokens is not None else int(crossover * (1 - CUT_SHORT))


def _untraced(asked: Phases, kept: dict[str, Any], shape: LayerShape) -> str:
    """Why a layer cannot be traced, "" where it can."""
    assert asked.trace is not None  # asked of a policy that traces
    if asked.trace.of == "policy" and "prefill" not in kept:
        return "stream(of='policy') has no method to follow there"
    return asked.trace.refusal(shape) or ""


class TracedRow(Protocol):
    """A row of a batch that is recorded while it is computed."""

    @property
    def row(self) -> Row: ...

    @property
    def recorded(self) -> bool: ...

    def emit(self, layer: int, call: AttentionCall, edges: Edges | None) -> None: ...


class Far(NamedTuple):
    """Which rows of a batch the method that decodes serves: bool `chosen` `[rows]`, and int32
    `lengths` `[rows]`, the keys of those rows and 0 for others, whose keys are in `near`."""

    lengths: torch.Tensor
    chosen: torch.Tensor
    near: torch.Tensor | None = None

    def first(self, rows: int) -> "Far":
        """The first rows alone."""
        near = None if self.near is None else self.near[:rows]
        return Far(self.lengths[:rows], self.chosen[:rows], near)


class ServedLayer:
    """The methods of one layer and what they keep beside its pages. `why` says what was left
    dense."""

    def __init__(
        self,
        phases: Phases,
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        device: torch.device,
        index: int = 0,
        why: str = "",
        basis: LayerBasis | None = None,
    ):
        self.index, self.why = index, why
        # What has served it; all layers of an engine share the rows of its steps.
        self.prompts, self.steps = PromptRows(), StepRows()
        self.overruled = ""  # why the engine's own attention serves all rows in spite of the policy
        self.phases, self.scale, self.softcap, self.sinks = phases, scale, softcap, sinks
        self.state = self.rule = None
        if phases.decode is not None:
            self.state = LayerState(phases.decode, basis)
            self.rule = phases.decode.row_crossover(device)
        self.prefill_from = 0
        if phases.prefill is not None:
            self.prefill_from = _prefill_from(phases.prefill, device)
            # The crossover is decided here, by the keys that are seen, and not by a call's queries.
            self._momo = dataclasses.replace(phases.prefill, min_tokens=0)

    def serves_prompt(self, row: Row) -> bool:
        """Whether momo serves a row of several queries: many keys are seen, by queries enough."""
        if self.phases.prefill is None or row.seen < self.prefill_from:
            return False
        return row.queries >= self._least_chunk

    @property
    def _least_chunk(self) -> int:
        """The fewest queries of a row that momo serves."""
        return max(2, min(LEAST_CHUNK, self.prefill_from))

    def note_dense(self, rows: Iterable[Row]) -> None:
        """Count rows of several queries that the engine's own attention serves."""
        self.prompts.note_dense(rows)

    def last_served(self) -> tuple[str, str]:
        """What has served prompts and steps since `forget_served`, and why dense did, as
        `Report.last` says it; "" where there were none."""
        prefill, decode = self.phases.prefill, self.phases.decode
        why_low = why_high = self.overruled or self.why
        if prefill is not None and not self.overruled:
            why_low = (
                f"{prefill.name} serves chunks of {self._least_chunk:,} queries that see "
                f"{self.prefill_from:,} keys; these had up to {self.prompts.queries:,} and saw up "
                f"to {self.prompts.keys:,}"
            )
        if decode is not None and self.rule is not None and not self.overruled:
            why_high = (
                f"{decode.name} serves rows of {self.rule.row:,} tokens, or of {self.rule.alone:,} "
                f"alone in a batch; these had up to {self.steps.nearest:,}"
            )
        low = "" if prefill is None else prefill.name, self.prompts.sparse, self.prompts.rows
        far = 0 if decode is None or self.overruled else self.steps.far
        high = "" if decode is None else decode.name, far, self.steps.rows
        return (
            in_words(*low, "chunks of prompts", why_low),
            in_words(*high, "rows of steps", why_high),
        )

    def forget_served(self) -> None:
        """Begin to count again."""
        self.prompts.reset()
        self.steps.reset()

    def attend_prompt(
        self,
        row: Row,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        pages: Pages,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """momo for one row, into `out [tokens, Hq, D]`."""
        call = self._prompt_call(row, q, k, v, pages, table)
        own = out[row.first : row.first + row.queries]
        own.copy_(self._momo.attend(call)[0].transpose(0, 1))
        self.prompts.note_sparse()
        if pages.v_scale is not None:
            own.mul_(pages.v_scale)

    def trace_prompt(
        self,
        traced: TracedRow,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: Pages,
        table: torch.Tensor,
    ) -> None:
        """Look on at a row that is recorded, and has been served."""
        if not traced.recorded:
            return  # it was given up at an earlier layer
        assert self.phases.trace is not None  # asked of a layer that is traced
        call = self._prompt_call(traced.row, q, k, v, pages, table)
        served = self._momo if self.serves_prompt(traced.row) else Dense()
        traced.emit(self.index, call, self.phases.trace.observe(call, served))

    def _prompt_call(
        self,
        row: Row,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        pages: Pages,
        table: torch.Tensor,
    ) -> AttentionCall:
        """One row of several queries. q `[tokens, Hq, D]`, k and v `[tokens, Hkv, D]` are the
        batch's. A row that begins its request is read from them; of a later chunk, or where they
        are not given, the keys come from `pages`, through the block table `[rows, blocks]`, by one
        copy. In fp8 they always do, so that all chunks and all requests read what is stored: the
        copy is of q's dtype, and the keys' scale becomes one of the queries."""
        tokens = slice(row.first, row.first + row.queries)
        queries = q[tokens].transpose(0, 1)[None]
        if row.queries == row.seen and k is not None and v is not None and not pages.fp8:
            keys, values = (x[tokens].transpose(0, 1)[None] for x in (k, v))
        else:
            place = table[row.index], row.seen, q.dtype
            keys, values = (contiguous_row(x, *place) for x in (pages.k, pages.v))
        if pages.k_scale is not None:
            queries = queries * pages.k_scale
        return self._call(queries, keys, values)

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionCall:
        rows = {"softcap": self.softcap, "sinks": self.sinks, "follow": None}
        return AttentionCall(q, k, v, self.scale, **rows)

    def warm_prompts(
        self, chunk: int, longest: int, *, heads: int, kv_heads: int, head_dim: int, **place
    ) -> None:
        """Run momo and stream once for each kind of call: chunks of up to `chunk` queries over up
        to `longest` keys. Triton compiles apart what 16 divides and what it does not."""
        chunk = min(chunk, longest)
        if chunk < 2 or (self.phases.prefill is None and self.phases.trace is None):
            return
        grid = 1 if self.phases.prefill is None else self._momo.query_block
        q = torch.zeros(chunk, heads, head_dim, **place).transpose(0, 1)[None]
        first = torch.zeros(chunk, kv_heads, head_dim, **place).transpose(0, 1)[None]
        if self.phases.trace is not None:
            k = torch.zeros(1, kv_heads, longest, head_dim, **place)
            for queries, seen in itertools.product((*FEW, chunk - 1), (longest, longest - 1)):
                if queries < chunk:
                    keys = k[:, :, :seen]
                    self.phases.trace.observe(self._call(q[:, :, :queries], keys, keys), Dense())
        for keys in self._kinds_of_lengths(chunk, longest):
            for seen in (keys, keys - 1):
                queries = min(chunk, seen)
                if seen == keys and grid < queries:  # the other begins off the grid
                    queries -= (queries - seen) % grid
                k = torch.zeros(1, kv_heads, seen, head_dim, **place)
                self._warm_prompt(self._call(q[:, :, :queries], k, k.clone()))
                if queries == seen:
                    k = first[:, :, :seen]
                    self._warm_prompt(self._call(q[:, :, :queries], k, k))

    def _kinds_of_lengths(self, chunk: int, longest: int) -> list[int]:
        """Lengths of prompts, one for each plan: plans go by powers of two of key blocks, and by
        the part of a chunk that momo's spans have. stream looks on at all prompts."""
        traced = set() if self.phases.trace is None else {chunk, longest}
        if self.phases.prefill is None:
            return sorted(traced)
        least, keys = max(3, self.prefill_from), self._momo.block
        ends = [span.end for span in self._momo.spans() if span.end is not None]
        beyond = (0, self._momo.block // 2, chunk // 2)
        found = {least, longest, *(end + more for end in ends for more in beyond)}
        while keys < longest:
            found |= {keys, keys + keys // 2}
            keys *= 2
        return sorted(traced | {keys for keys in found if least <= keys <= longest})

    def _warm_prompt(self, call: AttentionCall) -> None:
        served: Phase = Dense()
        if self.phases.prefill is not None:
            served = self._momo
            served.attend(call)
        if self.phases.trace is not None:
            self.phases.trace.observe(call, served)

    def attend_steps(
        self,
        q: torch.Tensor,
        pages: Pages,
        table: torch.Tensor,
        far: Far,
        out: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
        dense: Callable[[], Any] | None = None,
    ) -> None:
        """The method that decodes, for the `far` ones of rows of one query each, into `out [rows,
        Hq, D]`, like q. Other rows keep what is there, or what `dense` writes there, which runs
        in front of the method, or not at all where the method reads those whole.
        `slots` `[rows]` are where the keys were written that the method has not noted yet. Nothing
        here looks at a length on the host."""
        assert self.state is not None  # asked of a layer that decodes
        call = self._steps_call(q, pages, table, far.lengths, self.state.of(pages.k))
        call.slots = slots
        if dense is not None and far.near is not None and len(q) <= self.rows_whole:
            assert self.phases.decode is not None  # it reads whole
            self.phases.decode.attend_rows(call, far.near, out.unsqueeze(2))
            return
        self._run_steps(call, far.chosen, out, dense)

    @property
    def rows_whole(self) -> int:
        """Up to how many rows of a step the method that decodes serves near ones, too."""
        return 0 if self.phases.decode is None else self.phases.decode.rows_whole

    def _run_steps(
        self,
        call: PagedCall,
        chosen: torch.Tensor,
        out: torch.Tensor,
        dense: Callable[[], Any] | None = None,
    ) -> None:
        phase = self.phases.decode
        assert phase is not None
        if dense is not None:
            dense()
        phase.end_far(phase.begin_far(call), call, chosen, out.unsqueeze(2))

    def _steps_call(
        self,
        q: torch.Tensor,
        pages: Pages,
        table: torch.Tensor,
        lengths: torch.Tensor,
        state: Any,
    ) -> PagedCall:
        more: dict[str, Any] = {"softcap": self.softcap, "sinks": self.sinks, "state": state}
        more |= {"k_scale": pages.k_scale, "v_scale": pages.v_scale}
        return PagedCall(q.unsqueeze(2), pages.k, pages.v, table, lengths, self.scale, **more)

    @property
    def needs_positions(self) -> bool:
        """Whether the method that decodes codes keys by their positions (`LayerState.code`)."""
        return self.phases.decode is not None and self.phases.decode.has_model_basis

    @property
    def notes_in_step(self) -> bool:
        """Whether `attend_steps` notes the keys that a step has written, so that nobody else need
        do so."""
        return self.phases.decode is not None and self.phases.decode.notes_in_step

    def warm_steps(
        self,
        rows: int,
        longest: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page: int,
        fp8: bool = False,
        scaled: bool = True,
        **place,
    ) -> None:
        """Run the method that decodes once for each number of rows up to `rows`, of up to `longest`
        keys, over made-up pages of `page` keys, in `fp8` or not, `scaled` then or not. Plans go by
        the number of rows: 5 to 7 rows beside a prompt have kernels that neither 4 rows nor 8
        have."""
        phase = self.phases.decode
        if phase is None:
            return
        k = torch.zeros(2, kv_heads, page, head_dim, **place)
        pages = Pages(k, k)
        if fp8:
            bytes_, one = k.to(torch.uint8), torch.ones((), dtype=torch.float32, device=k.device)
            pages = Pages(bytes_, bytes_).in_fp8(*((one, one) if scaled else (None, None)))
        assert self.state is not None  # of a layer that decodes
        state: Any = phase.page_state(pages.k, self.state.basis)
        q = torch.zeros(rows, heads, head_dim, **place)
        table = torch.zeros(rows, -(-longest // page), dtype=torch.int32, device=k.device)
        lengths = torch.zeros(rows, dtype=torch.int32, device=k.device)
        none_far = lengths > 0
        nowhere = torch.full((max(rows, *NOTED),), -1, dtype=torch.int64, device=k.device)
        slots = nowhere[:rows] if phase.notes_in_step else None
        for count in range(1, rows + 1):
            some = slice(count)
            if self.rule is not None:
                self.rule.divide(lengths[some])
            call = self._steps_call(q[some], pages, table[some], lengths[some], state)
            call.slots = None if slots is None else slots[some]
            self._run_steps(call, none_far[some], torch.empty_like(q[some]))
            if count <= self.rows_whole:
                phase.attend_rows(call, lengths[some], torch.empty_like(call.q))
            if slots is not None:  # beside a prompt steps note nothing
                call.slots = None
                self._run_steps(call, none_far[some], torch.empty_like(q[some]))
        for count in NOTED:  # of a prompt's chunk, beside steps or not
            if phase.has_model_basis:
                phase.code_pages(pages.k, pages.v, state, nowhere[:count], nowhere[:count])
            else:
                phase.note_pages(pages.k, state, nowhere[:count])
