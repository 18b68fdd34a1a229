"""stream: looks on while another method serves, and tells which key blocks each query block attends
to, in near-linear time.

Beside any method, `trace=Stream()` searches for the `top_k` key blocks with the largest q.k of
every query block and head (`attnplug.ops.stream_mask`) and weighs them
(`attnplug.ops.stream_edges`). Nothing is computed unless `attnplug.trace.record` is on, and what
the model computes stays bit for bit the same.

Asked for by name, `prefill=stream`, it serves: attention over the named blocks alone, with the
softmax over them. That is an approximation, and no fast one.

Source: STREAM (Rosser et al., 2025), docs/papers.md.
"""

import dataclasses
import re
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, Edges, LayerShape
from attnplug.ops import query_sparse_attention, stream_edges, stream_mask
from attnplug.ops.stream.stream_edges import WEIGHTS
from attnplug.ops.stream.stream_mask import BLOCKS, MAX_BRANCHES, SEARCHES
from attnplug.policies.base import MOST, Phase, TracingPhase
from attnplug.policies.dense import apply_sinks, check_open_length

SUBJECTS = ("model", "policy")
_SPANS = re.compile(r"\d{1,9}:(\d{1,9})?(,\d{1,9}:(\d{1,9})?)*")


@dataclasses.dataclass(frozen=True)
class Stream(TracingPhase):
    """A trace of the attention, edge by edge.

    top_k: key blocks that are kept of each query block. block: keys a block. query_block: queries a
    block. weights: what an edge weighs. "score": its largest score. "mass": its share of the named
    blocks' attention. "value": the length of what it adds to the output. of: whose blocks, those
    that the model attends to ("model"), or those that the serving method has picked ("policy"),
    which has blocks of its own. measure: on every so many-th query, how much of dense attention the
    named blocks hold; 0 measures none. search: how the model's blocks are found, from all
    blocks' max and min ("bounds") or by the paper's hierarchical refinement ("branches").

    Three options make a list of the model's blocks shorter than `top_k`. gap: a block stays where
    some query of the query block has a key in it whose logit is at most so far below the logit of
    the query's best listed key; 0 keeps all. budget: the most blocks of a list, as a share of
    those that the query block sees. block_mask: which blocks a list may have at all: "all", "far"
    (without the row's first block, the block of the last query and the block before it), or spans
    of tokens such as "4096:4160" or "0:64,9000:" that a block must overlap.
    """

    top_k: int = 32
    block: int = 64
    query_block: int = 64
    weights: str = "mass"
    of: str = "model"
    measure: int = 0
    search: str = "bounds"
    gap: float = 0.0
    budget: float = 1.0
    block_mask: str = "all"

    name: ClassVar[str] = "stream"
    phases: ClassVar[frozenset[str]] = frozenset({"trace"})
    on_request: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def __post_init__(self) -> None:
        self.check_integers("top_k", "block", "query_block", "measure")
        self.check("top_k", 1 <= self.top_k <= MAX_BRANCHES, f"1 to {MAX_BRANCHES}")
        for option in ("block", "query_block"):
            self.check(option, getattr(self, option) in BLOCKS, ", ".join(map(str, BLOCKS)))
        self.check("weights", self.weights in WEIGHTS, ", ".join(WEIGHTS))
        self.check("of", self.of in SUBJECTS, ", ".join(SUBJECTS))
        self.check("measure", self.measure >= 0, "at least 0")
        self.check("search", self.search in SEARCHES, ", ".join(SEARCHES))
        good = _is_number(self.gap) and 0 <= self.gap <= MOST
        self.check("gap", good, f"a number from 0 to {MOST}")
        good = _is_number(self.budget) and 0 < self.budget <= 1
        self.check("budget", good, "a share above 0, up to 1")
        self.check("block_mask", _is_mask(self.block_mask), "all, far or tokens such as '64:128'")
        for option, whole in (("gap", 0), ("budget", 1), ("block_mask", "all")):
            mine = self.of == "model" or getattr(self, option) == whole
            self.check(option, mine, f"{whole!r} beside of='policy': the serving method has picked")

    def refusal(self, shape: LayerShape) -> str | None:
        return "stream knows no softcap" if shape.softcap else super().refusal(shape)

    def note(self, shape: LayerShape) -> str:
        return (
            f"attends to at most {self.top_k} blocks of {self.block} keys, an approximation: "
            "stream(measure=16) as trace tells how much they hold"
        )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention over the named blocks alone."""
        check_open_length(self.name, call.q.shape[2], self.query_block)
        options, blocks = self._options(call), self._blocks()
        index, _ = self._find(call, options)
        # 0 times NaN is NaN, for the queries of a block that do not see the key; _poison shows it
        # to those that do.
        v = torch.nan_to_num(call.v, nan=0.0, posinf=0.0, neginf=0.0)
        _, out, lse = stream_edges(
            call.q, call.k, v, index, scale=call.scale, output=True, **blocks, **options
        )
        out = apply_sinks(out, lse, call.sinks)
        return out + _poison(call, options["start"]).to(out.dtype)

    def observe(self, call: AttentionCall, served: Phase) -> Edges | None:
        options, blocks = self._options(call), self._blocks()
        if self.of == "policy":
            reads = served.reads(call)
            if reads is None:
                return None
            index, score = reads.index, None
            blocks = {"query_block": reads.query_block, "block": reads.block}
        else:
            index, score = self._find(call, options)
        captured = None
        if score is not None and self.weights == "score" and not self.measure:
            weight = score
        else:
            weight, lse = self._weigh(call, index, options | blocks)
            if lse is not None:
                captured = self._captured(call, lse, options)
        return Edges(index, weight, **blocks, weights=self.weights, captured=captured)

    def _find(
        self, call: AttentionCall, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's blocks, best first, and their scores `[B,Hq,NQ,top_k]`."""
        budget = block_mask = None
        if self.budget < 1:
            seen = _last_positions(call, self.query_block) // self.block + 1
            budget = (seen * self.budget - 1e-9).ceil().long()  # 0.1 times 30 is a little above 3
        if self.block_mask != "all":
            block_mask = self._allowed(call)
        return stream_mask(
            call.q,
            call.k,
            top_k=self.top_k,
            budget=budget,
            block_mask=block_mask,
            search=self.search,
            gap=self.gap / call.scale if self.gap else None,
            **self._blocks(),
            **options,
        )

    def _allowed(self, call: AttentionCall) -> torch.Tensor:
        """The blocks that lists may have, bool `[B or 1,1,NQ,NK]`."""
        blocks = -(-call.k.shape[2] // self.block)
        r = torch.arange(blocks, device=call.k.device)
        if self.block_mask == "far":
            own = _last_positions(call, self.query_block) // self.block
            return (r > 0) & (r < own[..., None] - 1)
        allowed = torch.zeros(blocks, dtype=torch.bool, device=call.k.device)
        for begin, end in _spans_of(self.block_mask):
            allowed |= (r >= begin // self.block) & (r * self.block < end)
        return allowed.expand(1, 1, -(-call.q.shape[2] // self.query_block), -1)

    def _weigh(
        self, call: AttentionCall, index: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The edges' weights, and where the captured share is wanted the log-sum-exps over the
        named blocks `[B,Hq,T]`."""
        found = stream_edges(
            call.q,
            call.k,
            call.v,
            index,
            scale=call.scale,
            weights=self.weights,
            output=self.measure > 0,
            **options,
        )
        return (found[0], found[2]) if isinstance(found, tuple) else (found, None)

    def _captured(
        self, call: AttentionCall, lse: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """`[B,Hq,2]`: the shares of dense attention that the named blocks hold, summed over every
        `measure`-th query, and how many these are."""
        _, dense, _, _ = query_sparse_attention(
            call.q,
            call.k,
            call.v,
            scale=call.scale,
            gamma=self.measure,
            top_k=0,
            exact_k=0,
            **options,
        )
        batch, heads, queries = lse.shape
        length = call.k.shape[2] if call.lengths is None else call.lengths
        start = options["start"]
        first = torch.zeros(1, dtype=torch.int64, device=lse.device)
        if start is not None:
            first = (start - (length - queries)).clamp(min=0)
        rows = first[:, None] + self.measure * torch.arange(dense.shape[2], device=lse.device)
        at = rows.clamp(max=queries - 1)[:, None].expand(batch, heads, -1)
        real = (rows < queries)[:, None] & (dense > -torch.inf)
        share = (lse.gather(2, at) - dense).exp()
        share = torch.where(real, share, 0.0)
        return torch.stack([share.sum(-1), real.sum(-1).float()], -1)

    def _blocks(self) -> dict[str, int]:
        return {"query_block": self.query_block, "block": self.block}

    def _options(self, call: AttentionCall) -> dict[str, Any]:
        return {
            "lengths": call.lengths,
            "start": call.first_key,
            "key_mask": call.key_mask,
        }


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _spans_of(text: str) -> list[tuple[int, int]]:
    """The tokens of each span, from and up to."""
    ends = [span.split(":") for span in text.split(",")]
    return [(int(begin), int(end) if end else MOST * max(BLOCKS)) for begin, end in ends]


def _is_mask(text: object) -> bool:
    if not isinstance(text, str):
        return False
    if text in ("all", "far"):
        return True
    return bool(_SPANS.fullmatch(text)) and all(begin < end for begin, end in _spans_of(text))


def _last_positions(call: AttentionCall, query_block: int) -> torch.Tensor:
    """`[B or 1,1,NQ]`: the last query of each query block, counted from its row's first key."""
    queries, size = call.q.shape[2], call.k.shape[2]
    at = torch.arange(0, queries, query_block, device=call.q.device)
    none = torch.zeros(1, dtype=torch.int64, device=call.q.device)
    low = (none if call.first_key is None else call.first_key.long())[:, None, None]
    length = (none + size if call.lengths is None else call.lengths.long())[:, None, None]
    skipped = (low - (length - queries)).clamp(min=0)
    end = (skipped + at + query_block).clamp(max=queries)
    return length - queries + end - 1 - low


def _poison(call: AttentionCall, start: torch.Tensor | None) -> torch.Tensor:
    """`[B,Hq,T,1]`: NaN where a query sees a key or value that is not finite, else 0. Dense
    attention would show it; a block that is not read would hide it."""
    sums = call.k.sum(-1, dtype=torch.float32) + call.v.sum(-1, dtype=torch.float32)
    bad = ~sums.isfinite()
    at = torch.arange(bad.shape[2], device=bad.device)
    if call.key_mask is not None:
        bad = bad & call.key_mask[:, None]
    if start is not None:
        bad = bad & (at >= start[:, None])[:, None]
    queries = call.q.shape[2]
    length = bad.shape[2] if call.lengths is None else call.lengths[:, None]
    position = (length - queries + at[None, :queries]).clamp(min=0)
    seen = bad.int().cummax(-1).values.bool()
    seen = seen.gather(2, position[:, None].expand(*seen.shape[:2], -1))
    group = call.q.shape[1] // call.k.shape[1]
    return torch.where(seen, torch.nan, 0.0).repeat_interleave(group, 1)[..., None]
