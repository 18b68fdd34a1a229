"""certified: decode from a quantized cache that cannot lie.

The GPU holds keys as INT8 and values as INT4 (half of the cache), the host the originals. Every
head of every step is returned with a bound on its distance from exact attention, or is exact:

    ||out^ - out||_2 <= E_key + E_val + E_round

Source: "Runtime-Certified Bounded-Error Quantized Attention" (shared/papers/001); docs/certified.md
has the bounds, their proofs and the ladder. Prefill is another phase's business.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from transformers import Cache

from attnplug.models.cache import PlugLayer
from attnplug.models.pinned import host_zeros
from attnplug.ops import QuantizedKV, Scratch, certified_attention, quantize_kv
from attnplug.ops.certified.certified_attention import MAX_RANKING, TELEMETRY
from attnplug.ops.certified.scratch import SETS
from attnplug.ops.common.checks import BLOCKS
from attnplug.policies.base import AttentionCall, LayerShape, Phase, check_option
from attnplug.policies.dense import Dense

# Caches below so many tokens keep their originals on the device and are read by `dense`: one query
# a sequence is as fast from 64K on, on an H200 (bench/results/certified.json).
CROSSOVER = {"cuda": 65536, "cpu": 4096}
HEADS = 32  # query heads a KV head whose telemetry is kept; more are served without


@dataclasses.dataclass(frozen=True)
class Certified(Phase):
    """Decode over a two-tier cache, each head certified or exact.

    block: keys a block. coverage, k_min, k_max: blocks are read exactly until they hold this share
    of the attention, clamped. v_tol: a block whose mass times value error is above it is read with
    exact values. value_budget: a hard limit on E_val. key_tolerance: twice the blocks are read
    where E_key is above it. tolerance: a head whose whole bound is above it is recomputed exactly.
    ranking: to which depth quantized and exact blocks must rank alike, else the head is recomputed.
    explore: share of the blocks that is spot-checked. originals: "host" (pinned) or "device".
    scratch: slots of the GPU, for each row and KV head, that keep what was read of the host's
    originals, a block's keys or its values each, at most a sixteenth of them; 0: none, as where no
    more than k_min blocks are promoted.
    min_tokens: caches below so many tokens are dense.
    """

    block: int = 64
    coverage: float = 0.995
    k_min: int = 2
    k_max: int = 128
    v_tol: float = 0.05
    value_budget: float | None = None
    key_tolerance: float | None = None
    tolerance: float | None = None
    ranking: int = 1
    explore: float = 0.001
    originals: str = "host"
    scratch: int = 256
    min_tokens: int | None = None

    name: ClassVar[str] = "certified"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __post_init__(self) -> None:
        def check(option: str, valid: bool, needed: str) -> None:
            check_option(self.name, option, getattr(self, option), valid, needed)

        for option in ("block", "k_min", "k_max", "ranking", "scratch"):
            check(option, type(getattr(self, option)) is int, "an integer")
        for option in ("coverage", "v_tol", "explore"):
            check(option, type(getattr(self, option)) in (int, float), "a number")
        for option in ("value_budget", "key_tolerance", "tolerance"):
            kind = type(getattr(self, option))
            check(option, kind in (int, float, type(None)), "None or a number")
        check("block", self.block in BLOCKS, ", ".join(map(str, BLOCKS)))
        check("coverage", 0 <= self.coverage <= 1, "0 to 1")
        check("ranking", 0 <= self.ranking <= MAX_RANKING, f"0 to {MAX_RANKING}")
        check("k_min", self.k_min >= self.ranking, "at least ranking")
        check("k_max", max(self.k_min, 1) <= self.k_max <= 1024, "k_min to 1024")
        check("v_tol", self.v_tol >= 0, "at least 0")
        for option in ("value_budget", "key_tolerance", "tolerance"):
            value = getattr(self, option)
            check(option, value is None or value >= 0, "None or at least 0")
        check("explore", 0 <= self.explore <= 1, "0 to 1")
        check("originals", self.originals in ("host", "device"), "'host' or 'device'")
        check("scratch", 0 <= self.scratch <= 4096, "0 to 4096")
        tokens = self.min_tokens
        valid = tokens is None or (type(tokens) is int and tokens >= 0)
        check("min_tokens", valid, "None or an integer, at least 0")

    def crossover(self, device: torch.device) -> int:
        """Tokens of a cache below which dense attention runs on such a device."""
        if self.min_tokens is not None:
            return self.min_tokens
        return CROSSOVER["cpu" if device.type == "cpu" else "cuda"]

    def slots(self, blocks: int) -> int:
        """Slots of the scratch cache of `blocks` blocks. None where k_min blocks are all that is
        promoted: reading these over the link takes less time than looking after them. At most a
        sixteenth of the originals, so that the GPU's share of the cache stays what it promises."""
        hard = self.value_budget is None and self.key_tolerance is None and self.v_tol >= 1e30
        few = hard and self.coverage == 0 and self.explore == 0
        none = few or self.originals == "device"
        return 0 if none else min(self.scratch, max(SETS, blocks // 8))

    def note(self, shape: LayerShape) -> str:
        tokens = self.crossover(shape.device)
        small = f" below {tokens:,} tokens and in those" if tokens else ""
        return (
            f"INT8 keys, INT4 values in blocks of {self.block}, originals on the {self.originals}; "
            f"dense in caches{small} that attnplug did not make for it"
        )

    def cache_layer(self, max_length: int) -> "CertifiedLayer":
        return CertifiedLayer(max_length, self)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        state = call.state
        if not (isinstance(state, CertifiedLayer) and state.serves(self, call.k)):
            return Dense().attend(call)
        rows: dict[str, Any] = {
            "block": self.block,
            "lengths": call.lengths,
            "start": call.first_key,
            "key_mask": call.key_mask,
        }
        assert state.tier is not None  # serves() said so
        quantize_kv(call.k, call.v, state.tier, **rows)
        found = certified_attention(
            call.q,
            call.k,
            call.v,
            state.tier,
            scale=call.scale,
            coverage=self.coverage,
            k_min=self.k_min,
            k_max=self.k_max,
            v_tol=self.v_tol,
            value_budget=self.value_budget,
            key_tolerance=self.key_tolerance,
            tolerance=self.tolerance,
            ranking=self.ranking,
            explore=self.explore,
            softcap=call.softcap,
            sinks=call.sinks,
            telemetry=state.telemetry if call.q.shape[1] <= HEADS * call.k.shape[1] else None,
            scratch=state.scratch,
            **rows,
        )
        return found.out


class CertifiedLayer(PlugLayer):
    """Originals (`keys`, `values`, in host memory where a GPU computes), their quantized tier, what
    of the host's is kept on the GPU, and what the steps measured, `telemetry` `[B,Hkv,32,16]`
    float64.

    `update` writes originals only. A step quantizes what has become a complete block; complete
    blocks do not change, so that what shortens a row lowers its count and what moves rows moves
    them along. Caches below the policy's crossover have no tier, and their originals on the device.
    """

    def __init__(self, max_cache_len: int, policy: Certified):
        super().__init__(max_cache_len=max_cache_len)
        self.policy = policy
        self.tier: QuantizedKV | None = None
        self.telemetry: torch.Tensor | None = None
        self.scratch: Scratch | None = None

    def serves(self, policy: Certified, keys: torch.Tensor) -> bool:
        """Whether the tier is one of these keys (Gemma 3n lends some), made for that policy."""
        return self.tier is not None and self.keys is keys and self.policy.block == policy.block

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        device = key_states.device
        if self.max_cache_len < self.policy.crossover(device):
            super().lazy_initialization(key_states, value_states)
            return
        batch, heads, _, width = key_states.shape
        size = self.max_cache_len
        tier = QuantizedKV.empty(batch, heads, size, width, self.policy.block, device)
        rows = (batch, heads, HEADS, len(TELEMETRY))
        telemetry = torch.zeros(rows, dtype=torch.float64, device=device)
        self._initialize(key_states, value_states, self._originals)
        scratch, slots = None, self.policy.slots(tier.check.shape[2])
        if slots > 0:
            made = (self.policy.block, width, key_states.dtype, device)
            scratch = Scratch.empty(batch, heads, slots, *made)
        self._bind(tier, telemetry, scratch)

    def _originals(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.policy.originals == "device":
            return torch.zeros(shape, dtype=dtype, device=device)
        return host_zeros(shape, dtype, device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens. For several queries on a GPU the keys and values come back in its own
        memory, as prefill methods read them many times: the new ones where there are no others."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        queries = key_states.shape[2]
        near = self.tier is None or self.policy.originals == "device" or not keys.is_cuda
        if near or queries == 1:
            return keys, values
        return self._on_device(key_states, value_states)

    def reset(self) -> None:
        super().reset()
        if self.tier is not None and self.telemetry is not None:
            self.tier.progress.zero_()
            self.telemetry.zero_()
        if self.scratch is not None:
            self.scratch.clear()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.tier is not None:
            done, start = self.tier.progress.unbind(1)
            whole = (self.cumulative_length - start).clamp(min=0) // self.policy.block
            done.copy_(torch.minimum(done, whole))
        if self.scratch is not None:
            self.scratch.forget(self.cumulative_length, self.policy.block)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        for buffer in self._more():
            buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rebind_more([b.repeat_interleave(repeats, 0) for b in self._more()])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._rebind_more([b[indices] for b in self._more()])

    def _rebind(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.tier is not None and self.policy.originals == "host":
            keys, values = (host_zeros(x.shape, x.dtype, x.device).copy_(x) for x in (keys, values))
        super()._rebind(keys, values)

    def _more(self) -> list[torch.Tensor]:
        if self.tier is None or self.telemetry is None:
            return []
        return [*self.tier, self.telemetry, *(self.scratch or ())]

    def _rebind_more(self, buffers: list[torch.Tensor]) -> None:
        if buffers:
            count = len(QuantizedKV._fields)
            scratch = Scratch(*buffers[count + 1 :]) if self.scratch is not None else None
            self._bind(QuantizedKV(*buffers[:count]), buffers[count], scratch)

    def _bind(self, tier: QuantizedKV, telemetry: torch.Tensor, scratch: Scratch | None) -> None:
        self.tier, self.telemetry, self.scratch = tier, telemetry, scratch
        if not torch.compiler.is_compiling():
            for tensor in self._more():
                torch._dynamo.mark_static_address(tensor)


@dataclasses.dataclass(frozen=True)
class Certificates:
    """What the steps of one layer's cache were certified to, over its heads. Bounds are in units of
    the values; `exact` is the share of head-steps that were recomputed from the originals. Of
    `wanted` keys and values of blocks, those that steps read exactly, `found` were in the scratch
    cache; the others, and what is not quantized or was recomputed, are `link_bytes`."""

    layer: int
    head_steps: int
    key_mean: float
    key_max: float
    value_mean: float
    value_max: float
    expanded: int
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


def certificates(cache: Cache) -> list[Certificates]:
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
    tokens = total["key_tokens"] + total["value_tokens"] - found * layer.policy.block
    return Certificates(
        layer=index,
        head_steps=int(total["steps"]),
        key_mean=total["key_sum"] / steps,
        key_max=peak["key_max"],
        value_mean=total["value_sum"] / steps,
        value_max=peak["value_max"],
        expanded=int(total["expanded"]),
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
