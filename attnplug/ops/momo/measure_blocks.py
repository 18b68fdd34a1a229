"""Exact attention of every gamma-th query, and for every query block the key blocks that hold most
of its rows' attention, chosen jointly:

    mass(n, j) = sum over the rows i of query block n of exp(S_i(j) - lse[i])
    blocks[n]  = the top_k blocks j in [sink, before[n]) of largest mass, ties to the lower block

S_i(j), out and lse are query_sparse_attention's: the log of what block j adds to row i's softmax
denominator, the row's output, its log-sum-exp. That op keeps a list for each row while the keys
pass, and merge_block_rows joins the lists; here all scores are kept, as float16, until the row's
lse is known, so nothing is estimated and no block is lost because no single row had room for it.
The scores of one query block weigh 2 rows S / block bytes; the launcher makes them for as many
query blocks at a time as fit SCORE_BYTES.

float16 moves a score by at most 2^-11 of its value (0.03 at 60), less than neighbouring rows
differ; scores saturate at 65504. A score or mass that is not finite counts as 0: listed last.

Source: the measuring pass of Measure Once, Mask Once, section 3, with its lists replaced.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np
import torch
import triton
import triton.language as tl

from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.momo.kernels import hopper as _hopper
from attnplug.ops.momo.kernels.query_sparse import launch_triton
from attnplug.ops.momo.merge_block_rows import check_before
from attnplug.ops.momo.online_topk import EVERY
from attnplug.ops.momo.query_sparse_attention import BLOCKS, run_reference

NAME = "measure_blocks"
# Scores kept at a time. More would not be faster: a quarter fills an H200 at 1M tokens.
SCORE_BYTES = 1 << 30
MAX_BLOCKS = 65536  # of a sequence: one program holds their masses in registers


def measure_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    before: torch.Tensor,
    *,
    scale: float,
    gamma: int = 16,
    block: int = 64,
    query_block: int = 128,
    top_k: int = 128,
    sink: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense rows and the query blocks' key blocks (equations above).

    Args:
        q: `[B,Hq,T,D]`; k, v: `[B,Hkv,S,D]`; float32, float16 or bfloat16, any strides.
        before: int32 `[1 or B,NQ]`, NQ = ceil(T / query_block): only blocks below it are
            candidates. They must be complete for every row of the query block, which those before
            its first query are.
        scale: factor on q . k, above 0.
        gamma: distance of the attended queries, in tokens; query_block is a multiple of it.
        block: keys a block, 16, 32, 64 or 128; at most 65536 blocks.
        top_k: blocks listed for each query block, at least 1.
        sink: first blocks that are no candidates.
        lengths, start, key_mask, softcap: as for query_sparse_attention.

    Returns:
        out `[B,Hq,R,D]` in q's dtype, lse `[B,Hq,R]` float32 (natural log), R = ceil(T / gamma),
        and blocks int32 `[B,Hq,NQ,top_k]`: ascending, no block twice, -1 last; all -1 past a padded
        row's end.

    Raises:
        ArgumentError: a shape, dtype, device or option that the text above excludes.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    return _op(
        q, k, v, before, scale, gamma, block, query_block, top_k, sink, lengths, start, key_mask,
        softcap,
    )  # fmt: skip


def _allocate(
    q, k, v, before, scale, gamma, block, query_block, top_k, sink, lengths, start, key_mask,
    softcap,
):  # fmt: skip
    check_attention_inputs(NAME, q, k, v)
    check_sequence_inputs(NAME, q, k, lengths, start, key_mask)
    require(math.isfinite(scale) and scale > 0, NAME, f"scale is {scale}, needs a positive number")
    require(softcap >= 0, NAME, f"softcap is {softcap}, needs 0 (off) or a positive number")
    require(gamma >= 1, NAME, f"gamma is {gamma}, needs at least 1")
    require(block in BLOCKS, NAME, f"block is {block}, needs one of {BLOCKS}")
    require(
        query_block >= 1 and query_block % gamma == 0,
        NAME,
        f"query_block is {query_block}, needs a multiple of gamma = {gamma}",
    )
    require(top_k >= 1, NAME, f"top_k is {top_k}, needs at least 1")
    require(sink >= 0, NAME, f"sink is {sink}, needs at least 0")
    require(
        k.shape[2] <= MAX_BLOCKS * block,
        NAME,
        f"k has {k.shape[2]} tokens, at most {MAX_BLOCKS} blocks of {block} are served",
    )
    shape = (q.shape[0], q.shape[1], (q.shape[2] + gamma - 1) // gamma)
    query_blocks = (q.shape[2] + query_block - 1) // query_block
    check_before(NAME, before, q.shape[0], query_blocks, q.device)
    return (
        q.new_empty((*shape, q.shape[3])),
        q.new_empty(shape, dtype=torch.float32),
        q.new_empty((*shape[:2], query_blocks, top_k), dtype=torch.int32),
    )


# ---- numba: the specification -------------------------------------------------------------------


def _cpu(
    q, k, v, before, scale, gamma, block, query_block, top_k, sink, lengths, start, key_mask,
    softcap, out, lse, blocks,
):  # fmt: skip
    if out.numel() == 0:
        return
    kept = max(1, k.shape[2] // block)
    index = torch.empty((*lse.shape, kept), dtype=torch.int32)
    score = torch.empty((*lse.shape, kept), dtype=torch.float32)
    run_reference(
        NAME, q, k, v, scale, gamma, block, 0, EVERY, lengths, start, key_mask, softcap,
        out, lse, index, score,
    )  # fmt: skip
    score = score.clamp_(max=65504).half().float()
    edge = before[:, None].expand(blocks.shape[:3]).flatten(0, 1)
    _choose(
        score.flatten(0, 1).numpy(), lse.flatten(0, 1).numpy(), edge.contiguous().numpy(),
        query_block // gamma, sink, blocks.flatten(0, 1).numpy(),
    )  # fmt: skip


@numba.njit(parallel=True, cache=True)
def _choose(score, lse, before, rows, sink, out):
    """score `[H,R,kept]`, lse `[H,R]`, before `[H,NQ]`, out `[H,NQ,top_k]`; batch and heads in one
    axis."""
    query_blocks, top_k = out.shape[1], out.shape[2]
    for item in numba.prange(out.shape[0] * query_blocks):
        head, place = item // query_blocks, item % query_blocks
        edge = min(before[head, place], score.shape[2])
        if not (lse[head, place * rows : (place + 1) * rows] != -np.inf).any():
            edge = 0  # past a padded row's end: no row, no list
        mass = np.zeros(max(edge - sink, 0), np.float32)
        for row in range(place * rows, min((place + 1) * rows, score.shape[1])):
            for j in range(len(mass)):
                part = np.exp(score[head, row, sink + j] - lse[head, row])
                if np.isfinite(part):
                    mass[j] += part
        # a stable sort of the negated masses leaves equal ones in ascending block order
        best = np.sort(np.argsort(-mass, kind="mergesort")[:top_k])
        out[head, place] = -1
        out[head, place, : len(best)] = sink + best


# ---- Triton -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["R", "NQ", "kept", "place0", "heads", "before_b"])
def _mass_kernel(
    SCORE,
    LSE,
    BEFORE,
    MASS,
    R,
    NQ,
    kept,
    place0,
    heads,
    before_b,
    before_p,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    """Masses `[head,NQ,kept]` of N blocks for GROUPS query blocks of ROWS rows (PAD: a power of
    two) from scores `[head,kept,R]`. Blocks that are no candidate of any stay unwritten."""
    head = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    edge = BEFORE + head // heads * before_b + (place0 + place) * before_p
    if tl.program_id(2) * N >= tl.max(tl.load(edge, mask=place < NQ, other=0), 0):
        return
    j = tl.program_id(2) * N + tl.arange(0, N)
    slot = tl.arange(0, GROUPS * PAD)
    row = (tl.program_id(1) * GROUPS + slot // PAD) * ROWS + slot % PAD
    real = (slot % PAD < ROWS) & (row < R)
    lse = tl.load(LSE + head * R + row, mask=real, other=0.0)
    lse = tl.where(lse == -float("inf"), 0.0, lse)  # of a row that saw nothing: nor have its blocks
    at = SCORE + head * kept * R + j[:, None] * R + row[None, :]
    score = tl.load(at, mask=(j < kept)[:, None] & real[None, :], other=float("-inf"))
    part = tl.exp(score.to(tl.float32) - lse[None, :])
    part = tl.where(part < float("inf"), part, 0.0)  # NaN is not below it either
    mass = tl.sum(tl.reshape(part, [N, GROUPS, PAD]), 2)
    at = MASS + (head * NQ + place[None, :]) * kept + j[:, None]
    tl.store(at, mass, mask=(j < kept)[:, None] & (place < NQ)[None, :])


@triton.jit(
    do_not_specialize=["R", "NQ", "kept", "place0", "heads", "before_b", "all_places", "sink"]
)
def _choose_kernel(
    MASS,
    LSE,
    BEFORE,
    OUT,
    R,
    NQ,
    kept,
    place0,
    heads,
    before_b,
    before_p,
    all_places,
    sink,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    PAD_K: tl.constexpr,
):
    """The TOP_K largest of one query block's masses, by bisection over their bits: those of floats
    that are not negative are ordered as the floats are."""
    program = tl.program_id(0).to(tl.int64)
    head, place = program // NQ, place0 + program % NQ
    edge = tl.load(BEFORE + head // heads * before_b + place * before_p)
    slot = tl.arange(0, PAD)
    row = program % NQ * ROWS + slot
    lse = tl.load(LSE + head * R + row, mask=(slot < ROWS) & (row < R), other=-float("inf"))
    edge = tl.where(tl.max((lse != -float("inf")).to(tl.int32), 0) == 1, edge, 0)
    j = tl.arange(0, N)
    candidate = (j >= sink) & (j < tl.minimum(edge, kept))
    mass = tl.load(MASS + program * kept + j, mask=candidate, other=0.0)
    key = tl.where(candidate, mass.to(tl.int32, bitcast=True), -1)
    least = tl.zeros([], tl.int32)  # of the kept keys, if there are more than TOP_K
    for i in range(31):
        higher = least | (1 << (30 - i))
        least = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= TOP_K, higher, least)
    above = key > least
    equal = (key == least).to(tl.int32)
    room = TOP_K - tl.sum(above.to(tl.int32), 0)
    chosen = (above | ((equal == 1) & (tl.cumsum(equal, 0) <= room))).to(tl.int32)
    slot = tl.cumsum(chosen, 0) - 1
    out = OUT + (head * all_places + place) * TOP_K
    tl.store(out + slot, j, mask=chosen == 1)
    empty = tl.arange(0, PAD_K)
    listed = tl.sum(chosen, 0)
    tl.store(out + empty, tl.full([PAD_K], -1, tl.int32), (empty >= listed) & (empty < TOP_K))


class _Part(NamedTuple):
    """A part of the call whose scores are in memory together: slices of batch rows, KV heads and
    queries."""

    batch: slice
    heads: slice
    queries: slice


def _parts(shape, kv_heads, gamma, query_block, kept, padded) -> Iterator[_Part]:
    """Unpadded calls are cut into runs of query blocks; rows of padded ones begin where the padding
    ends, which the host does not know, so these are cut into batch rows and KV heads."""
    batch, heads, queries, _ = shape
    rows = query_block // gamma
    each = 2 * kept * rows  # bytes of a query block of one head
    whole = -(-queries // query_block)
    if not padded:
        step = max(1, SCORE_BYTES // (each * batch * heads))
        step = -(-whole // -(-whole // step))  # even parts
        for first in range(0, whole, step):
            last = min((first + step) * query_block, queries)
            yield _Part(slice(0, batch), slice(0, kv_heads), slice(first * query_block, last))
        return
    group = heads // kv_heads
    if each * whole * batch * heads <= SCORE_BYTES:
        yield _Part(slice(0, batch), slice(0, kv_heads), slice(0, queries))
        return
    step = max(1, min(kv_heads, SCORE_BYTES // (each * whole * group)))
    for b in range(batch):
        for first in range(0, kv_heads, step):
            last = min(first + step, kv_heads)
            yield _Part(slice(b, b + 1), slice(first, last), slice(0, queries))


def launch_measure_blocks(
    q, k, v, before, scale, gamma, block, query_block, top_k, sink, lengths, start, key_mask,
    softcap, out, lse, blocks,
):  # fmt: skip
    """The kernels on the current device, or Triton's interpreted on CPU tensors
    (TRITON_INTERPRET=1). No value is read on the host."""
    if out.numel() == 0:
        return
    kept = max(1, k.shape[2] // block)
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    padded = start is not None
    before = before.expand(q.shape[0], -1)
    for part in _parts(q.shape, k.shape[1], gamma, query_block, kept, padded):
        heads = slice(part.heads.start * group, part.heads.stop * group)
        rows = slice(part.queries.start // gamma, -(-part.queries.stop // gamma))
        later = queries - part.queries.stop  # a part's queries are the last of fewer keys
        held = slice(0, k.shape[2] - later if lengths is None else None)
        target = out[part.batch, heads, rows], lse[part.batch, heads, rows]
        here = [x if x.is_contiguous() else x.new_empty(x.shape) for x in target]
        _launch_part(
            q[part.batch, heads, part.queries], k[part.batch, part.heads, held],
            v[part.batch, part.heads, held], before[part.batch],
            part.queries.start // query_block, scale, gamma, block, query_block, sink,
            _cut(lengths, part.batch, later), _cut(start, part.batch, 0),
            None if key_mask is None else key_mask[part.batch, held], softcap, *here,
            blocks[part.batch, heads],
        )  # fmt: skip
        for whole, piece in zip(target, here, strict=True):
            if whole is not piece:
                whole.copy_(piece)


def _cut(rows, batch, less):
    """Lengths or starts of the batch rows, lower by `less`."""
    if rows is None:
        return None
    rows = rows if rows.shape[0] == 1 else rows[batch]
    return rows - less if less else rows


def _launch_part(
    q, k, v, before, place0, scale, gamma, block, query_block, sink, lengths, start, key_mask,
    softcap, out, lse, blocks,
):  # fmt: skip
    """Rows and lists of consecutive query blocks, the first being `place0` of before and blocks."""
    kept = max(1, k.shape[2] // block)
    shape = (*out.shape[:2], kept, out.shape[2])
    score = torch.empty(shape, dtype=torch.float16, device=q.device)
    plain = start is None and key_mask is None and softcap == 0.0
    if plain and block == _hopper.BLOCK and _hopper.serves(q, k, v):
        _hopper.launch_scores(q, k, v, scale, gamma, lengths, out, lse, score)
    else:
        launch_triton(
            q, k, v, scale, gamma, block, -1, 0, "estimated", lengths, start, key_mask, softcap,
            out, lse, score.new_empty(0, dtype=torch.int32), score,
        )  # fmt: skip
    _launch_choice(score, lse, before, place0, query_block // gamma, sink, blocks)


def _launch_choice(score, lse, before, place0, each, sink, blocks):
    """The lists of consecutive query blocks of `each` rows, from the rows' scores and lse."""
    heads, (kept, rows) = lse.shape[0] * lse.shape[1], score.shape[2:]
    places = triton.cdiv(rows, each)
    mass = torch.empty((heads, places, kept), dtype=torch.float32, device=score.device)
    pad = triton.next_power_of_2(each)
    groups = max(1, 128 // pad)
    common = dict(
        LSE=lse,
        BEFORE=before,
        MASS=mass,
        R=rows,
        NQ=places,
        kept=kept,
        place0=place0,
        heads=lse.shape[1],
        before_b=before.stride(0),
        before_p=before.stride(1),
        ROWS=each,
        PAD=pad,
    )
    _mass_kernel[(heads, triton.cdiv(places, groups), triton.cdiv(kept, 64))](
        SCORE=score, GROUPS=groups, N=64, num_warps=8, **common
    )
    width = max(2, triton.next_power_of_2(kept))
    _choose_kernel[(heads * places,)](
        OUT=blocks,
        all_places=blocks.shape[2],
        sink=sink,
        TOP_K=blocks.shape[3],
        N=width,
        PAD_K=triton.next_power_of_2(blocks.shape[3]),
        num_warps=min(16, max(1, width // 512)),
        **common,
    )


_op = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor before, float scale, int gamma, int block, "
    "int query_block, int top_k, int sink, Tensor? lengths, Tensor? start, Tensor? key_mask, "
    "float softcap) -> (Tensor, Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_measure_blocks,
)
