"""Union and trim: the block lists of the sparse rows of one query block become its one list.

The rows r of a query block each list blocks j with scores S_r(j). The union of the listed blocks is
ranked and its best `trim` are kept:

    mass  sum over r of exp(S_r(j) - lse_r)     a row that did not list j adds 0
    mean  mean over the rows that listed j of S_r(j)

`mean` is Algorithm 2 of the MOMO paper (Measure Once, Mask Once, appendix B; docs/papers.md).
`mass` is the softmax mass that the listing rows give the block. On SmolLM2 it captures more (0.9126
against 0.9007 at 8 blocks), because scores of different rows have different normalisers.

Blocks that are read anyway, the sink and the local part, can be left out (`sink`, `before`). They
would take slots of the list from blocks that nothing else reads.

The CUDA path is one kernel, one program a query block, no memory beyond the output. It packs
entries as 64-bit (index, value) keys and sorts them in registers. A segmented scan sums the runs of
one index. A partial sort of (rank, index) keys keeps the best, and these are sorted by index.
"""

import numpy as np
import torch

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import next_power_of_two
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.momo.kernels.block_sparse import count_run

NAME = "merge_block_rows"
MERGES = ("mass", "mean")
# One program sorts all entries of its query block in registers.
MAX_ENTRIES = 16384

_NO_BLOCK = 0x7FFFFFFF
_LOW = 0xFFFFFFFF
_NO_BLOCK_TL = tl.constexpr(_NO_BLOCK)
_LOW_TL = tl.constexpr(_LOW)
_NO_KEY = tl.constexpr(-(2**63))


def merge_block_rows(
    index: torch.Tensor,
    score: torch.Tensor,
    lse: torch.Tensor,
    *,
    rows: int,
    trim: int,
    merge: str = "mass",
    sink: int = 0,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge the block lists of `rows` neighbouring sparse rows and keep the best `trim` blocks.

    index `[B,H,R,K]` int32: key-block numbers, -1 (any negative) for an empty slot. score
    `[B,H,R,K]` fp32: log of the block's softmax mass before normalisation. lse `[B,H,R]` fp32: the
    row's natural log-sum-exp. A NaN score counts as -inf: the block is listed, but ranked last.
    `rows * K` may be at most 16384. Blocks below `sink`, and from `before` `[1 or B,ceil(R/rows)]`
    (int32) on, count as not listed.

    Returns int32 `[B,H,ceil(R/rows),trim]`: blocks in ascending order, no block twice, -1 last.
    Ties in rank go to the lower block index. Deterministic, whatever the order inside the rows.

    Source: MOMO (Measure Once, Mask Once), appendix B, Algorithm 2, for merge="mean".
    """
    refuse_gradients(NAME, score, lse)
    return _OP(index, score, lse, rows, trim, merge, sink, before)


def _allocate(
    index: torch.Tensor,
    score: torch.Tensor,
    lse: torch.Tensor,
    rows: int,
    trim: int,
    merge: str,
    sink: int,
    before: torch.Tensor | None,
) -> torch.Tensor:
    require(index.dim() == 4, NAME, f"index has {index.dim()} dimensions, needs [B,H,R,K]")
    require(index.dtype == torch.int32, NAME, f"index is {index.dtype}, needs int32")
    require(
        score.shape == index.shape,
        NAME,
        f"score has shape {tuple(score.shape)}, index {tuple(index.shape)}; they must agree",
    )
    require(
        lse.shape == index.shape[:3],
        NAME,
        f"lse has shape {tuple(lse.shape)}, needs [B,H,R] = {tuple(index.shape[:3])}",
    )
    for label, tensor in (("score", score), ("lse", lse)):
        require(tensor.dtype == torch.float32, NAME, f"{label} is {tensor.dtype}, needs float32")
        require(
            tensor.device == index.device,
            NAME,
            f"{label} is on {tensor.device}, index on {index.device}; move them to one device",
        )
    require(rows >= 1, NAME, f"rows is {rows}, needs at least 1")
    require(trim >= 1, NAME, f"trim is {trim}, needs at least 1")
    require(merge in MERGES, NAME, f"merge is {merge!r}, needs one of {', '.join(MERGES)}")
    entries = rows * index.shape[3]
    require(
        entries <= MAX_ENTRIES,
        NAME,
        f"rows * K = {rows} * {index.shape[3]} = {entries} entries, at most {MAX_ENTRIES} fit one "
        "program; use a smaller query block, a larger gamma or fewer blocks a row",
    )
    blocks = (index.shape[2] + rows - 1) // rows
    require(sink >= 0, NAME, f"sink is {sink}, needs at least 0")
    if before is not None:
        check_before(NAME, before, index.shape[0], blocks, index.device)
    return index.new_empty((index.shape[0], index.shape[1], blocks, trim))


def check_before(
    name: str, before: torch.Tensor, batch: int, query_blocks: int, device: torch.device
) -> None:
    """Raise ArgumentError unless `before` bounds the candidates of so many query blocks."""
    require(
        before.dim() == 2
        and before.shape[0] in (1, batch)
        and before.shape[1] == query_blocks
        and before.dtype == torch.int32
        and before.device == device,
        name,
        f"before is {tuple(before.shape)} {before.dtype} on {before.device}, needs "
        f"[1 or B,query blocks] = [{batch},{query_blocks}] int32 on {device}",
    )


# ---- numba: the specification -------------------------------------------------------------------


@njit()
def _merge_one(index, score, lse, trim, mass, sink, before, out):
    """Merge index, score `[rows, K]` with lse `[rows]` into out `[trim]`."""
    out[:] = -1
    # Sorting values inside a run makes its sum independent of the order of the rows.
    entries = np.empty(index.size, np.int64)
    value = np.empty(1, np.float32)
    bits = value.view(np.uint32)
    used = 0
    for row in range(index.shape[0]):
        for slot in range(index.shape[1]):
            if not sink <= index[row, slot] < before:
                continue
            value[0] = score[row, slot] - lse[row] if mass else score[row, slot]
            if np.isnan(value[0]):
                value[0] = -np.inf
            if mass:
                value[0] = np.exp(value[0])
            entries[used] = (np.int64(index[row, slot]) << 32) | np.int64(bits[0])
            used += 1
    entries = np.sort(entries[:used])
    blocks = np.empty(used, np.int64)
    ranks = np.empty(used, np.float32)
    distinct = 0
    entry = 0
    while entry < used:
        block = entries[entry] >> 32
        total = 0.0
        count = 0
        while entry < used and entries[entry] >> 32 == block:
            bits[0] = np.uint32(entries[entry] & _LOW)
            total += value[0]
            count += 1
            entry += 1
        if not mass:
            total /= count
        blocks[distinct] = block
        ranks[distinct] = -np.inf if np.isnan(total) else total
        distinct += 1
    # A stable sort of the negated ranks leaves equal ranks in ascending block order.
    best = np.argsort(-ranks[:distinct], kind="mergesort")[:trim]
    kept = np.sort(blocks[:distinct][best])
    out[: kept.size] = kept


@njit(parallel=True)
def _reference(index, score, lse, rows, trim, mass, sink, before, out):
    """index, score `[H,R,K]`, lse `[H,R]`, before `[H,blocks]`, out `[H,blocks,trim]`, heads and
    batch in one axis."""
    blocks = out.shape[1]
    for item in prange(index.shape[0] * blocks):
        head, block = item // blocks, item % blocks
        span = slice(block * rows, min((block + 1) * rows, index.shape[1]))
        _merge_one(
            index[head, span],
            score[head, span],
            lse[head, span],
            trim,
            mass,
            sink,
            before[head, block],
            out[head, block],
        )


def _cpu(index, score, lse, rows, trim, merge, sink, before, out):
    if out.numel() == 0:
        return
    limit = (
        torch.full((1, 1), _NO_BLOCK, dtype=torch.int64, device="cpu")
        if before is None
        else before.long()
    )
    _reference(
        *arrays(index.flatten(0, 1).contiguous(), score.flatten(0, 1).contiguous()),
        *arrays(lse.flatten(0, 1).contiguous(), rows, trim, merge == "mass", sink),
        *arrays(limit[:, None].expand(out.shape[:3]).flatten(0, 1).contiguous(), out.flatten(0, 1)),
    )


# ---- Triton -------------------------------------------------------------------------------------


@triton.jit
def _add_run(block_a, sum_a, count_a, block_b, sum_b, count_b):
    # Runs of equal blocks are contiguous, so equal ends mean that all of b's run continues a's.
    same = block_a == block_b
    return (
        block_b,
        tl.where(same, sum_a + sum_b, sum_b),
        tl.where(same, count_a + count_b, count_b),
    )


# Two sorts take long to compile: once, whatever the sizes.
@triton.jit(do_not_specialize=["R", "BLOCKS", "HEADS", "before_b", "before_p", "sink"])
def _merge_kernel(
    INDEX,
    SCORE,
    LSE,
    OUT,
    BEFORE,
    R,
    BLOCKS,
    HEADS,
    before_b,
    before_p,
    sink,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TRIM: tl.constexpr,
    MASS: tl.constexpr,
    ENTRIES: tl.constexpr,
    KEEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // BLOCKS * R + program % BLOCKS * ROWS
    entry = tl.arange(0, ENTRIES)
    rows_left = tl.minimum(R - program % BLOCKS * ROWS, ROWS)
    inside = entry < rows_left * K
    block = tl.load(INDEX + row * K + entry, mask=inside, other=-1)
    candidate = block >= sink
    if BEFORE is not None:
        batch = program // BLOCKS // HEADS
        candidate &= block < tl.load(BEFORE + batch * before_b + program % BLOCKS * before_p)
    value = tl.load(SCORE + row * K + entry, mask=candidate, other=float("-inf"))
    if MASS:
        value -= tl.load(LSE + row + entry // K, mask=candidate, other=0.0)
    value = tl.where(value == value, value, float("-inf"))
    if MASS:
        value = tl.exp(value)
    block = tl.where(candidate, block, _NO_BLOCK_TL)
    entries = (block.to(tl.int64) << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & _LOW_TL)
    entries = tl.sort(entries)

    block = (entries >> 32).to(tl.int32)
    value = entries.to(tl.int32).to(tl.float32, bitcast=True)
    one = tl.full([ENTRIES], 1, tl.int32)
    _, rank_in_run = tl.associative_scan((block, one), 0, count_run)
    _, total, times = tl.associative_scan((block, value, one), 0, _add_run, reverse=True)
    if not MASS:
        total = total / times.to(tl.float32)
    total = tl.where(total == total, total, float("-inf"))
    total = tl.where(total == 0.0, 0.0, total)  # -0.0 ties with 0.0

    # The first entry of a run carries its total; floats become integers of the same order.
    bits = total.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & _NO_BLOCK_TL)
    ranks = (bits.to(tl.int64) << 32) | (block ^ _NO_BLOCK_TL).to(tl.int64)
    first = (rank_in_run == 1) & (block != _NO_BLOCK_TL)
    best = tl.topk(tl.where(first, ranks, _NO_KEY), KEEP)
    slot = tl.arange(0, KEEP)
    kept = (best != _NO_KEY) & (slot < TRIM)
    block = tl.where(kept, (best & _LOW_TL).to(tl.int32) ^ _NO_BLOCK_TL, _NO_BLOCK_TL)
    block = tl.sort(block)
    block = tl.where(block == _NO_BLOCK_TL, -1, block)
    tl.store(OUT + program * TRIM + slot, block, mask=slot < TRIM)
    for column in range(KEEP, TRIM, KEEP):
        tl.store(
            OUT + program * TRIM + column + slot,
            tl.full([KEEP], -1, tl.int32),
            mask=column + slot < TRIM,
        )


def _warps(entries: int) -> int:
    # 32 entries a lane are fastest (what a lane holds is compared without a shuffle); beyond 1024
    # entries 16, or the sort takes minutes to compile.
    return 1 if entries <= 1024 else entries // 512


def launch_merge_block_rows(index, score, lse, rows, trim, merge, sink, before, out):
    """Fill `out` with the Triton kernel; no allocation unless an input is not contiguous."""
    heads, blocks = out.shape[0] * out.shape[1], out.shape[2]
    if out.numel() == 0:
        return
    if index.shape[3] == 0:
        out.fill_(-1)
        return
    entries = max(2, next_power_of_two(rows * index.shape[3]))
    launch_kernel(
        _merge_kernel,
        grid=(heads * blocks,),
        INDEX=index.contiguous(),
        SCORE=score.contiguous(),
        LSE=lse.contiguous(),
        OUT=out,
        BEFORE=before,
        R=index.shape[2],
        BLOCKS=blocks,
        HEADS=out.shape[1],
        before_b=row_step(before),
        before_p=0 if before is None else before.stride(1),
        sink=sink,
        K=index.shape[3],
        ROWS=rows,
        TRIM=trim,
        MASS=merge == "mass",
        ENTRIES=entries,
        KEEP=min(entries, max(2, next_power_of_two(trim))),
        num_warps=_warps(entries),
    )


_OP = define_op(
    f"{NAME}(Tensor index, Tensor score, Tensor lse, int rows, int trim, str merge, "
    "int sink, Tensor? before) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_merge_block_rows,
)
