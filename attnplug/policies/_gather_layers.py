"""gather's cache layers: keys, values and summaries of the key blocks on the GPU, or keys and
values in host memory with what steps read most on the GPU."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from transformers import Cache

from attnplug.models.buffers import lower_progress
from attnplug.models.cache import PlugLayer, RowBuffers
from attnplug.models.edits import first_filled
from attnplug.models.watched import Serves
from attnplug.ops import ResidentBlocks, block_bounds
from attnplug.ops.gather.block_bounds import empty_bounds
from attnplug.policies._host_layer import HostLayer


class Form(NamedTuple):
    """What a layer's summaries are: their parts, the dtype of their codes or None for the keys',
    and whether they are bands: the edges, which look like bounds, or in a cache of rows codes of
    one part."""

    parts: int
    codes: torch.dtype | None
    band: bool = False


class GatherLayer(PlugLayer):
    """Keys, values, and summaries of the key blocks, `bounds`, as `empty_bounds` makes them for
    `form`; and for each row how many leading blocks are done and
    the start that they are counted from, `progress` `[B,2]` int32.

    `update` writes keys and values only, and leaves a step's token to `gather_decode` where it may
    (`PlugLayer`). After a prompt `summarise` makes its summaries; `select_blocks` and
    `gather_decode` make those that a step lacks. They are of complete blocks, which do not change:
    what shortens a row lowers its count, what moves rows moves them along, and another padding is
    seen by its start.
    """

    row_buffers: ClassVar[RowBuffers] = {"bounds": None, "progress": 0}
    defers_write = True
    steps_are_alike = True

    bounds: torch.Tensor
    progress: torch.Tensor

    def __init__(self, max_cache_len: int, block: int, form: Form, serves: Serves):
        super().__init__(max_cache_len=max_cache_len)
        self.block, self.form, self.serves = block, form, serves

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._make_summaries()

    @property
    def crops_exactly(self) -> bool:
        return True

    def _make_summaries(self) -> None:
        assert self.keys is not None
        parts, codes, _ = self.form
        self.bind_rows(
            bounds=empty_bounds(self.keys, self.block, parts, dtype=codes),
            progress=torch.zeros((len(self.keys), 2), dtype=torch.int32, device=self.keys.device),
        )

    def summarise(self, start: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Make the summaries that complete blocks lack, all of them at once, where a step makes one
        after the other. `start` `[B]` and `mask` `[B,S]` as in `AttentionCall`."""
        block_bounds(
            self._buffers()[0],
            self.bounds,
            self.progress,
            block=self.block,
            lengths=self.cumulative_length.reshape(1),
            start=start,
            key_mask=self.mask_of_buffer(mask),
            band=self.form.band,
        )

    def renew(self) -> None:
        self.progress.zero_()

    @classmethod
    def take_back_all(cls, layers: Sequence[PlugLayer], tokens: int | torch.Tensor) -> None:
        super().take_back_all(layers, tokens)
        own = cast(Sequence[GatherLayer], layers)
        for block in {each.block for each in own}:
            progresses = [each.progress for each in own if each.block == block]
            lower_progress(progresses, first_filled(own).cumulative_length, block)


class HostGatherLayer(GatherLayer, HostLayer):
    """Keys and values in host memory; on the GPU the summaries, the last tokens, and the
    blocks that steps wanted lately (`near`), which a cache on the GPU has not. New tokens go to the
    host and to the ring.
    """

    row_buffers: ClassVar[RowBuffers] = {**GatherLayer.row_buffers, "near": None}
    steps_are_alike = False
    near: ResidentBlocks | None = None

    def __init__(
        self,
        max_cache_len: int,
        block: int,
        form: Form,
        serves: Serves,
        local: int,
        resident: int,
    ):
        super().__init__(max_cache_len, block, form, serves)
        self.local, self.resident = local, resident

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.near = None  # of other rows, after a reset
        if not self.on_host:
            return
        batch, heads, _, width = key_states.shape
        slots = min(self.resident, -(-self.max_cache_len // self.block))
        rows = batch, heads, self.max_cache_len, width
        like = key_states.dtype, key_states.device
        self.bind_rows(near=ResidentBlocks.empty(*rows, self.block, self.local, slots, *like))

    @property
    def crops_exactly(self) -> bool:
        return self.near is None  # steps change what is near, and count it

    def continue_from(self, source: PlugLayer) -> None:
        if isinstance(source, HostGatherLayer) and self.near is not None and source.near:
            self.near.counters[..., :2].copy_(source.near.counters[..., :2])

    def reset(self) -> None:
        super().reset()
        if self.near is not None:
            self._forget()
            self.near.counters.zero_()

    def renew(self) -> None:
        super().renew()
        if self.near is not None:
            self._forget()
            self.crop(0)  # fills the ring

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.near is None:
            return
        length, owner = self.cumulative_length, self.near.owner
        owner.masked_fill_(owner + self.block > length, -1)
        width = self.near.ring.shape[3]
        at = (torch.arange(width, device=owner.device) + length - width).clamp(min=0)
        last = torch.stack([buffer.index_select(2, at) for buffer in self._buffers()], 2)
        self.near.ring.index_copy_(3, at % width, last)

    def _write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = super()._write(key_states, value_states, *args, **kwargs)
        if self.near is not None:
            width = self.near.ring.shape[3]
            new = torch.stack([key_states, value_states], 2)[:, :, :, -width:]
            count = new.shape[3]
            at = torch.arange(count, device=new.device) + self.cumulative_length - count
            self.near.ring.index_copy_(3, at % width, new)
        return buffers

    def _forget(self) -> None:
        assert self.near is not None
        self.near.owner.fill_(-1)
        self.near.used.zero_()


@dataclasses.dataclass(frozen=True)
class Residency:
    """What the steps of one layer's cache in host memory wanted of it, over its rows and KV heads:
    blocks wanted (sink and listed), how many of them were on the GPU already, bytes that crossed
    the link for the others, and bytes that the layer takes on the GPU and on the host."""

    layer: int
    wanted: int
    found: int
    link_bytes: int
    device_bytes: int
    host_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.found / max(1, self.wanted)


def residency(cache: Cache) -> list[Residency]:
    """The telemetry of every layer in host memory. Reads it on the host: not for a step."""
    rows = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, HostGatherLayer) or layer.near is None:
            continue
        wanted, found, _ = layer.near.counters.sum((0, 1)).tolist()
        block = layer.near.slots[0, 0, 0]
        rows.append(
            Residency(
                layer=index,
                wanted=wanted,
                found=found,
                link_bytes=(wanted - found) * block.numel() * block.element_size(),
                device_bytes=sum(x.nbytes for x in (*layer.near, layer.bounds)),
                host_bytes=sum(buffer.nbytes for buffer in layer._buffers()),
            )
        )
    return rows
