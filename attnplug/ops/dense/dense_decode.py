"""Dense attention of a few queries against a long KV cache: split-KV flash decoding.

    out[t] = sum_j p[t, j] v[j],   p[t, j] = exp(s[t, j]) / (sum_i exp(s[t, i]) + exp(sink)),
    s[t, j] = scale q[t].k[j]  (softcap: cap tanh(s / cap)),   lse[t] = log sum_i exp(s[t, i])

over the keys j that query t sees. The keys are cut in pieces ("splits"). One program attends to
each piece, and a second kernel merges the pieces by their log-sum-exps. Only the valid part of a
static cache is read: its length is a tensor on the device, and each program works out its share.

Sources: Dao et al., Flash-Decoding for long-context inference (2023); online softmax: Milakov and
Gimelshein, arXiv:1805.02867; sinks as in gpt-oss.
"""

# `_attend` reads fields of constants, which pyright takes for plain `constexpr`s.
# pyright: reportAttributeAccessIssue=false

import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import (
    WIDE_HEAD_DIMS,
    check_attention_inputs,
    check_sequence_inputs,
    check_sinks,
)
from attnplug.ops.common.define import define_op, refuse_gradients
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity, page_of, table_at, whole_rows
from attnplug.ops.common.reference import arrays, reference_rows, sinks_on_cpu
from attnplug.ops.common.rows import mask_bytes, row_span, rows_on_cpu
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.softmax import base_two, online_softmax, softcap
from attnplug.ops.common.splits import launch_merge, pieces_of
from attnplug.ops.common.triton import gdc_launch_dependents, tl, triton
from attnplug.ops.common.views import (
    Output,
    begin_of,
    cache_of,
    query_of,
    rows_of,
    shape_of,
    steps_of,
)
from attnplug.ops.dense.plan import plan_for


def dense_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention of the last T tokens of a sequence over all its keys.

    out = softmax(softcap(scale q k^T) | sink) v; lse is the natural log-sum-exp of the scores that
    a query sees, the sink left out.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16, any T >= 1 (made for T that
            leave a program for each 128 queries and head few programs).
        k, v: `[B, Hkv, S, D]` like q, Hkv dividing Hq; S is the size of the cache. With a table
            pages `[pages, Hkv, page, D]`, and S is `P * page`.
        scale: factor on q.k, commonly `D ** -0.5`.
        lengths: int32 or int64 `[1]` or `[B]`, tokens that are valid in k and v, the T queries
            being the last of them: query t stands at `length - q.T + t`. None: all S. Slots from
            `length` on are never read.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        window: a query sees itself and the `window - 1` keys before it; 0: no window.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.
        table: int32 `[B, P]`, the pages of each row: key n is at `n % page` of page
            `table[b, n // page]`. Entries past a row's length may be anything.

    Returns:
        out `[B, Hq, T, D]` of q's dtype and lse `[B, Hq, T]` float32. A query that sees no key
        gives 0 and -inf.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("dense_decode", q, k, v, sinks)
    options = scale, lengths, start, key_mask, window, softcap, sinks
    if table is not None:
        return _dense_decode_paged(q, k, v, table, *options)
    return _dense_decode(q, k, v, *options)


def _allocate(q, k, v, scale, lengths, start, key_mask, window, softcap, sinks, table=None):
    name = "dense_decode"
    check_attention_inputs(name, q, k, v, table, head_dims=WIDE_HEAD_DIMS)
    check_sequence_inputs(name, q, k, lengths, start, key_mask, table)
    if window < 0:
        raise ArgumentError(f"{name}: window is {window}, needs 0 (none) or a number of keys")
    if not softcap >= 0:
        raise ArgumentError(f"{name}: softcap is {softcap}, needs 0 (off) or a positive cap")
    if sinks is not None:
        check_sinks(name, q, sinks)
    batch, heads, queries, width = q.shape
    return (
        q.new_empty((batch, heads, queries, width)),
        q.new_empty((batch, heads, queries), dtype=torch.float32),
    )


# --- CPU: the specification ------------------------------------------------------------------


@njit(parallel=True)
def _reference(q, k, v, lengths, start, mask, window, sinks, scale, softcap, out, lse):
    """`reference_rows` for every block of queries of every KV head, in parallel."""
    batch, heads, queries, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    count = max(1, 128 // group)  # queries a block
    blocks = (queries + count - 1) // count
    for item in prange(batch * kv_heads * blocks):
        b = item // (kv_heads * blocks)
        h = item // blocks % kv_heads
        t = item % blocks * count
        g = h * group
        reference_rows(
            q[b, g : g + group, t : t + count],
            k[b, h],
            v[b, h],
            mask[b * len(mask) // batch],
            lengths[b] - queries + t,
            start[b],
            window,
            sinks[g : g + group],
            scale,
            softcap,
            out[b, g : g + group, t : t + count],
            lse[b, g : g + group, t : t + count],
        )


def _cpu(q, k, v, scale, lengths, start, key_mask, window, softcap, sinks, out, lse, table=None):
    lengths, start = rows_on_cpu(k, lengths, start, table)
    valid = int(lengths.max())
    k, v = (x[:, :, :valid] if table is None else whole_rows(x, table, valid) for x in (k, v))
    result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    _reference(
        *arrays(q.contiguous(), k, v, lengths, start, key_mask),
        *arrays(window, sinks_on_cpu(sinks), scale, softcap, result, lse),
    )
    out.copy_(result)


# --- CUDA: attend, then reduce ---------------------------------------------------------------


@triton.jit
def _attend(
    q,
    cache,
    rows,
    pieces,
    scale,
    cap,
    window,
    splits,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of rows of one KV head against one split of the keys it sees."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    PAGE: tl.constexpr = SHAPE.PAGE
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()  # the merge may start early: it waits for the end of this grid

    # Row r of the block is head r % GROUP of query r // GROUP: a KV tile is read once for all.
    r = block * ROWS + tl.arange(0, ROWS)
    t = r // GROUP
    head = h * GROUP + r % GROUP
    d = tl.arange(0, DP)
    in_rows = r < q.T * GROUP
    in_width = d < D
    q_at = q.at + b * q.b + head.to(tl.int64)[:, None] * q.h + t.to(tl.int64)[:, None] * q.t
    query = tl.load(q_at + d[None, :], mask=in_rows[:, None] & in_width[None, :], other=0.0)

    # BYPASS_L1=0: this kernel starts only when the ones in front of it have ended.
    length, low = row_span(rows, b, STEPS, BYPASS_L1=0)  # pyright: ignore[reportArgumentType]
    position = length - q.T + t
    if WINDOWED:
        low = tl.maximum(low, length - q.T + block * ROWS // GROUP - window + 1)
    high = length - q.T + tl.minimum((block * ROWS + ROWS - 1) // GROUP, q.T - 1) + 1
    tiles = tl.maximum(tl.cdiv(high - low, TILE), 0)
    first = split * tiles // splits
    last = (split + 1) * tiles // splits

    n = tl.arange(0, TILE)
    k_at, v_at = begin_of(cache, b, h)
    pages, row_table = 0, cache.table
    if cache.table is None:
        k_at = k_at + n.to(tl.int64)[:, None] * cache.k_s + d[None, :]
        v_at = v_at + n.to(tl.int64)[:, None] * cache.v_s + d[None, :]
    else:
        k_at = k_at + d[None, :]
        v_at = v_at + d[None, :]
        row_table = cache.table + b * cache.table_b
        here = low + first * TILE + n
        pages = page_of(row_table, here, here < high, PAGE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    visible, mask_at = 0, rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b + low + n
        visible = tl.load(mask_at + first * TILE, mask=low + first * TILE + n < high, other=0)
    for i in tl.range(first, last, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        at = low + i * TILE
        readable = at + n < high
        loadable = readable[:, None] & in_width[None, :]
        if cache.table is None:
            key = tl.load(k_at + at.to(tl.int64) * cache.k_s, mask=loadable, other=0.0)
        else:
            in_page = ((at + n) % PAGE).to(tl.int64)
            key_at = k_at + (pages * cache.k_b + in_page * cache.k_s)[:, None]
            key = tl.load(key_at, mask=loadable, other=0.0)
        s = tl.dot(query, key.T, input_precision="ieee") * scale
        if CAPPED:
            s = softcap(s, cap)
        seen = readable[None, :] & ((at + n)[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & ((at + n)[None, :] > position[:, None] - window)
        if rows.key_mask is not None:
            seen = seen & (visible != 0)[None, :]  # pyright: ignore[reportIndexIssue]
        s = tl.where(seen, s, float("-inf"))
        p, decay, top, total = online_softmax(s, top, total)
        if cache.table is None:
            value = tl.load(v_at + at.to(tl.int64) * cache.v_s, mask=loadable, other=0.0)
        else:
            in_page = ((at + n) % PAGE).to(tl.int64)
            value_at = v_at + (pages * cache.v_b + in_page * cache.v_s)[:, None]
            value = tl.load(value_at, mask=loadable, other=0.0)
            # A tile ahead, as with the mask below: the keys' addresses need not wait for them.
            following = at + TILE + n
            pages = page_of(row_table, following, following < high, PAGE)
        if rows.key_mask is not None:
            # 0 times a hidden NaN is NaN.
            value = tl.where((visible != 0)[:, None], value, 0.0)  # pyright: ignore[reportIndexIssue]
            # A tile ahead: bytes cannot be copied asynchronously, the turn hides their latency.
            visible = tl.load(mask_at + at - low + TILE, mask=at + TILE + n < high, other=0)
        acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")

    # Not `store_piece`: a split without keys leaves its outputs unwritten, and stores -inf alone.
    heads = tl.num_programs(1) * GROUP
    slot = ((b * heads + head) * q.T + t) * splits + split
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    lse_at = pieces + tl.num_programs(2).to(tl.int64) * heads * q.T * splits * D
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(lse_at + slot, tl.where(empty, float("-inf"), base + tl.log2(divisor)), mask=in_rows)
    if last > first:
        tl.store(
            pieces + slot[:, None] * D + d[None, :],
            acc / divisor[:, None],
            mask=in_rows[:, None] & in_width[None, :],
        )


def launch_dense_decode(
    q,
    k,
    v,
    scale,
    lengths,
    start,
    key_mask,
    window,
    softcap,
    sinks,
    out,
    lse,
    plan=None,
    table=None,
):
    """Run the kernels; tensors as in `dense_decode`, on a GPU or in Triton's interpreter."""
    batch, heads, queries, width = q.shape
    kv_heads, size = k.shape[1], capacity(k, table)
    found = card(q.device)
    if plan is None:
        plan = plan_for(
            batch,
            heads,
            kv_heads,
            queries,
            size,
            width,
            itemsize=q.element_size(),
            multiprocessors=found.processors,
            masked=key_mask is not None,
            shared=found.shared,
        )
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    key_mask = mask_bytes(key_mask)
    output = Output(pieces_of(out, plan.splits), out, lse, sinks)
    factor, cap = base_two(scale, softcap)
    blocks = cdiv(heads // kv_heads * queries, plan.rows)
    launch_kernel(
        _attend,
        grid=(plan.splits * blocks, kv_heads, batch),
        q=query_of(q),
        cache=cache_of(k, v, table),
        rows=rows_of(size, lengths, start, key_mask),
        pieces=output.pieces,
        scale=factor,
        cap=cap,
        window=window,
        splits=plan.splits,
        SHAPE=shape_of(q, k, table, plan.rows),
        TILE=plan.tile,
        STAGES=plan.stages,
        STEPS=steps_of(lengths, start),
        CAPPED=softcap > 0,
        WINDOWED=window > 0,
        PDL=found.pdl,
        **{"num_warps": plan.warps},
    )
    launch_merge(output, plan.splits, plan.columns)


_dense_decode = define_op(
    "dense_decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? lengths, Tensor? start, "
    "Tensor? key_mask, int window, float softcap, Tensor? sinks) -> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_dense_decode,
    repeats=True,
)


_dense_decode_paged = define_op(
    "dense_decode_paged(Tensor q, Tensor k, Tensor v, Tensor table, float scale, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask, int window, float softcap, Tensor? sinks) "
    "-> (Tensor, Tensor)",
    allocate=table_at(3, _allocate),
    cpu=table_at(3, _cpu),
    cuda=table_at(3, launch_dense_decode),
    repeats=True,
)
