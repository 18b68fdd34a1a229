"""auto: the measured methods that a layer, its device and its free memory allow, chosen when the
policy is applied.

For each layer and phase the first candidate that nothing speaks against, else dense. Candidates are
methods with a measured crossover, below which they run dense by themselves. `report` says what was
chosen and why (docs/methods/auto.md).
"""

import dataclasses
import warnings
from typing import ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape
from attnplug.models.cache import PlugLayer
from attnplug.models.sync import may_sync
from attnplug.policies._sketch_layer import SketchLayer
from attnplug.policies.base import Phase
from attnplug.policies.crossover import DenseBelow
from attnplug.policies.dense import Dense
from attnplug.policies.gather import Gather
from attnplug.policies.momo import Momo
from attnplug.policies.sketch import Sketch


class RoomySketchLayer(SketchLayer):
    """sketch's layer where there is room for its codes, beside those and the keys and values of the
    layers behind it; else keys and values alone, which dense reads."""

    def wants_codes(self, keys: torch.Tensor) -> bool:
        if not super().wants_codes(keys):
            return False
        free = free_memory(keys.device) if may_sync(keys.is_cuda) else None
        if free is None:
            return True
        like = SketchLayer(self.max_cache_len, self.size, self.serves)
        like.query_heads = self.query_heads
        own = sum(buffer.nbytes for buffer in self._buffers())  # not free any more
        if cache_bytes(like, keys) * (1 + self.layers_behind) - own <= free:
            return True
        warnings.warn(
            f"auto: some layers decode by dense, as sketch's codes for a cache of "
            f"{self.max_cache_len:,} tokens find no room on {keys.device}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


# The shortest prompts whose tasks were measured where momo, or sketch, reads a part of them.
MEASURED_TOKENS = 32768


@dataclasses.dataclass(frozen=True)
class RoomySketch(Sketch):
    """sketch, but dense in caches that leave no room for its codes, and in those of a batch that
    have fewer tokens than its tasks were measured with."""

    least_tokens: ClassVar[int] = MEASURED_TOKENS

    def cache_layer(self, max_length: int) -> RoomySketchLayer:
        return RoomySketchLayer(max_length, self.bytes, self.serves, self.audit)


@dataclasses.dataclass(frozen=True)
class MeasuredMomo(Momo):
    """momo, but dense in prompts that are shorter than those whose tasks were measured, though it
    is faster than dense there."""

    rows_as_momo: ClassVar[bool] = True
    least_tokens: ClassVar[int] = MEASURED_TOKENS


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method, what speaks for it, and what against it on a CPU ("" where nothing does)."""

    method: DenseBelow
    because: str
    not_on_cpu: str = ""


SKETCH = Candidate(
    RoomySketch(),
    "whose picks answered our tasks as dense did",
    "slower than dense on a CPU at every length that was tried",
)
GATHER = Candidate(
    Gather(),
    "faster than sketch, but nothing tells what it misses",
    "its pages of 16 were not timed on a CPU",
)
MEASURED_MOMO = Candidate(
    MeasuredMomo(), "faster on long prompts, and our tasks at 32K were answered as by dense"
)
MOMO = Candidate(Momo(), "faster on long prompts, but its tasks at 16K were not measured")
CANDIDATES = {
    "faithful": {"prefill": (MEASURED_MOMO,), "decode": (SKETCH,)},
    "fast": {"prefill": (MOMO,), "decode": (GATHER,)},
}


@dataclasses.dataclass(frozen=True)
class Auto(Phase):
    """A choice among the measured methods, for each layer.

    quality: "faithful" takes only methods that no measured row puts outside dense's interval, at
    lengths where it gives them a part of the work, but for the one that docs/methods/auto.md names.
    "fast" takes the fastest.
    """

    quality: str = "faithful"

    name: ClassVar[str] = "auto"
    phases: ClassVar[frozenset[str]] = frozenset({"prefill", "decode"})
    takes_trained: ClassVar[bool] = True
    keeps_queries: ClassVar[bool] = True  # as sketch does, where it is chosen

    def __post_init__(self) -> None:
        known = isinstance(self.quality, str) and self.quality in CANDIDATES
        self.check("quality", known, " or ".join(map(repr, CANDIDATES)))

    def resolve(self, slot: str, shape: LayerShape, layers: int) -> tuple[Phase, str]:
        if shape.reads_latents:
            return Dense(), f"auto: {slot} by dense, which alone reads latents"
        against = []
        for each in CANDIDATES[self.quality][slot]:
            reason = _against(each, shape, layers)
            if not reason:
                return each.method, f"auto: {slot} by {each.method.name}, {each.because}"
            against.append(f"not {each.method.name} ({reason})")
        return Dense(), f"auto: {slot} by dense, {', '.join(against)}"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """For a call without `apply`, which puts the chosen method in this one's place."""
        slot = "decode" if call.q.shape[2] == 1 else "prefill"
        heads, kv_heads, sinks = call.q.shape[1], call.k.shape[1], call.sinks is not None
        device = call.q.device
        shape = LayerShape(heads, kv_heads, call.q.shape[3], call.softcap, sinks, device)
        return self.resolve(slot, shape, 1)[0].attend(call)


def _against(candidate: Candidate, shape: LayerShape, layers: int) -> str:
    """What speaks against a candidate on such a layer, one of so many on its device; or ""."""
    method = candidate.method
    refusal = method.refusal(shape)
    if refusal:
        return refusal
    if shape.device.type == "cpu" and candidate.not_on_cpu:
        return candidate.not_on_cpu
    tokens = method.on_this_machine(shape).crossover(shape.device)
    layer, free = method.cache_layer(tokens), free_memory(shape.device)
    if layer is None or free is None:
        return ""
    layer.query_heads = shape.heads_q
    rows = torch.empty(1, shape.heads_kv, 0, shape.head_dim, dtype=torch.bfloat16, device="meta")
    need = layers * cache_bytes(layer, rows)
    if need <= free:
        return ""
    takes = f"{need / 2**30:.1f} GiB in {layers} layers, and {free / 2**30:.1f} GiB are free"
    return f"from {tokens:,} tokens on its caches take {takes}"


def cache_bytes(layer: PlugLayer, keys: torch.Tensor) -> int:
    """Bytes that an empty layer will take for keys and values like these, `[B,Hkv,_,D]`, its
    method's state included. Allocates nothing; the layer is then of no more use."""
    new = torch.empty_like(keys[:, :, :0], device="meta")
    layer.lazy_initialization(new, new)
    return sum(tensor.nbytes for tensor in layer.tensors())


def free_memory(device: torch.device) -> int | None:
    """Bytes that a device can still give, what torch has kept of it included; None where that is
    not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept
