"""momo: block-sparse prefill that measures once and masks once.

A query-sparse pass looks at all keys from every gamma-th query and scores the key blocks. The rows
of a query block choose the ones that matter to them. A block-sparse pass attends from every query,
and the prompt's last queries attend to everything. On request the query-sparse rows are dense and
correct the others by their difference (delta correction):

    O[i] = O_*[i] + delta (O_g[i // gamma] - O_*[(i // gamma) gamma])

Source: "Measure Once, Mask Once: Delta Refined Block Sparse Attention" (docs/papers.md).
Decode is another phase's business.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape, Reads
from attnplug.models.cache import PlugLayer
from attnplug.models.sync import may_sync
from attnplug.ops import (
    block_sparse_attention,
    delta_correct,
    measure_blocks,
    merge_block_rows,
    query_sparse_attention,
)
from attnplug.ops.common.checks import WIDE_HEAD_DIMS
from attnplug.ops.common.define import refuse_gradients
from attnplug.ops.momo.merge_block_rows import MAX_ENTRIES
from attnplug.ops.momo.query_sparse_attention import MAX_EXACT, is_too_wide
from attnplug.policies._measured_rows import MeasuredRows, joined
from attnplug.policies._momo_defaults import KINDS, default_tail, pays_from
from attnplug.policies._prefill_op import METHODS, prefill_rows
from attnplug.policies._prompt_parts import (
    Span,
    cut_at_spans,
    ends_before,
    first_query,
    groups_of_heads,
    last_queries,
    rows_alone,
)
from attnplug.policies._reads import query_positions, read_all, read_blocks, stack_reads
from attnplug.policies.base import MOST
from attnplug.policies.crossover import DenseBelow
from attnplug.policies.dense import Dense, apply_sinks, check_open_length, exporting, known_below

# A chunk that nobody says the whole prefill of is long where the keys that it sees are many, and
# its queries these: fewer are a question in a conversation. Not measured.
LEAST_CHUNK = 1024
# gamma=None: what it is for the prompt's first FAR queries, and for those behind them, where the
# measuring pass is most of the time. By a query's place, so that chunks measure what the whole
# prompt does (docs/log/momo.md).
FAR = 65536
NEAR_GAMMA, FAR_GAMMA = 16, 32
# top_k=None: what it is for the prompt's first NEAR queries, and for those behind them. 64 blocks
# are a quarter of the keys at 16K, as 128 are at 32K.
NEAR = 16384
NEAR_TOP_K, FAR_TOP_K = 64, 128
# The row lists of so many heads are in memory at a time (at 1M tokens, 32 heads: a quarter).
LIST_BYTES = 600 << 20
LITERALS = (bool, int, float, str, type(None))  # options that a policy's text can hold


@dataclasses.dataclass(frozen=True)
class Momo(DenseBelow):
    """Block-sparse prefill with a mask measured by its own query-sparse pass.

    gamma: every gamma-th query is measured. None: every 16th of the first 65,536, every 32nd of
    those behind them. Traced and captured code counts a chunk over a static cache from its own
    first query. It measures every 16th of all where there is padding.
    block: keys a block (beta). query_block: queries that share a mask (chi). top_k: blocks kept per
    query block. None: 64 of the first 16,384 queries, 128 of those behind them. Code that knows no
    query's place, and a padded batch that is not run row by row, keep 128 of all.
    selection: the rows of a query block choose them together ("joint"), or every row keeps a list
    of top_k online. Such lists are made by the paper's "exact", "tournament" or "estimated"
    selection (the last one exact for exact_k of them). merge says how they vote: by summed
    attention mass, or by mean score as the paper does.
    sink: first key blocks that are always read. window: keys before the query block always read.
    delta: how much of a measured row's difference from its sparse self its followers get; 1 is the
    paper's correction, 0 leaves them block-sparse. Measured rows are dense at any. With None they
    are block-sparse, too: with "joint" the measuring pass then needs no values, and half of the
    FLOPs.
    tail: the prompt's last queries, which are dense. What a prompt asks comes last, and a fact that
    no other query looks at is in no list. Of chunks that nobody knows the prompt of, the last of
    each. None: 1,024 of prompts of 16,384 tokens or more, else 128.
    min_tokens: tokens of a prefill, all its chunks, below which dense attention runs instead. None
    is the crossover measured on the kind of device, a multiple of the budget top_k x block and at
    least CROSSOVER_FLOOR. Without a top_k that of the first queries counts where no query of so
    short a prompt lists more.
    """

    gamma: int | None = None
    block: int = 64
    query_block: int = 128
    top_k: int | None = None
    exact_k: int = 8
    selection: str = "joint"
    merge: str = "mass"
    sink: int = 1
    window: int = 0
    delta: float | None = None
    tail: int | None = None
    min_tokens: int | None = None

    _text: ClassVar[str | None] = None  # of each policy its own; no option
    _least: ClassVar[dict[str, int]] = {}  # alike: the measured crossovers
    # Of this class alone: a subclass whose rows are cut and attended to as momo's says so again.
    rows_as_momo: ClassVar[bool] = True

    name: ClassVar[str] = "momo"
    phases: ClassVar[frozenset[str]] = frozenset({"prefill"})
    head_dims: ClassVar[tuple[int, ...]] = WIDE_HEAD_DIMS

    def __post_init__(self) -> None:
        self.check_integers("block", "query_block", "exact_k", "sink", "window")
        count = self.gamma is None or (type(self.gamma) is int and self.gamma >= 1)
        self.check("gamma", count, "None or an integer, at least 1")
        least, most = (self.gamma, self.gamma) if self.gamma else (NEAR_GAMMA, FAR_GAMMA)
        self.check("block", self.block in (16, 32, 64, 128), "16, 32, 64 or 128")
        kept = self.top_k is None or (type(self.top_k) is int and 1 <= self.top_k <= 1024)
        self.check("top_k", kept, "None or an integer, 1 to 1024")
        fewest, widest = self._blocks(0), self._most_blocks
        self.check("exact_k", self.exact_k >= 0, "at least 0")
        exact = min(fewest, MAX_EXACT)
        fits = self.selection != "estimated" or self.exact_k <= exact  # nobody else reads it
        self.check("exact_k", fits, f"0 to {exact} here (top_k={fewest})")
        self.check(
            "query_block",
            self.query_block > 0 and self.query_block % most == 0,
            f"a multiple of gamma={self.gamma}" if self.gamma else f"a multiple of {most}",
        )
        entries = self.query_block // least * widest
        self.check(
            "top_k",
            self.selection == "joint" or entries <= MAX_ENTRIES,
            f"query_block / gamma * top_k = {entries} to be at most {MAX_ENTRIES}",
        )
        self.check("sink", self.sink >= 0, "at least 0")
        self.check("window", self.window >= 0, "at least 0")
        tail = self.tail is None or (type(self.tail) is int and 0 <= self.tail <= MOST)
        self.check("tail", tail, f"None or an integer, 0 to {MOST}")
        algorithms = ("joint", "exact", "tournament", "estimated")
        self.check("selection", self.selection in algorithms, ", ".join(algorithms))
        merges = ("mass", "mean")
        self.check("merge", self.merge in merges, ", ".join(merges))
        joint = self.selection == "joint"
        self.check("merge", not joint or self.merge == "mass", "'mass' where selection='joint'")
        share = self.delta is None or (type(self.delta) in (int, float) and 0 <= self.delta <= 1)
        self.check("delta", share, "0 to 1, or None")
        self.check_min_tokens()
        # What compiled code hands to its op, which parses it.
        known = vars(type(self)).get("rows_as_momo", False)
        plain = all(type(value) in LITERALS for value in vars(self).values())
        object.__setattr__(self, "_text", str(self) if known and plain else None)
        spans = self._blocks(0), self._blocks(NEAR), self.block, NEAR
        least = {kind: max(self.least_tokens, pays_from(kind, *spans)) for kind in KINDS}
        object.__setattr__(self, "_least", least)  # each layer asks for it in each call

    def measured_crossover(self, kind: str) -> int:
        return self._least[kind]

    def density(self, tokens: int) -> float:
        """The share of a causal prefill's keys that a query reads, as the paper counts it (its
        equation 9 is 1 less this). It counts the listed blocks, the sink and the window. It also
        counts the tail and the dense rows of a correction, if there is one, both spread over all
        queries."""
        spans = self.spans()
        measured = sum(span.queries(tokens) / span.gamma for span in spans)
        dense = self.tail_of(tokens) + (0 if self.delta is None else measured)
        listed = sum(span.queries(tokens) * span.top_k for span in spans) / tokens
        read = self.block * (listed + self.sink) + self.window + dense
        return min(1.0, read / tokens)

    def spans(self, placed: bool = True) -> list[Span]:
        """What queries are measured by, as their place in the prompt has it. Not `placed`: by a
        place in a call that may begin anywhere, so that all list the most blocks."""
        changes = [NEAR] if self.top_k is None and placed else []
        changes += [] if self.gamma else [FAR]
        begins = [0, *sorted(changes)]
        ends = [*begins[1:], None]
        made = []
        for begin, end in zip(begins, ends, strict=True):
            blocks = self._blocks(begin) if placed else self._most_blocks
            made.append(Span(begin, end, self._gamma(begin), blocks))
        return made

    def _gamma(self, place: int) -> int:
        return self.gamma or (NEAR_GAMMA if place < FAR else FAR_GAMMA)

    def _blocks(self, place: int) -> int:
        return self.top_k or (NEAR_TOP_K if place < NEAR else FAR_TOP_K)

    @property
    def _most_blocks(self) -> int:
        return self.top_k or max(NEAR_TOP_K, FAR_TOP_K)

    def note(self, shape: LayerShape) -> str:
        least = self.crossover(shape.device)
        tokens = max(shape.told_tokens, least)
        density = f"density {self.density(tokens):.1%} at {tokens:,}"
        short = f"dense in prefills below {least:,} tokens{self.origin(shape.device)}"
        told = density if tokens <= (shape.positions or tokens) else ""  # it never serves the model
        return "; ".join(filter(None, (short if least else "", told)))

    def query_grid(self) -> int:
        return self.query_block

    def is_short(self, call: AttentionCall, limit: int | None = None) -> bool:
        """Whether dense attention is faster. The prefill that the call is a part of is shorter than
        `limit`, the crossover, as far as the host knows, and so are the keys that it sees."""
        queries, limit = call.q.shape[2], limit or self.crossover(call.q.device)
        if not known_below(queries, limit):
            return not self._knows_places(call) and known_below(queries, self._unplaced(call))
        if torch.compiler.is_compiling() or not isinstance(call.state, PlugLayer):
            return True
        seen = call.state.counted if queries >= LEAST_CHUNK else 0
        return max(call.state.prefill_tokens, seen) < limit

    def _knows_places(self, call: AttentionCall) -> bool:
        """Whether the call's queries list by their places in the prompt (`_parts`)."""
        if exporting():
            return False
        if may_sync(call.q.is_cuda) or (call.start is None and first_query(call) is not None):
            return True
        return call.k.shape[2] <= NEAR  # last: code is compiled anew where a size is compared

    def _unplaced(self, call: AttentionCall) -> int:
        """The crossover of code that knows no places: all of its queries list the most blocks."""
        if self.min_tokens is not None or self.top_k is not None:
            return self.crossover(call.q.device)
        kind = "cpu" if call.q.device.type == "cpu" else "cuda"
        return pays_from(kind, self._most_blocks, self._most_blocks, self.block, NEAR)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        queries, width = call.q.shape[2:]
        least = self.crossover(call.q.device)
        if self.is_short(call, least):
            return self.leave_to_dense(
                call, lambda: f"{queries:,} queries, and it serves from {least:,} on"
            )
        if is_too_wide(call.q):
            return self.leave_to_dense(
                call, lambda: f"heads of {width} in float32 do not fit its kernels, 16-bit ones do"
            )
        check_open_length(self.name, queries, self.query_block)
        tail = self._tail(call)
        if known_below(queries, tail + 1):
            return self.leave_to_dense(call, lambda: f"its tail of {tail:,} queries is dense")
        out = self._attend_as_one(call)
        if tail > 0:
            out[:, :, -tail:] = Dense().attend(last_queries(call, tail))
        return out

    def tail_of(self, tokens: int) -> int:
        """How many of a prompt's queries are dense, its last ones."""
        return default_tail(tokens) if self.tail is None else self.tail

    def _tail(self, call: AttentionCall) -> int:
        """How many of the call's queries are dense, its last ones."""
        follow, state, queries = call.follow, call.state, call.q.shape[2]
        if follow is None:  # a chunk of a prompt that nobody knows
            return min(self.tail_of(0), queries)
        tokens = queries + follow
        if not torch.compiler.is_compiling() and isinstance(state, PlugLayer):
            follow = max(follow, state.prefill_tokens - state.counted)
            tokens = max(tokens, state.prefill_tokens)
        return min(max(0, self.tail_of(tokens) - follow), queries)

    def _attend_as_one(self, call: AttentionCall) -> torch.Tensor:
        """`_attend_rows`; in compiled code as one op, so that no way to cut a prompt is a graph of
        its own."""
        if self._text is None or exporting() or not torch.compiler.is_compiling():
            return self._attend_rows(call)
        refuse_gradients(self.name, call.q, call.k, call.v, call.sinks)
        rows = call.sinks, call.lengths, call.start, call.key_mask
        return prefill_rows(call.q, call.k, call.v, *rows, call.scale, call.softcap, self._text)

    def _attend_rows(self, call: AttentionCall) -> torch.Tensor:
        rows = self._rows(call)
        if rows is None:
            return self._attend_sparse(call)
        out = call.q.new_zeros(call.q.shape)
        for row, alone in enumerate(rows):
            if alone is not None:
                out[row : row + 1, :, -alone.q.shape[2] :] = self._attend_sparse(alone)
        return out

    def _rows(self, call: AttentionCall) -> list[AttentionCall | None] | None:
        """The rows of a padded batch alone, where a span ends at a place of each; else None."""
        end = self.spans()[0].end
        if end is None or call.start is None or not may_sync(call.q.is_cuda):
            return None
        return None if ends_before(call, end) else rows_alone(call)

    def _attend_sparse(self, call: AttentionCall) -> torch.Tensor:
        if self.delta is None:
            sparse, lse = self._attend_blocks(call, self.select(call).blocks)
            return sparse if call.sinks is None else apply_sinks(sparse, lse, call.sinks)
        parts = [self._attend_corrected(*part) for part in self._parts(call)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _attend_corrected(self, call: AttentionCall, by: Span) -> torch.Tensor:
        rows = self._measure(call, by)
        assert self.delta is not None
        correction = {"gamma": by.gamma, "weight": self.delta}
        if call.sinks is None:
            return self._attend_blocks(call, rows.blocks, rows=rows.out, **correction)[0]
        return delta_correct(
            apply_sinks(*self._attend_blocks(call, rows.blocks), call.sinks),
            apply_sinks(rows.out, rows.lse, call.sinks),
            lengths=call.lengths,
            start=call.start,
            kv_length=call.k.shape[2],
            **correction,
        )

    def _attend_blocks(
        self, call: AttentionCall, blocks: torch.Tensor, **correction: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return block_sparse_attention(
            call.q,
            call.k,
            call.v,
            blocks,
            query_block=self.query_block,
            block=self.block,
            sink=self.sink,
            window=self.window,
            start=call.start,
            **call.options,
            **correction,
        )

    def reads(self, call: AttentionCall) -> Reads | None:
        if self.is_short(call):
            return None
        rows = self._rows(call)
        if rows is None or all(row is None for row in rows):  # all padding: nothing is read
            reads = self._reads_sparse(call)
        else:
            alone = [row if row is None else self._reads_sparse(row) for row in rows]
            reads = stack_reads(alone, -(-call.q.shape[2] // self.query_block))
        return read_all(call, reads, self._tail(call))

    def _reads_sparse(self, call: AttentionCall) -> Reads:
        return read_blocks(
            call,
            self.select(call).blocks,
            self._first_local(call),
            query_block=self.query_block,
            block=self.block,
            sink=self.sink,
            most=(self.query_block - 1 + self.window) // self.block + 2,
        )

    def budgets(self, call: AttentionCall) -> torch.Tensor:
        """`[NQ]` int64: how many blocks each query block of the call may list."""
        blocks = [
            call.q.new_full(
                (-(-part.q.shape[2] // self.query_block),), span.top_k, dtype=torch.int64
            )
            for part, span in self._parts(call)
        ]
        return torch.cat(blocks)

    def select(self, call: AttentionCall) -> MeasuredRows:
        """The query-sparse pass and the block mask measured by it."""
        return joined([self._measure(*part) for part in self._parts(call)], 2)

    def _parts(self, call: AttentionCall) -> list[tuple[AttentionCall, Span]]:
        """The call's queries in order, cut where a span ends, on the grid of query blocks. That of
        a padded row begins anywhere: a batch of them is not cut."""
        spans, unplaced = self.spans(), self.spans(placed=False)
        end = spans[0].end
        if end is None or exporting():
            return [(call, unplaced[0])]
        if call.start is not None:
            return [(call, spans[0] if ends_before(call, end) else unplaced[0])]
        if call.k.shape[2] <= end:
            return [(call, spans[0])]
        first = first_query(call)
        if first is None:  # counted from the call's own, whose blocks may be those of a later one
            return cut_at_spans(call, 0, unplaced, self.query_block)
        return cut_at_spans(call, first, spans, self.query_block)

    def _measure(self, call: AttentionCall, by: Span) -> MeasuredRows:
        if self.selection == "joint":
            return self._select_jointly(call, by)
        return joined([self._select(part, by) for part in self._by_heads(call, by)], 1)

    def _select_jointly(self, call: AttentionCall, by: Span) -> MeasuredRows:
        return MeasuredRows(
            *measure_blocks(
                call.q,
                call.k,
                None if self.delta is None else call.v,
                self._first_local(call),
                gamma=by.gamma,
                block=self.block,
                query_block=self.query_block,
                top_k=by.top_k,
                sink=self.sink,
                start=call.start,
                **call.options,
            )
        )

    def _by_heads(self, call: AttentionCall, by: Span) -> list[AttentionCall]:
        """The call in groups of KV heads whose row lists (8 bytes a slot) fit LIST_BYTES."""
        (batch, heads_q, queries, _), heads = call.q.shape, call.k.shape[1]
        nbytes = 8 * batch * heads_q * (queries + by.gamma - 1) // by.gamma * by.top_k
        each = heads if nbytes <= LIST_BYTES else max(1, heads * LIST_BYTES // nbytes)
        return groups_of_heads(call, each)

    def _select(self, call: AttentionCall, by: Span) -> MeasuredRows:
        out, lse, index, score = query_sparse_attention(
            call.q,
            call.k,
            call.v,
            gamma=by.gamma,
            block=self.block,
            top_k=by.top_k,
            exact_k=min(self.exact_k, by.top_k),
            algorithm=self.selection,
            start=call.start,
            **call.options,
        )
        blocks = merge_block_rows(
            index,
            score,
            lse,
            rows=self.query_block // by.gamma,
            trim=by.top_k,
            merge=self.merge,
            sink=self.sink,
            before=self._first_local(call),
        )
        return MeasuredRows(out, lse, blocks)

    def _first_local(self, call: AttentionCall) -> torch.Tensor:
        """`[1 or B,NQ]` int32: the first key block of each query block's local part, which is read
        anyway, as block_sparse_attention counts it."""
        position = query_positions(call, self.query_block)
        return ((position - self.window).clamp(min=0) // self.block).to(torch.int32)


METHODS[Momo.name] = Momo
