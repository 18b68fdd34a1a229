"""gvr: decode that reads the best tokens, found exactly among all of them at each step.

A step scores every cached token of each KV head from INT8 keys. It takes the exact top k of these
scores (Guess-Verify-Refine), and attends to the sink, the window and the picks:

    keep = tokens 0..sink-1, the last `window`, and the top k of the others by max_g q[g] . k

Source: "Guess-Verify-Refine" (docs/papers.md); token selection as in DeepSeek's sparse
attention, with the model's own keys in place of a trained indexer. Prefill is another phase's
business.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape, PagedCall, StepReads
from attnplug.ops import (
    gather_tokens_attention,
    page_codes,
    score_tokens,
    top_tokens,
    topk,
)
from attnplug.ops.gvr.page_codes import PageCodes, empty_page_codes
from attnplug.ops.gvr.score_tokens import score_lengths
from attnplug.ops.gvr.topk import MAX_K
from attnplug.policies._few_queries import asks_for_few
from attnplug.policies._gvr_layer import GvrLayer
from attnplug.policies.crossover import PagedDenseBelow

# A cache smaller than this many times the tokens that a step keeps is read whole, and one below so
# many tokens in any case. On an H200 a layer's step alone pays from about 64K on, but a whole model
# of 7B is slower than dense at 128K (0.98x) and faster at 1M: its lines cross at about 150K.
# On a CPU it was slower at every length that was tried, up to 32,768; it waits as long as sketch.
CROSSOVER_FACTOR = 4
CROSSOVER_FLOOR = {"cuda": 163840, "cpu": 524288}
# Of the queries that a program of the scores holds: those of a KV head times the head dimension.
MOST_NUMBERS = 128 * 128


@dataclasses.dataclass(frozen=True)
class Gvr(PagedDenseBelow):
    """Token-sparse decode with an exact selection.

    k: tokens that each KV head picks at each step. sink: first tokens that are always read.
    window: last tokens that are always read, the query's own included. min_tokens: caches below so
    many tokens are read whole, by `dense`. None is a multiple of what a step keeps, but not below a
    floor for the kind of device.
    """

    k: int = 2048
    sink: int = 16
    window: int = 256
    min_tokens: int | None = None

    name: ClassVar[str] = "gvr"
    layer_type: ClassVar[type] = GvrLayer
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __post_init__(self) -> None:
        self.check_integers("k", "sink", "window")
        self.check("k", 1 <= self.k <= MAX_K, f"1 to {MAX_K}")
        self.check("sink", self.sink >= 0, "at least 0")
        self.check("window", self.window >= 1, "at least 1, the query's own token")
        self.check_min_tokens()

    @property
    def kept(self) -> int:
        """The most tokens that a step reads, of a row that is long enough."""
        return self.sink + self.window + self.k

    def step_reads(self, tokens: int, head_dim: int, room: int = 0) -> StepReads:
        return StepReads(min(self.kept, tokens), tokens * (head_dim + 4))  # INT8, a float32 scale

    @property
    def scales(self) -> bool:
        return True

    def measured_crossover(self, kind: str) -> int:
        return max(CROSSOVER_FLOOR[kind], CROSSOVER_FACTOR * self.kept)

    def note(self, shape: LayerShape) -> str:
        tokens = shape.told_tokens
        density = f", {min(1.0, self.kept / tokens):.1%} of {tokens:,}"
        dense = self.dense_caches(shape.device)
        return f"reads {self.kept:,} tokens{density}, and INT8 keys to choose them; {dense}"

    def cache_layer(self, max_length: int) -> GvrLayer:
        return GvrLayer(max_length, self.k, self.kept, self.serves)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self._own_layer(call)
        if layer is None:
            return self.leave_to_dense(call)
        where = {"lengths": call.lengths, "start": call.first_key, "key_mask": call.key_mask}
        assert layer.codes is not None and layer.scales is not None  # _own_layer has looked
        return self._step(call, PageCodes(layer.codes, layer.scales), where)

    def serves_few(self, call: AttentionCall) -> bool:
        (_, heads, queries, width), kv_heads = call.q.shape, call.k.shape[1]
        if not asks_for_few(self, call) or queries * (heads // kv_heads) * width > MOST_NUMBERS:
            return False
        return self._own_layer(call) is not None

    def _step(
        self, call: AttentionCall | PagedCall, keys: PageCodes, where: dict[str, Any]
    ) -> torch.Tensor:
        """The output of a step, or of a few queries; `where` says which keys are the rows'."""
        options: dict[str, Any] = {"sink": self.sink, "window": self.window, **where}
        picks = self._best(call, keys, options)
        out, _ = gather_tokens_attention(
            call.q,
            call.k,
            call.v,
            picks,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            **options,
        )
        return out

    def _best(
        self, call: AttentionCall | PagedCall, keys: PageCodes, options: dict[str, Any]
    ) -> torch.Tensor:
        """The picks of each query, int32 `[B,Hkv,T,k]`. Where it has fewer than k others, -inf is
        picked too; attention passes over those. Neither the scale nor the softcap changes an
        order."""
        shape = len(call.q), call.k.shape[1], call.q.shape[2], self.k
        if options.get("table") is None:
            return top_tokens(call.q, *keys, self.k, **options)[0].view(shape)
        scores = score_tokens(call.q, *keys, **options)
        rows = score_lengths(call.lengths, shape[1])
        return topk(scores, self.k, lengths=rows)[0].view(shape)

    def page_state(self, k: torch.Tensor, basis: Any = None) -> PageCodes:
        return empty_page_codes(k)

    def page_share(self, itemsize: int) -> float:
        least = 64  # elements of a head: the fewer, the more a scale counts
        return (least + 4) / (2 * least * itemsize)

    def note_pages(self, k: torch.Tensor, state: PageCodes | None, slots: torch.Tensor) -> None:
        if state is not None:
            page_codes(k, *state, slots)

    def attend_far(self, call: PagedCall) -> torch.Tensor:
        return self._step(call, call.state, {"lengths": call.lengths, "table": call.table})

    def _own_layer(self, call: AttentionCall) -> GvrLayer | None:
        """The call's cache layer if its codes are those of the call's keys, else None: a small
        cache, one that this method did not make, or another layer's (Gemma 3n's share some)."""
        layer, size = call.state, call.k.shape[2]
        if not isinstance(layer, GvrLayer) or not self.serves(len(call.q), size, call.q.device):
            return None
        own = layer.keys is call.k and layer.k == self.k and layer.codes is not None
        return layer if own else None
