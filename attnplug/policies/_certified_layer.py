"""certified's cache layer (originals, their quantized tier, and the blocks of the host's that are
cached on the GPU), and the telemetry of its steps."""

import dataclasses
from typing import Any, ClassVar

import torch
from transformers import Cache

from attnplug.models.buffers import prompt_on_gpu
from attnplug.models.cache import PlugLayer, RowBuffers, Shape
from attnplug.models.host_memory import host_zeros
from attnplug.models.watched import Serves
from attnplug.ops import QuantizedKV, Scratch
from attnplug.ops.certified.certified_attention import TELEMETRY

HEADS = 32  # query heads a KV head whose telemetry is kept; more are served without


class CertifiedLayer(PlugLayer):
    """Originals (`keys`, `values`, in host memory where a GPU computes), their quantized tier, what
    of the host's is kept on the GPU, and what the steps measured, `telemetry` `[B,Hkv,32,18]`
    float64.

    `update` writes originals only. A step quantizes what has become a complete block; complete
    blocks do not change, so that what shortens a row lowers its count and what moves rows moves
    them along. Caches that the method does not serve (`serves`: rows, slots, device) have no tier,
    and their originals on the device.
    """

    row_buffers: ClassVar[RowBuffers] = {"tier": None, "telemetry": 0, "scratch": None}

    def __init__(
        self,
        max_cache_len: int,
        block: int,
        slots: int,
        originals: str,
        serves: Serves,
    ):
        super().__init__(max_cache_len=max_cache_len)
        self.block, self.slots = block, slots
        self.originals, self.serves = originals, serves
        self.tier: QuantizedKV | None = None
        self.telemetry: torch.Tensor | None = None
        self.scratch: Scratch | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        device = key_states.device
        self.tier = self.telemetry = self.scratch = None  # of other rows, after a reset
        if not self.serves(len(key_states), self.max_cache_len, device):
            super().lazy_initialization(key_states, value_states)
            return
        batch, heads, _, width = key_states.shape
        size = self.max_cache_len
        tier = QuantizedKV.empty(batch, heads, size, width, self.block, device)
        rows = (batch, heads, HEADS, len(TELEMETRY))
        telemetry = torch.zeros(rows, dtype=torch.float64, device=device)
        self._initialize(key_states, value_states, self._zeros)
        scratch = None
        if self.slots > 0:
            made = (self.block, width, key_states.dtype, device)
            scratch = Scratch.empty(batch, heads, self.slots, *made)
        self.bind_rows(tier=tier, telemetry=telemetry, scratch=scratch)

    def _zeros(
        self, shapes: list[Shape], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        make = torch.zeros if self.originals == "device" else host_zeros
        return [make(shape, dtype=dtype, device=device) for shape in shapes]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens. For several queries on a GPU the keys and values come back in its own
        memory, as prefill methods read them many times: the new ones where there are no others."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        queries = key_states.shape[2]
        on_device = self.tier is None or self.originals == "device" or not keys.is_cuda
        if on_device or queries == 1:
            return keys, values
        return prompt_on_gpu(self, key_states, value_states)

    def reset(self) -> None:
        super().reset()
        if self.tier is not None:
            self.tier.progress.zero_()
        if self.scratch is not None:
            self.scratch.clear()

    def renew(self) -> None:
        if self.tier is not None:
            self.tier.progress.zero_()
        if self.scratch is not None:
            self.scratch.forget(torch.zeros_like(self.cumulative_length), self.block)

    def continue_from(self, source: PlugLayer) -> None:
        if not isinstance(source, CertifiedLayer):
            return
        if self.telemetry is not None and source.telemetry is not None:
            self.telemetry.copy_(source.telemetry)
        if self.scratch is not None and source.scratch is not None:
            self.scratch.counters[..., 1:].copy_(source.scratch.counters[..., 1:])

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.tier is not None:
            done, start = self.tier.progress.unbind(1)
            whole = (self.cumulative_length - start).clamp(min=0) // self.block
            done.copy_(torch.minimum(done, whole))
        if self.scratch is not None:
            self.scratch.forget(self.cumulative_length, self.block)

    def _rebind(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.tier is not None and self.originals == "host":
            keys, values = (host_zeros(x.shape, x.dtype, x.device).copy_(x) for x in (keys, values))
        super()._rebind(keys, values)


@dataclasses.dataclass(frozen=True)
class Certificates:
    """What the steps of one layer's cache were certified to, over its heads. Bounds are in units of
    the values. `layer_mean` and `layer_max` are what `tolerance` limits: the root of the sum of the
    heads' squared bounds, as a share of the norm that all of the row's exact heads have at least;
    infinite where nothing is known of that. `exact` is the share of head-steps that were recomputed
    from the originals. Of `wanted` keys and values of blocks, those that steps read exactly,
    `found` were in the scratch cache; the others, and what is not quantized or was recomputed, are
    `link_bytes`."""

    layer: int
    head_steps: int
    key_mean: float
    key_max: float
    value_mean: float
    value_max: float
    layer_mean: float
    layer_max: float
    needed: int
    values: int
    head: int
    row: int
    saved: int
    wanted: int
    found: int
    link_bytes: int
    scratch_bytes: int
    tier_bytes: int

    @property
    def exact(self) -> float:
        return (self.head + self.row) / max(1, self.head_steps)

    @property
    def hit_rate(self) -> float:
        return self.found / max(1, self.wanted)


def certified_layers(cache: Cache) -> list[Certificates]:
    """The telemetry of every certified layer of a cache. Reads it on the host: not for a step."""
    return [
        _summary(index, layer)
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, CertifiedLayer) and layer.telemetry is not None
    ]


def _summary(index: int, layer: CertifiedLayer) -> Certificates:
    assert layer.telemetry is not None and layer.tier is not None and layer.keys is not None
    rows = layer.telemetry.cpu().flatten(0, 2)
    rows = rows[rows[:, 0] > 0]
    fields = dict(zip(TELEMETRY, rows.unbind(-1), strict=True))
    total = {name: float(column.sum()) for name, column in fields.items()}
    peak = {name: float(column.max()) if len(column) else 0.0 for name, column in fields.items()}
    steps = max(1.0, total["steps"])
    # A head recomputed for its row's sake counts there.
    wanted, found = 0, 0
    if layer.scratch is not None:
        _, wanted, found = layer.scratch.counters.sum((0, 1, 2)).tolist()
    tokens = total["key_tokens"] + total["value_tokens"] - found * layer.block
    return Certificates(
        layer=index,
        head_steps=int(total["steps"]),
        key_mean=total["key_sum"] / steps,
        key_max=peak["key_max"],
        value_mean=total["value_sum"] / steps,
        value_max=peak["value_max"],
        layer_mean=total["layer_sum"] / steps,
        layer_max=peak["layer_max"],
        needed=int(total["needed"]),
        values=int(total["values"]),
        head=int(total["head"]),
        row=int(total["row"]),
        saved=int(total["saved"]),
        wanted=wanted,
        found=found,
        link_bytes=int(tokens) * layer.keys.shape[3] * layer.keys.element_size(),
        scratch_bytes=sum(tensor.nbytes for tensor in layer.scratch or ()),
        tier_bytes=layer.tier.nbytes(),
    )
