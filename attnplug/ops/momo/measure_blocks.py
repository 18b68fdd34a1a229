"""Exact attention of every gamma-th query, and for every query block the key blocks that hold most
of its rows' attention, chosen jointly:

    mass(n, j) = sum over the rows i of query block n of exp(S_i(j) - lse[i])
    blocks[n]  = the top_k blocks j in [sink, before[n]) of largest mass, ties to the lower block

S_i(j), out and lse are query_sparse_attention's: the log of what block j adds to row i's softmax
denominator, the row's output, its log-sum-exp. That op keeps a list for each row while the keys
pass, and merge_block_rows joins the lists. This op keeps all scores, as float16, until the row's
lse is known: nothing is estimated, and no block is lost because no single row had room for it.
The scores of one query block take 2 rows S / block bytes. The launcher computes them for as many
query blocks at a time as fit SCORE_BYTES.

A call without values measures and chooses alone: it has no product with v, which is half of the
FLOPs, and no out. Its lse and blocks are those of the call with any values.

float16 changes a score by at most 2^-11 of its value (0.03 at 60), less than the scores of
neighbouring rows differ. Scores saturate at 65504. A score that is not finite adds no mass.

Source: the measuring pass of Measure Once, Mask Once, section 3 (docs/papers.md). Its lists are
replaced.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from attnplug.ops.common.checks import WIDE_HEAD_DIMS, check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.momo.kernels import hopper as _hopper
from attnplug.ops.momo.kernels.measure_blocks import launch_lists
from attnplug.ops.momo.kernels.query_sparse import launch_triton
from attnplug.ops.momo.merge_block_rows import check_before
from attnplug.ops.momo.online_topk import EVERY
from attnplug.ops.momo.query_sparse_attention import BLOCKS, run_reference

NAME = "measure_blocks"
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor? v, Tensor before, float scale, int gamma, int block, "
    "int query_block, int top_k, int sink, Tensor? lengths, Tensor? start, Tensor? key_mask, "
    "float softcap) -> (Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)
# Scores kept at a time. More would not be faster: a quarter fills an H200 at 1M tokens.
SCORE_BYTES = 1 << 30
MAX_BLOCKS = 65536  # of a sequence: one program holds their masses in registers


def measure_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
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
        q: `[B,Hq,T,D]`; k, v: `[B,Hkv,S,D]`; float32, float16 or bfloat16, any strides. v may be
            None.
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
        out `[B,Hq,R,D]` in q's dtype, `[B,Hq,R,0]` without v; lse `[B,Hq,R]` float32 (natural log),
        R = ceil(T / gamma). Then blocks int32 `[B,Hq,NQ,top_k]`: ascending, no block twice, -1
        last; all -1 past a padded row's end.

    Raises:
        ArgumentError: a shape, dtype, device or option that the text above excludes.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    sizes, rows = (gamma, block, query_block, top_k, sink), (lengths, start, key_mask)
    return _op(q, k, v, before, scale, *sizes, *rows, softcap)


def _allocate(*args):
    call = Call(*args)
    q, k, v, scale, softcap = call.q, call.k, call.v, call.scale, call.softcap
    gamma, block, query_block = call.gamma, call.block, call.query_block
    top_k, sink = call.top_k, call.sink
    check_attention_inputs(NAME, q, k, v, head_dims=WIDE_HEAD_DIMS)
    check_sequence_inputs(NAME, q, k, call.lengths, call.start, call.key_mask)
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
    check_before(NAME, call.before, q.shape[0], query_blocks, q.device)
    return (
        q.new_empty((*shape, 0 if v is None else q.shape[3])),
        q.new_empty(shape, dtype=torch.float32),
        q.new_empty((*shape[:2], query_blocks, top_k), dtype=torch.int32),
    )


# ---- numba: the specification -------------------------------------------------------------------


def _cpu(*args):
    call, (out, lse, blocks) = Call(*args[:-3]), args[-3:]
    k, v = call.k, call.v
    if lse.numel() == 0:
        return
    v = k.new_empty((*k.shape[:3], 0)) if v is None else v
    kept = max(1, k.shape[2] // call.block)
    index = torch.empty((*lse.shape, kept), dtype=torch.int32, device="cpu")
    score = torch.empty((*lse.shape, kept), dtype=torch.float32, device="cpu")
    run_reference(
        NAME,
        (call.q, k, v, call.lengths, call.start, call.key_mask),
        (out, lse, index, score),
        scale=call.scale,
        gamma=call.gamma,
        block=call.block,
        exact_k=0,
        algorithm=EVERY,
        softcap=call.softcap,
    )
    score = score.clamp_(max=65504).half().float()
    edge = call.before[:, None].expand(blocks.shape[:3]).flatten(0, 1)
    _choose(
        score.flatten(0, 1).numpy(),
        lse.flatten(0, 1).numpy(),
        edge.contiguous().numpy(),
        call.query_block // call.gamma,
        call.sink,
        blocks.flatten(0, 1).numpy(),
    )


@njit(parallel=True)
def _choose(score, lse, before, rows, sink, out):
    """score `[H,R,kept]`, lse `[H,R]`, before `[H,NQ]`, out `[H,NQ,top_k]`; batch and heads in one
    axis."""
    query_blocks, top_k = out.shape[1], out.shape[2]
    for item in prange(out.shape[0] * query_blocks):
        head, query_block = item // query_blocks, item % query_blocks
        edge = min(before[head, query_block], score.shape[2])
        if not (lse[head, query_block * rows : (query_block + 1) * rows] != -np.inf).any():
            edge = 0  # past a padded row's end: no row, no list
        mass = np.zeros(max(edge - sink, 0), np.float32)
        for row in range(query_block * rows, min((query_block + 1) * rows, score.shape[1])):
            for j in range(len(mass)):
                part = np.exp(score[head, row, sink + j] - lse[head, row])
                if np.isfinite(part):
                    mass[j] += part
        # a stable sort of the negated masses leaves equal ones in ascending block order
        best = np.sort(np.argsort(-mass, kind="mergesort")[:top_k])
        out[head, query_block] = -1
        out[head, query_block, : len(best)] = sink + best


# ---- CUDA -------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A part of the call whose scores are in memory together: slices of batch rows, KV heads and
    queries."""

    batch: slice
    heads: slice
    queries: slice


def _parts(shape, kv_heads, gamma, query_block, kept, padded) -> Iterator[_Part]:
    """Unpadded calls are cut into runs of query blocks. The rows of padded calls begin where the
    padding ends, which the host does not know: these are cut into batch rows and KV heads."""
    batch, heads, queries, _ = shape
    rows = query_block // gamma
    block_bytes = 2 * kept * rows  # of the scores of one head's query block
    query_blocks = -(-queries // query_block)
    if not padded:
        at_once = max(1, SCORE_BYTES // (block_bytes * batch * heads))
        at_once = -(-query_blocks // -(-query_blocks // at_once))  # even parts
        for first in range(0, query_blocks, at_once):
            last = min((first + at_once) * query_block, queries)
            yield _Part(slice(0, batch), slice(0, kv_heads), slice(first * query_block, last))
        return
    group = heads // kv_heads
    if block_bytes * query_blocks * batch * heads <= SCORE_BYTES:
        yield _Part(slice(0, batch), slice(0, kv_heads), slice(0, queries))
        return
    at_once = max(1, min(kv_heads, SCORE_BYTES // (block_bytes * query_blocks * group)))
    for b in range(batch):
        for first in range(0, kv_heads, at_once):
            last = min(first + at_once, kv_heads)
            yield _Part(slice(b, b + 1), slice(first, last), slice(0, queries))


def launch_measure_blocks(*args):
    """The kernels on the current device, or Triton's interpreted on CPU tensors
    (TRITON_INTERPRET=1). No value is read on the host."""
    call, (out, lse, blocks) = Call(*args[:-3]), args[-3:]
    if lse.numel() == 0:
        return
    q, k, v, lengths, start, key_mask = *args[:3], call.lengths, call.start, call.key_mask
    gamma, block, query_block = call.gamma, call.block, call.query_block
    kept = max(1, k.shape[2] // block)
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    padded = start is not None
    before = call.before.expand(q.shape[0], -1)
    for part in _parts(q.shape, k.shape[1], gamma, query_block, kept, padded):
        heads = slice(part.heads.start * group, part.heads.stop * group)
        rows = slice(part.queries.start // gamma, -(-part.queries.stop // gamma))
        later = queries - part.queries.stop  # a part's queries are the last of fewer keys
        keys = slice(0, k.shape[2] - later if lengths is None else None)
        target = out[part.batch, heads, rows], lse[part.batch, heads, rows]
        contiguous = [x if x.is_contiguous() else x.new_empty(x.shape) for x in target]
        score = _launch_scores(
            q[part.batch, heads, part.queries],
            k[part.batch, part.heads, keys],
            None if v is None else v[part.batch, part.heads, keys],
            *contiguous,
            scale=call.scale,
            gamma=gamma,
            block=block,
            lengths=_cut(lengths, part.batch, later),
            start=_cut(start, part.batch, 0),
            key_mask=None if key_mask is None else key_mask[part.batch, keys],
            softcap=call.softcap,
        )
        launch_lists(
            score,
            contiguous[1],
            before[part.batch],
            blocks[part.batch, heads],
            first=part.queries.start // query_block,
            rows=query_block // gamma,
            sink=call.sink,
        )
        for view, filled in zip(target, contiguous, strict=True):
            if view is not filled:
                view.copy_(filled)


def _cut(rows, batch, less):
    """Lengths or starts of the batch rows, lower by `less`."""
    if rows is None:
        return None
    rows = rows if rows.shape[0] == 1 else rows[batch]
    return rows - less if less else rows


def _launch_scores(
    q, k, v, out, lse, *, scale, gamma, block, lengths, start, key_mask, softcap
) -> torch.Tensor:
    """Fill out, if there are values, and lse of a part's rows; returns the scores of their blocks,
    `[B,Hq,blocks,rows]`."""
    kept = max(1, k.shape[2] // block)
    shape = (*out.shape[:2], kept, out.shape[2])
    score = torch.empty(shape, dtype=torch.float16, device=q.device)
    plain = start is None and key_mask is None and softcap == 0.0
    if plain and block == _hopper.BLOCK and _hopper.serves(q, k, k if v is None else v):
        _hopper.launch_scores(q, k, v, scale, gamma, lengths, out, lse, score)
        return score
    launch_triton(
        q,
        k,
        v,
        scale=scale,
        gamma=gamma,
        block=block,
        top_k=-1,
        exact_k=0,
        algorithm="estimated",
        lengths=lengths,
        start=start,
        key_mask=key_mask,
        softcap=softcap,
        out=out,
        lse=lse,
        index=score.new_empty(0, dtype=torch.int32),
        score=score,
    )
    return score


_op = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_measure_blocks,
)
