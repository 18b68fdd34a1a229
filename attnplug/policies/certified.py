"""certified: decode from a quantized cache that cannot lie.

The GPU holds keys as INT8 and values as INT4 (half of the cache), the host the originals. Every
head of every step is returned with a bound on its distance from exact attention, or is exact:

    ||out^ - out||_2 <= E_key + E_val + E_round

And the heads of a layer that are not exact are together, as its next product sees them, within the
tolerance of exact attention: their squared bounds sum up to tolerance^2 ||out||^2 at most.

Source: "Runtime-Certified Bounded-Error Quantized Attention" (docs/papers.md).
docs/methods/certified.md leads to the bounds, their proofs and the ladder. Prefill is another
phase's business.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import AttentionCall, LayerShape
from attnplug.ops import certified_attention, quantize_kv
from attnplug.ops.certified.certified_attention import MAX_RANKING
from attnplug.ops.certified.scratch import SETS
from attnplug.ops.common.checks import BLOCKS
from attnplug.ops.common.device import card
from attnplug.ops.common.sizes import padded_width
from attnplug.policies._certified_layer import HEADS, CertifiedLayer
from attnplug.policies.crossover import NEVER, DenseBelow

# Caches below so many tokens keep their originals on the device and are read by `dense`. On an H200
# one query a sequence that promotes two blocks of 64 is as fast from 64K on. The default is slower
# for one sequence at every length, and for four from 128K on (bench/results/certified.json): it
# serves where min_tokens asks. On a CPU all options were slower at every length that was tried.
CROSSOVER = {"cuda": 65536, "cpu": 524288}
# Bytes of shared memory that its kernels take in 16 bits on NVIDIA's cards, for each element of a
# padded head (bench/ptx.py fits): QUANTIZING times the keys of a block, and PREPARING at least.
QUANTIZING, PREPARING = 10, 416
TIMED = {"block": 64, "k_min": 2}  # of the steps that pay: the block, and the most of k_min


@dataclasses.dataclass(frozen=True)
class Certified(DenseBelow):
    """Decode over a two-tier cache, each layer within its tolerance or exact.

    block: keys a block. tolerance: blocks are read exactly until the root of the sum of the heads'
    squared bounds is at most this share of the norm of all of the layer's exact heads. Where blocks
    are not enough, heads are recomputed exactly until it is. None: no such limit. coverage, k_min:
    blocks are read exactly until they hold this share of the attention, and at least so many.
    k_max: at most so many for each of these. v_tol: a block whose mass times value error is above
    it is read with exact values.
    ranking: to which depth quantized and exact blocks must rank alike, else the head is recomputed.
    explore: share of the blocks that is spot-checked. originals: "host" or "device".
    scratch: slots of the GPU, for each row and KV head, that keep what was read of the host's
    originals. A slot has a block's keys or its values. All slots take at most a sixteenth of the
    originals. 0: none, as where no more than k_min blocks are promoted.
    min_tokens: caches below so many tokens are dense. None: every cache is, unless the other
    options promote so few blocks that a step was measured to be as fast as dense.
    """

    block: int = 64
    tolerance: float | None = 0.05
    coverage: float = 0.0
    k_min: int = 0
    k_max: int = 1024
    v_tol: float | None = None
    ranking: int = 0
    explore: float = 0.0001
    originals: str = "host"
    scratch: int = 256
    min_tokens: int | None = None

    name: ClassVar[str] = "certified"
    layer_type: ClassVar[type] = CertifiedLayer
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __post_init__(self) -> None:
        self.check_integers("block", "k_min", "k_max", "ranking", "scratch")
        for option in ("coverage", "explore"):
            self.check(option, type(getattr(self, option)) in (int, float), "a number")
        for option in ("tolerance", "v_tol"):
            kind = type(getattr(self, option))
            self.check(option, kind in (int, float, type(None)), "None or a number")
        self.check("block", self.block in BLOCKS, ", ".join(map(str, BLOCKS)))
        self.check("coverage", 0 <= self.coverage <= 1, "0 to 1")
        self.check("ranking", 0 <= self.ranking <= MAX_RANKING, f"0 to {MAX_RANKING}")
        self.check("k_min", self.k_min >= self.ranking, "at least ranking")
        self.check("k_max", max(self.k_min, 1) <= self.k_max <= 1024, "k_min to 1024")
        for option in ("tolerance", "v_tol"):
            value = getattr(self, option)
            self.check(option, value is None or value >= 0, "None or at least 0")
        self.check("explore", 0 <= self.explore <= 1, "0 to 1")
        self.check("originals", self.originals in ("host", "device"), "'host' or 'device'")
        self.check("scratch", 0 <= self.scratch <= 4096, "0 to 4096")
        self.check_min_tokens()

    def refusal(self, shape: LayerShape) -> str | None:
        why, found = super().refusal(shape), card(shape.device)
        wanted = padded_width(shape.head_dim) * max(QUANTIZING * self.block, PREPARING)
        if why or found.vendor != "nvidia" or wanted <= found.shared:
            return why
        return (
            f"certified: heads of {shape.head_dim} in blocks of {self.block} keys take {wanted:,} "
            f"bytes of shared memory in 16 bits, and this card gives a program {found.shared:,}"
        )

    def measured_crossover(self, kind: str) -> int:
        timed = self.block == TIMED["block"] and self.k_min <= TIMED["k_min"]
        return CROSSOVER[kind] if timed and self._promotes_k_min else NEVER

    @property
    def _promotes_k_min(self) -> bool:
        """Whether a step reads k_min blocks exactly, and no others."""
        none = self.tolerance is None and self.v_tol is None
        return none and self.coverage == 0 and self.explore == 0

    def slots(self, blocks: int) -> int:
        """Slots of the scratch cache of `blocks` blocks. None where k_min blocks are all that is
        promoted: reading these over the link takes less time than looking after them. At most a
        sixteenth of the originals, so that the GPU's share of the cache stays what it promises."""
        none = self._promotes_k_min or self.originals == "device"
        return 0 if none else min(self.scratch, max(SETS, blocks // 8))

    def note(self, shape: LayerShape) -> str:
        return (
            f"INT8 keys, INT4 values in blocks of {self.block}, originals on the {self.originals}; "
            f"{self.dense_caches(shape.device)}"
        )

    def cache_layer(self, max_length: int) -> CertifiedLayer:
        slots = self.slots(-(-max_length // self.block))
        return CertifiedLayer(max_length, self.block, slots, self.originals, self.serves)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self._own_layer(call)
        if layer is None or layer.tier is None:
            return self.leave_to_dense(call)
        rows: dict[str, Any] = {
            "block": self.block,
            "lengths": call.lengths,
            "start": call.first_key,
            "key_mask": call.key_mask,
        }
        quantize_kv(call.k, call.v, layer.tier, **rows)
        found = certified_attention(
            call.q,
            call.k,
            call.v,
            layer.tier,
            scale=call.scale,
            coverage=self.coverage,
            k_min=self.k_min,
            k_max=self.k_max,
            v_tol=self.v_tol,
            tolerance=self.tolerance,
            ranking=self.ranking,
            explore=self.explore,
            softcap=call.softcap,
            sinks=call.sinks,
            telemetry=layer.telemetry if call.q.shape[1] <= HEADS * call.k.shape[1] else None,
            scratch=layer.scratch,
            **rows,
        )
        return found.out

    def _own_layer(self, call: AttentionCall) -> CertifiedLayer | None:
        """The call's cache layer if its tier is of the call's keys and in these blocks, else None:
        one that this method did not make, or another layer's (Gemma 3n's share some)."""
        layer = call.state
        if not isinstance(layer, CertifiedLayer) or layer.keys is not call.k:
            return None
        return layer if layer.block == self.block else None
