"""What the kernels of one call of `certified_attention` are given: its tensors, its sizes, and the
memory in which they hand one another their records."""

from typing import Any, NamedTuple

import torch

from attnplug.ops.certified import records
from attnplug.ops.certified.kernels.arguments import (
    Arithmetic,
    BlockScores,
    Programs,
    Promotion,
    Shape,
    Splits,
)
from attnplug.ops.certified.plan import Plan
from attnplug.ops.certified.scratch import SETS, Scratch
from attnplug.ops.common.define import arguments_of
from attnplug.ops.common.rows import mask_bytes
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.common.views import Cache, Query, Rows, cache_of, query_of, rows_of

SCHEMA = (
    "certified_attention(Tensor q, Tensor k, Tensor v, Tensor k_codes, Tensor k_meta, "
    "Tensor v_codes, Tensor v_meta, Tensor summary, Tensor check, Tensor progress, float scale, "
    "int block, float coverage, int k_min, int k_max, float v_tol, "
    "float tolerance, int ranking, float explore, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask, float softcap, Tensor? sinks, Tensor(a!)? telemetry, "
    "Tensor(b!)? slots, Tensor(c!)? owner, Tensor(d!)? used, Tensor(e!)? seals, "
    "Tensor(f!)? counters) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Tier(NamedTuple):
    """The tensors of `QuantizedKV`, key metadata as int16."""

    k_codes: torch.Tensor
    k_meta: torch.Tensor
    v_codes: torch.Tensor
    v_meta: torch.Tensor
    summary: torch.Tensor
    check: torch.Tensor
    progress: torch.Tensor


class Call(arguments_of(SCHEMA)):
    """The arguments of the op."""

    __slots__ = ()

    @property
    def tier(self) -> "Tier":
        return Tier(*self[3:10])

    @property
    def scratch(self) -> Scratch | None:
        return None if self.owner is None else Scratch(*self[25:])


class CertifiedOutput(NamedTuple):
    """What `certified_attention` returns."""

    out: torch.Tensor  # [B,Hq,1,D]
    lse: torch.Tensor  # float32 [B,Hq,1]
    bounds: torch.Tensor  # float32 [B,Hq,6]
    rungs: torch.Tensor  # int32 [B,Hq]
    layer: torch.Tensor  # float32 [B,2]


class Inputs(NamedTuple):
    """What kernels are given of a call."""

    q: Query
    cache: Cache
    tier: Tier
    rows: Rows
    sinks: torch.Tensor | None
    telemetry: torch.Tensor | None
    scratch: Scratch | None

    @classmethod
    def of(cls, call: Call) -> "Inputs":
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in call[:3])
        rows = rows_of(k.shape[2], call.lengths, call.start, mask_bytes(call.key_mask))
        tier = call.tier._replace(k_meta=call.k_meta.view(torch.int16))
        rest = call.sinks, call.telemetry, call.scratch
        return cls(query_of(q), cache_of(k, v), tier, rows, *rest)

    @property
    def shapes(self) -> tuple[int, int, int, int]:
        """(rows, query heads, KV heads, blocks)."""
        batch, heads = self.q.at.shape[:2]
        return batch, heads, self.cache.k.shape[1], self.tier.check.shape[2]

    def originals(self) -> dict[str, Any]:
        """What a kernel that reads originals is given."""
        return {"q": self.q, "cache": self.cache, "rows": self.rows}


class Memory(NamedTuple):
    """What the kernels of a call hand one another: see records.py."""

    scores: BlockScores
    splits: Splits  # of the first pass, [B Hq, splits + 1]
    merged: torch.Tensor  # their sum
    left_sums: torch.Tensor
    head_sums: torch.Tensor
    needs: torch.Tensor
    promotion: Promotion
    rest_norms: torch.Tensor
    head_ends: torch.Tensor
    raised: torch.Tensor
    exact_lse: torch.Tensor  # of those pieces
    exact_norms: torch.Tensor
    metadata_faults: torch.Tensor | None  # of `prepare`


def arithmetic_of(q: torch.Tensor, capped: bool) -> Arithmetic:
    if q.dtype == torch.float32:
        return Arithmetic(FLOAT32_KEYS=True, FLOAT32_VALUES=True, PARTS=1, CAPPED=capped)
    # bf16 has the range of the scales; the interpreter cannot multiply it.
    keys, parts = not q.is_cuda, 2
    return Arithmetic(FLOAT32_KEYS=keys, FLOAT32_VALUES=False, PARTS=parts, CAPPED=capped)


def shape_of(inputs: Inputs, block: int) -> Shape:
    q, k = inputs.q.at, inputs.cache.k
    width, group = q.shape[3], q.shape[1] // k.shape[1]
    half = inputs.tier.v_codes.shape[4] // 16
    return Shape(
        GROUP=group,
        ROWS=max(16, next_power_of_two(group + 1)),  # a spare row sums the codes
        D=width,
        DP=padded_width(width),
        BLOCK=block,
        HALF=half,
        HALF_P=next_power_of_two(half),
    )


def programs_of(inputs: Inputs, plan: Plan, readers: int) -> Programs:
    chunks = plan.inline_chunks if readers > 0 else plan.chunks
    slots = 0 if inputs.scratch is None else inputs.scratch.owner.shape[2]
    blocks = inputs.tier.check.shape[2]
    return Programs(
        CHUNKS=chunks,
        OWN=max(16, next_power_of_two(cdiv(blocks, chunks))),
        READERS=readers,
        SPLITS=next_power_of_two(plan.splits + 1),
        WAYS=next_power_of_two(max(1, slots // chunks)),
        SETS=SETS,
    )


def memory_of(inputs: Inputs, plan: Plan, programs: Programs, preparing: int) -> Memory:
    """`preparing`: programs of `prepare` for each KV head, 0 for none."""
    device, width = inputs.q.at.device, inputs.q.at.shape[3]

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    batch, query_heads, kv_heads, blocks = inputs.shapes
    heads, groups = batch * query_heads, batch * kv_heads
    readers = programs.READERS or plan.list_readers
    listed = 1 if programs.READERS else groups * programs.CHUNKS * programs.OWN
    return Memory(
        scores=BlockScores(*floats(5, heads, max(1, blocks))),
        splits=Splits(floats(heads, plan.splits + 1, width), floats(heads, plan.splits + 1)),
        merged=floats(heads, width),
        left_sums=floats(heads, records.LEFT_FIELDS.value, programs.CHUNKS),
        head_sums=floats(heads, records.HEAD_FIELDS.value),
        needs=floats(heads, max(1, blocks)),
        promotion=Promotion(
            counts=integers(groups, records.COUNT_FIELDS.value, programs.CHUNKS),
            block_list=integers(listed, records.LIST_FIELDS.value),
            promoted_sums=floats(heads, records.PROMOTED_FIELDS.value, readers),
            changes=floats(heads, max(readers, plan.pieces), width),
            flags=integers(groups, records.FLAG_FIELDS.value),
            read_digest=integers(groups),
        ),
        rest_norms=floats(heads, records.REST_FIELDS.value),
        head_ends=floats(heads, records.END_FIELDS.value),
        raised=integers(heads),
        exact_lse=floats(heads, plan.pieces),
        exact_norms=floats(heads, plan.pieces, records.EXACT_FIELDS.value),
        metadata_faults=integers(groups, preparing) if preparing else None,
    )
