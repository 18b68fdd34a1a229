"""gather: decode that reads as many keys at every length, and a small summary of each block.

A step reads the sink, the last blocks and, of the blocks between, the best k of each KV head,
chosen by summaries of their keys that live beside the cache:

    keep = blocks 0..sink-1, the last `local`, and the top k of the others by score

Source: "Attention Pays Its Bill" (docs/papers.md); Quest's bounds (Tang et al., 2024).
Prefill is another phase's business.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape, PagedCall, Reads, StepReads
from attnplug.ops import (
    ResidentBlocks,
    gather_attention,
    gather_decode,
    page_bounds,
    select_blocks,
    tiered_decode,
)
from attnplug.ops.common.checks import BLOCKS, FP8, WIDE_HEAD_DIMS
from attnplug.ops.gather.block_bounds import summary_parts
from attnplug.ops.gather.gather_pieces import gather_pieces, merge_pieces
from attnplug.ops.gather.gather_rows import gather_rows
from attnplug.ops.gather.page_bounds import empty_page_bounds
from attnplug.ops.gather.reference import RANKED
from attnplug.ops.gather.select_blocks import MAX_BLOCKS, SCORINGS
from attnplug.policies._few_queries import asks_for_few
from attnplug.policies._gather_layers import Form, GatherLayer, HostGatherLayer
from attnplug.policies._reads import query_positions, read_blocks, union_of
from attnplug.policies.crossover import PagedDenseBelow

# A cache smaller than this many times the keys that a step keeps is read whole, and one below so
# many tokens in any case: where whole models' steps are as fast as dense's at batch 1 on two
# shapes, of which that with four KV heads decides (bench/results/e2e_gather.json). A list of more
# blocks than a kernel ranks has a higher floor: its selection takes longer, whatever the length. In
# a cache with room for 1M tokens the lines of whole steps cross at about 50,000 tokens
# (bench/results/gather.json). On a CPU the default's lists cross dense between 16,384 and 32,768
# tokens, one row and one thread (docs/log/gather.md).
CROSSOVER_FACTOR = {"cuda": 10, "cpu": 2}
CROSSOVER_FLOOR = {"cuda": 32768, "cpu": 4096}
LONG_LIST_FLOOR = {"cuda": 65536, "cpu": 32768}
# In a batch that has paid a step's fixed price, a row costs what dense takes for so many times the
# keys that it keeps, or less: rows of batch 1, 8 and 64 on an H200 (docs/log/gather.md). A CPU
# serves row after row, and a batch shares nothing there.
ROW_FACTOR, ROW_FLOOR = 3, 4096
BOUNDS = ("int8", "exact")
INT8_FROM = 16384  # tokens of a cache whose bounds are INT8 unless told otherwise
Token = tuple[torch.Tensor, torch.Tensor]  # a step's key and value
RESIDENT = 32768  # keys of each KV head that a cache in host memory keeps on the GPU


@dataclasses.dataclass(frozen=True)
class Gather(PagedDenseBelow):
    """Decode over a keep set of constant size.

    k: distant blocks that each KV head reads; 0 is a sliding window. block: keys a block. sink:
    first blocks that are always read. local: last blocks that are always read, the query's own
    included. scoring: how a block's summary ranks it. "band": by its keys' mean and 0.8 standard
    deviations of each channel in the query's favour. "bounds": by an upper bound of its keys'
    scores. min_tokens: caches below so many tokens are read whole, by `dense`. None is a multiple
    of the keep set, but not below a floor for the kind of device, and less in a batch
    (`RowCrossover`). kv: where keys and values live, "gpu" or "host" (memory read over the link).
    resident: blocks of each KV head that a cache in host memory keeps on the GPU beside the last.
    None is 32,768 keys' worth, or what a step wants where that is more. bounds: what the summaries
    are kept as: "int8" codes, or "exact", the keys' own dtype. Codes of bounds are rounded
    outwards, those of a band have one width for all channels. None is "int8" in caches of many
    tokens, and on pages for "band" alone. There a band's codes are its two edges,
    and summaries of keys in fp8 are always codes.
    """

    k: int = 256
    block: int = 16
    sink: int = 8
    local: int = 32
    scoring: str = "band"
    min_tokens: int | None = None
    kv: str = "gpu"
    resident: int | None = None
    bounds: str | None = None

    name: ClassVar[str] = "gather"
    layer_type: ClassVar[type] = GatherLayer
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})
    head_dims: ClassVar[tuple[int, ...]] = WIDE_HEAD_DIMS
    takes_pending: ClassVar[bool] = True
    notes_in_step: ClassVar[bool] = True
    # Far rows are faster in one chain, however many (bench/vllm_rows.py).
    rows_whole: ClassVar[int] = 1 << 20

    def __post_init__(self) -> None:
        self.check_integers("k", "block", "sink", "local")
        self.check("k", 0 <= self.k <= MAX_BLOCKS, f"0 to {MAX_BLOCKS}")
        self.check("block", self.block in BLOCKS, ", ".join(map(str, BLOCKS)))
        self.check("sink", self.sink >= 0, "at least 0")
        self.check("local", self.local >= 1, "at least 1, the query's own block")
        self.check("scoring", self.scoring in SCORINGS, ", ".join(SCORINGS))
        self.check_min_tokens()
        self.check("bounds", self.bounds in (None, *BOUNDS), "None, 'int8' or 'exact'")
        self.check("kv", self.kv in ("gpu", "host"), "'gpu' or 'host'")
        if self.resident is not None:
            self.check("resident", self.kv == "host", "kv='host'; a cache on the GPU is all there")
            enough = type(self.resident) is int and self.resident >= self.sink + self.k
            self.check("resident", enough, f"an integer, at least sink + k = {self.sink + self.k}")

    @property
    def kept(self) -> int:
        """The most keys that a step reads of a row, summaries aside."""
        return (self.sink + self.local + self.k) * self.block

    def step_reads(self, tokens: int, head_dim: int, room: int = 0) -> StepReads:
        summaries = tokens // self.block if self.k else 0
        parts, codes, _ = self.summary_form(max(tokens, room))
        size = parts * head_dim * (2 if codes is None else 1)
        if codes is not None and parts == 1:  # a band's scale and width, float32
            size += 8
        return StepReads(min(self.kept, tokens), summaries * size)

    @property
    def scales(self) -> bool:
        return self.kv == "gpu"  # else the link to the host decides

    def measured_crossover(self, kind: str) -> int:
        floor = LONG_LIST_FLOOR if self.k > RANKED else CROSSOVER_FLOOR
        return max(floor[kind], CROSSOVER_FACTOR[kind] * self.kept)

    def measured_row_crossover(self, kind: str) -> int:
        if kind == "cpu":
            return self.measured_crossover(kind)
        return max(ROW_FLOOR, ROW_FACTOR * self.kept)

    def note(self, shape: LayerShape) -> str:
        kept, where = self.sink + self.local + self.k, ""
        if self.kv == "host":
            where = f" from host memory, {self._slots} blocks a KV head cached on the device"
        dense = self.dense_caches(shape.device)
        return f"reads {kept} blocks of {self.block} keys{where}; {dense}"

    @property
    def _slots(self) -> int:
        if self.resident is not None:
            return self.resident
        return max(RESIDENT // self.block, self.sink + self.k)

    def cache_layer(self, max_length: int) -> GatherLayer:
        form = self.summary_form(max_length)
        if self.kv == "gpu":
            return GatherLayer(max_length, self.block, form, self.serves)
        return HostGatherLayer(max_length, self.block, form, self.serves, self.local, self._slots)

    def summary_form(self, tokens: int) -> Form:
        """What the summaries of a cache of so many tokens are."""
        int8 = self.bounds == "int8"
        if self.bounds is None:
            if tokens >= INT8_FROM:  # a statement: the size may be the compiler's symbol
                int8 = True
        parts = summary_parts(self.scoring, int8)
        return Form(parts, torch.int8 if int8 else None, self.scoring == "band")

    def note_queries(self, call: AttentionCall) -> None:
        """After a prompt, or a piece of one: summarise the blocks that it has completed. Keys in
        host memory are left to the step, which reads them over the link either way."""
        layer = call.state
        if self.kv == "host" or not isinstance(layer, GatherLayer) or not layer.exposes_buffers:
            return
        size = layer.max_cache_len
        is_own = (layer.block, layer.form) == (self.block, self.summary_form(size))
        if is_own and layer.serves(len(call.q), size, call.q.device):
            layer.summarise(call.start, call.key_mask)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self._own_layer(call)
        if layer is None:
            return self.leave_to_dense(call)
        options = self._options(call)
        pending = layer.take_pending()
        if isinstance(layer, HostGatherLayer) and layer.near is not None:
            return self._attend_on_host(call, layer, layer.near, pending, options)
        if pending is not None:
            return self._attend_and_write(call, layer, pending, options)
        options["lengths"] = call.lengths
        index = self._select(call, layer, options)
        more = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
        out, _ = gather_attention(call.q, call.k, call.v, index, **more, **options)
        return out

    def serves_few(self, call: AttentionCall) -> bool:
        asked = self.kv != "host" and asks_for_few(self, call)
        return asked and self._own_layer(call) is not None

    def _attend_on_host(
        self,
        call: AttentionCall,
        layer: HostGatherLayer,
        near: ResidentBlocks,
        pending: Token | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """A step over keys and values in host memory; writes the pending token, if there is one."""
        out, _ = tiered_decode(
            call.q,
            call.k,
            call.v,
            layer.bounds,
            layer.progress,
            near,
            scale=call.scale,
            top_k=self.k,
            scoring=self.scoring,
            lengths=layer.cumulative_length.reshape(1),
            new=pending,
            softcap=call.softcap,
            sinks=call.sinks,
            **options,
        )
        if pending is not None:
            layer.cumulative_length.add_(1)
        return out

    def _attend_and_write(
        self, call: AttentionCall, layer: GatherLayer, pending: Token, options: dict[str, Any]
    ) -> torch.Tensor:
        """A step that writes its own token, all in one op."""
        count = not torch.compiler.is_compiling()  # the model reads its positions off it
        out, _ = gather_decode(
            call.q,
            call.k,
            call.v,
            *pending,
            layer.bounds,
            layer.progress,
            layer.cumulative_length,
            scale=call.scale,
            top_k=self.k,
            scoring=self.scoring,
            count=count,
            softcap=call.softcap,
            sinks=call.sinks,
            **options,
        )
        if not count:
            layer.cumulative_length.add_(1)
        return out

    def pages_refusal(self) -> str | None:
        return None if self.kv == "gpu" else "with kv='host' needs rows of a cache of its own"

    def page_state(self, k: torch.Tensor, basis: Any = None) -> torch.Tensor | None:
        """Summaries by physical block, so that requests share them as they share pages."""
        if k.shape[2] % self.block:
            return None
        dtype = torch.int8 if k.dtype == FP8 else self._page_codes
        return empty_page_bounds(k, self.block, dtype=dtype)

    def page_share(self, itemsize: int) -> float:
        return 1 / self.block / (1 if self._page_codes is None else itemsize)

    @property
    def _page_codes(self) -> torch.dtype | None:
        """The dtype of the codes of pages' summaries, None for the keys'."""
        int8 = self.bounds == "int8" if self.scoring == "bounds" else self.bounds != "exact"
        return torch.int8 if int8 else None

    def note_pages(self, k: torch.Tensor, state: torch.Tensor | None, slots: torch.Tensor) -> None:
        if state is not None:
            page_bounds(k, state, slots, block=self.block, band=self.scoring == "band")

    def attend_far(self, call: PagedCall) -> torch.Tensor:
        out, _ = gather_decode(
            call.q,
            call.k,
            call.v,
            None,
            None,
            call.state,
            None,
            call.lengths,
            block=self.block,
            top_k=self.k,
            sink=self.sink,
            local=self.local,
            scoring=self.scoring,
            table=call.table,
            **call.options,
        )
        return out

    def begin_far(self, call: PagedCall) -> torch.Tensor:
        return gather_pieces(
            call.q,
            call.k,
            call.v,
            call.state,
            call.table,
            call.lengths,
            scale=call.scale,
            block=self.block,
            top_k=self.k,
            sink=self.sink,
            local=self.local,
            scoring=self.scoring,
            softcap=call.softcap,
            slots=call.slots,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
        )

    def end_far(
        self,
        found: torch.Tensor,
        call: PagedCall,
        far: torch.Tensor,
        out: torch.Tensor,
        *,
        chained: bool = True,
    ) -> None:
        merge_pieces(found, call.lengths, out, sinks=call.sinks, chained=chained)

    def attend_rows(self, call: PagedCall, near: torch.Tensor, out: torch.Tensor) -> None:
        gather_rows(
            call.q,
            call.k,
            call.v,
            call.state,
            call.table,
            call.lengths,
            near,
            out,
            block=self.block,
            top_k=self.k,
            sink=self.sink,
            local=self.local,
            scoring=self.scoring,
            slots=call.slots,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
            **call.options,
        )

    def reads(self, call: AttentionCall) -> Reads | None:
        layer = self._own_layer(call)
        if layer is None:
            return None
        picks = self._select(call, layer, self._options(call) | {"lengths": call.lengths})
        # A few queries are one block: what any of them reads.
        first_local = query_positions(call, 64) // self.block - self.local + 1
        return read_blocks(
            call,
            union_of(picks) if self.k > 0 else picks[:, :, :1],
            first_local.clamp(min=0),
            query_block=64,
            block=self.block,
            sink=self.sink,
            most=self.local + (call.q.shape[2] > 1),
        )

    def _options(self, call: AttentionCall) -> dict[str, Any]:
        """What gather's ops take alike, but for the lengths."""
        return {
            "block": self.block,
            "sink": self.sink,
            "local": self.local,
            "start": call.first_key,
            "key_mask": call.key_mask,
        }

    def _select(
        self, call: AttentionCall, layer: GatherLayer, options: dict[str, Any]
    ) -> torch.Tensor:
        """The distant blocks that each query picks for a KV head, int32 `[B,Hkv,T,k]`."""
        if self.k == 0:
            rows, queries = len(call.q), call.q.shape[2]
            return call.q.new_empty((rows, call.k.shape[1], queries, 0), dtype=torch.int32)
        return select_blocks(
            call.q,
            call.k,
            layer.bounds,
            layer.progress,
            top_k=self.k,
            scoring=self.scoring,
            **options,
        )

    def _own_layer(self, call: AttentionCall) -> GatherLayer | None:
        """The call's cache layer if its summaries are those of the call's keys, else None: a small
        cache, one that this method did not make, or another layer's (Gemma 3n's share some)."""
        layer, size = call.state, call.k.shape[2]
        if not isinstance(layer, GatherLayer):
            return None
        if not isinstance(layer, HostGatherLayer) or layer.near is None:
            if not self.serves(len(call.q), size, call.q.device):
                return None
        else:
            blocks = layer.near.table.shape[2]
            enough = layer.near.owner.shape[2] >= min(self.sink + self.k, blocks)
            if not enough or layer.local != self.local:
                return None
        made = layer.block, layer.form
        own = layer.keys is call.k and made == (self.block, self.summary_form(size))
        return layer if own else None
