"""gather: decode whose cost does not depend on the context.

A step reads the sink, the last blocks and, of the blocks between, the best k of each KV head,
chosen by summaries of their keys that live beside the cache:

    keep = blocks 0..sink-1, the last `local`, and the top k of the others by score

Source: "Attention Pays Its Bill" (docs/papers.md); Quest's bounds (Tang et al., 2024).
Prefill is another phase's business.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape, Reads
from attnplug.ops import gather_attention, gather_decode, select_blocks, tiered_decode
from attnplug.ops.common.checks import BLOCKS
from attnplug.ops.gather.select_blocks import MAX_BLOCKS, SCORINGS
from attnplug.policies._gather_layers import GatherLayer, HostGatherLayer
from attnplug.policies._reads import query_positions, read_blocks
from attnplug.policies.base import Phase, check_option
from attnplug.policies.dense import Dense

# A cache smaller than this many times the keys that a step keeps is read whole, and one below so
# many tokens in any case: where whole models' steps are as fast as dense's at batch 1 on two
# shapes, of which that with four KV heads decides (bench/results/e2e_gather.json).
CROSSOVER_FACTOR = {"cuda": 10, "cpu": 2}
CROSSOVER_FLOOR = {"cuda": 32768, "cpu": 4096}
BOUNDS = ("int8", "exact")
INT8_FROM = 16384  # tokens of a cache whose bounds are INT8 unless told otherwise
RESIDENT = 256  # blocks of each KV head that a cache in host memory keeps on the GPU


@dataclasses.dataclass(frozen=True)
class Gather(Phase):
    """Decode over a keep set of constant size.

    k: distant blocks that each KV head reads; 0 is a sliding window. block: keys a block. sink:
    first blocks that are always read. local: last blocks that are always read, the query's own
    included. scoring: how a block's summary ranks it, by an upper bound of its keys' scores
    ("bounds"), by the attention it is expected to get ("estimate"), or by its mean key ("mean").
    min_tokens: caches below so many tokens are read whole, by `dense`; None is a multiple of the
    keep set, but not below a floor for the kind of device. kv: where keys and values live, "gpu" or
    "host" (pinned memory, read over the link). resident: blocks of each KV head that a cache in
    host memory keeps on the GPU beside the last; None is 256, or what a step wants where that is
    more. bounds: what the bounds are kept as, "int8", codes rounded outwards, or "exact", the keys'
    own dtype; None is "int8" in caches of many tokens. The summaries of other scorings are exact.
    """

    k: int = 32
    block: int = 128
    sink: int = 1
    local: int = 4
    scoring: str = "bounds"
    min_tokens: int | None = None
    kv: str = "gpu"
    resident: int | None = None
    bounds: str | None = None

    name: ClassVar[str] = "gather"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})
    takes_pending: ClassVar[bool] = True

    def __post_init__(self) -> None:
        def check(option: str, valid: bool, needed: str) -> None:
            check_option(self.name, option, getattr(self, option), valid, needed)

        for option in ("k", "block", "sink", "local"):
            check(option, type(getattr(self, option)) is int, "an integer")
        check("k", 0 <= self.k <= MAX_BLOCKS, f"0 to {MAX_BLOCKS}")
        check("block", self.block in BLOCKS, ", ".join(map(str, BLOCKS)))
        check("sink", self.sink >= 0, "at least 0")
        check("local", self.local >= 1, "at least 1, the query's own block")
        check("scoring", self.scoring in SCORINGS, ", ".join(SCORINGS))
        tokens = self.min_tokens
        valid = tokens is None or (type(tokens) is int and tokens >= 0)
        check("min_tokens", valid, "None or an integer, at least 0")
        check("bounds", self.bounds in (None, *BOUNDS), "None, 'int8' or 'exact'")
        check("kv", self.kv in ("gpu", "host"), "'gpu' or 'host'")
        if self.resident is not None:
            check("resident", self.kv == "host", "kv='host'; a cache on the GPU is all there")
            enough = type(self.resident) is int and self.resident >= self.sink + self.k
            check("resident", enough, f"an integer, at least sink + k = {self.sink + self.k}")

    def crossover(self, device: torch.device) -> int:
        """Tokens of a cache below which dense attention runs on such a device."""
        if self.min_tokens is not None:
            return self.min_tokens
        kept = (self.sink + self.local + self.k) * self.block
        kind = "cpu" if device.type == "cpu" else "cuda"
        return max(CROSSOVER_FLOOR[kind], CROSSOVER_FACTOR[kind] * kept)

    def note(self, shape: LayerShape) -> str:
        kept, tokens = self.sink + self.local + self.k, self.crossover(shape.device)
        small = f" below {tokens:,} tokens and in those" if tokens else ""
        where = ""
        if self.kv == "host":
            where = f" from host memory, {self._slots} blocks a KV head cached on the device"
        return (
            f"reads {kept} blocks of {self.block} keys{where}; dense in caches{small} that "
            "attnplug did not make for it"
        )

    @property
    def _slots(self) -> int:
        return max(RESIDENT, self.sink + self.k) if self.resident is None else self.resident

    def cache_layer(self, max_length: int) -> GatherLayer:
        form = self.summary_form(max_length)
        if self.kv == "gpu":
            return GatherLayer(max_length, self.block, form)
        return HostGatherLayer(
            max_length, self.block, form, self.local, self._slots, self.crossover
        )

    def summary_form(self, tokens: int) -> tuple[int, bool]:
        """(parts of a summary, whether they are INT8 codes) in a cache of so many tokens."""
        int8 = self.bounds == "int8"
        if self.bounds is None:
            if tokens >= INT8_FROM:  # a statement: the size may be the compiler's symbol
                int8 = True
        return 1 if self.scoring == "mean" else 2, int8 if self.scoring == "bounds" else False

    def attend(self, call: AttentionCall) -> torch.Tensor:
        state = call.state
        if call.k.shape[2] < self.crossover(call.q.device) or not self._serves(state, call.k):
            call.flush()
            return Dense().attend(call)
        assert isinstance(state, GatherLayer)
        options: dict[str, Any] = {
            "scale": call.scale,
            "block": self.block,
            "sink": self.sink,
            "local": self.local,
            "start": call.first_key,
            "key_mask": call.key_mask,
        }
        more = {"softcap": call.softcap, "sinks": call.sinks}
        pending = state.take_pending()
        if isinstance(state, HostGatherLayer) and state.near is not None:
            out, _ = tiered_decode(
                call.q,
                call.k,
                call.v,
                state.bounds,
                state.progress,
                state.near,
                top_k=self.k,
                scoring=self.scoring,
                lengths=state.cumulative_length.reshape(1),
                new=pending,
                **more,
                **options,
            )
            if pending is not None:
                state.cumulative_length.add_(1)
            return out
        if pending is not None:
            count = not torch.compiler.is_compiling()  # the model reads its positions off it
            out, _ = gather_decode(
                call.q,
                call.k,
                call.v,
                *pending,
                state.bounds,
                state.progress,
                state.cumulative_length,
                top_k=self.k,
                scoring=self.scoring,
                count=count,
                **more,
                **options,
            )
            if not count:
                state.cumulative_length.add_(1)
            return out
        options["lengths"] = call.lengths
        if self.k == 0:
            index = call.q.new_empty((*call.k.shape[:2], 1, 0), dtype=torch.int32)
        else:
            index = select_blocks(
                call.q,
                call.k,
                state.bounds,
                state.progress,
                top_k=self.k,
                scoring=self.scoring,
                **options,
            )
        out, _ = gather_attention(call.q, call.k, call.v, index, **more, **options)
        return out

    def reads(self, call: AttentionCall) -> Reads | None:
        state, start = call.state, call.first_key
        if call.k.shape[2] < self.crossover(call.q.device) or not self._serves(state, call.k):
            return None
        assert isinstance(state, GatherLayer)
        index = call.q.new_empty((*call.k.shape[:2], 1, 0), dtype=torch.int32)
        if self.k > 0:
            index = select_blocks(
                call.q,
                call.k,
                state.bounds,
                state.progress,
                scale=call.scale,
                block=self.block,
                top_k=self.k,
                scoring=self.scoring,
                sink=self.sink,
                local=self.local,
                lengths=call.lengths,
                start=start,
                key_mask=call.key_mask,
            )
        local = query_positions(call, 1) // self.block - self.local + 1
        return read_blocks(
            call,
            index,
            local.clamp(min=0),
            query_block=64,  # one query is a block of any size
            block=self.block,
            sink=self.sink,
            most=self.local,
        )

    def _serves(self, state: object, k: torch.Tensor) -> bool:
        """Whether the layer's summaries are those of these keys: the layer is one that this method
        made, and the keys are its own (Gemma 3n's layers share some)."""
        if not isinstance(state, GatherLayer):
            return False
        if isinstance(state, HostGatherLayer) and state.near is not None:
            blocks = state.near.table.shape[2]
            enough = state.near.owner.shape[2] >= min(self.sink + self.k, blocks)
            if not enough or state.local != self.local:
                return False
        return state.keys is k and (state.block, state.form) == (
            self.block,
            self.summary_form(k.shape[2]),
        )
