"""What the kernels of one call of `certified_attention` are given: its tensors, its sizes, and the
memory in which they hand one another their records."""

from typing import Any, NamedTuple

import torch

from attnplug.ops.certified import records
from attnplug.ops.certified.kernels.arguments import (
    Arithmetic,
    BlockScores,
    Programs,
    Rows,
    Shape,
    Splits,
)
from attnplug.ops.certified.plan import Plan
from attnplug.ops.certified.scratch import SETS, Scratch
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.common.triton import tl


class Tier(NamedTuple):
    """The tensors of `QuantizedKV`, key metadata as int16."""

    k_codes: torch.Tensor
    k_meta: torch.Tensor
    v_codes: torch.Tensor
    v_meta: torch.Tensor
    summary: torch.Tensor
    check: torch.Tensor
    progress: torch.Tensor


class Inputs(NamedTuple):
    """The tensors of a call, as kernels read them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tier: Tier
    rows: Rows
    sinks: torch.Tensor | None
    telemetry: torch.Tensor | None
    scratch: Scratch | None

    def originals(self) -> dict[str, Any]:
        """What a kernel that reads originals is given."""
        mask = self.rows.key_mask
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "rows": self.rows,
            "q_strides": self.q.stride()[:2],
            "k_strides": self.k.stride()[:3],
            "v_strides": self.v.stride()[:3],
            "mask_stride": 0 if mask is None else mask.stride(0),
        }


class Memory(NamedTuple):
    """What the kernels of a call hand one another: see records.py."""

    scores: BlockScores
    splits: Splits  # of the first pass, [B Hq, splits + 1]
    merged: torch.Tensor  # their sum
    left_sums: torch.Tensor
    counts: torch.Tensor
    head_lse: torch.Tensor
    needs: torch.Tensor
    block_list: torch.Tensor
    promoted_sums: torch.Tensor
    changes: torch.Tensor  # of promotion, or the pieces of a recomputation, which replace it
    flags: torch.Tensor
    read_digest: torch.Tensor
    rest_norms: torch.Tensor
    exact_lse: torch.Tensor  # of those pieces
    exact_norms: torch.Tensor
    metadata_faults: torch.Tensor | None  # of `prepare`


def arithmetic_of(q: torch.Tensor, capped: bool) -> Arithmetic:
    if q.dtype == torch.float32:
        return Arithmetic(QK=tl.float32, PV=tl.float32, PARTS=1, CAPPED=capped)
    # bf16 has the range of the scales; the interpreter cannot multiply it.
    return Arithmetic(tl.bfloat16 if q.is_cuda else tl.float32, tl.float16, 2, capped)


def shape_of(inputs: Inputs, block: int) -> Shape:
    width, group = inputs.q.shape[3], inputs.q.shape[1] // inputs.k.shape[1]
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
    device = inputs.q.device

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    (batch, query_heads, _, width), kv_heads = inputs.q.shape, inputs.k.shape[1]
    heads, groups, blocks = batch * query_heads, batch * kv_heads, inputs.tier.check.shape[2]
    readers = programs.READERS or plan.list_readers
    listed = 1 if programs.READERS else groups * programs.CHUNKS * programs.OWN
    return Memory(
        scores=BlockScores(*floats(5, heads, max(1, blocks))),
        splits=Splits(floats(heads, plan.splits + 1, width), floats(heads, plan.splits + 1)),
        merged=floats(heads, width),
        left_sums=floats(heads, records.LEFT_FIELDS.value, programs.CHUNKS),
        counts=integers(groups, records.COUNT_FIELDS.value, programs.CHUNKS),
        head_lse=floats(heads, records.HEAD_FIELDS.value),
        needs=floats(heads, max(1, blocks)),
        block_list=integers(listed, records.LIST_FIELDS.value),
        promoted_sums=floats(heads, records.PROMOTED_FIELDS.value, readers),
        changes=floats(heads, max(readers, plan.pieces), width),
        flags=integers(groups, records.FLAG_FIELDS.value),
        read_digest=integers(groups),
        rest_norms=floats(heads, records.REST_FIELDS.value),
        exact_lse=floats(heads, plan.pieces),
        exact_norms=floats(heads, plan.pieces, records.EXACT_FIELDS.value),
        metadata_faults=integers(groups, preparing) if preparing else None,
    )
