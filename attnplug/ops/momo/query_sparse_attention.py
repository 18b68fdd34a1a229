"""Exact attention of every gamma-th query over all its keys, with its log-sum-exp, and the best key
blocks of each such row, chosen online. With `gamma=1, top_k=0` it is dense flash prefill.

`first` is the first query that is no padding. Row i of the result is query t = first + gamma i, at
position pos = max(length - T, start) + gamma i:

    out[i] = sum_l softmax_l(c(scale q_t . k_l)) v_l    over visible keys start <= l <= pos
    lse[i] = log sum_l exp(c(scale q_t . k_l))          c(x) = softcap tanh(x / softcap) or x
    S(j)   = log sum over the visible l of block j of exp(c(scale q_t . k_l))

Block j is keys start + block j .. start + block (j + 1) - 1. It is offered to the selection of a
row where it is complete (its last key <= pos) and holds a visible key. Blocks are offered in
ascending order of j. Scores of two rows compare only after their lse is subtracted.
`online_topk.py` defines the three algorithms and the order of their updates, which the CPU and the
CUDA implementation share.

A list keeps the order of its buffer. "exact": replaced slots in place. "tournament": leaves of the
winner tree. "estimated": exact slots, then appended ones in ascending time. Where fewer blocks were
offered than there are slots, all of them are listed and the other slots hold -1, -inf.

Source: Measure Once, Mask Once, section 3, algorithm 1, lines 1 to 9 (docs/papers.md).
"""

import math

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import WIDE_HEAD_DIMS, check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.product import add_product
from attnplug.ops.momo.kernels import hopper as _hopper
from attnplug.ops.momo.kernels.query_sparse import launch_triton, offered_before
from attnplug.ops.momo.online_topk import ALGORITHMS, offer, start_rows, write_row

NAME = "query_sparse_attention"
SCHEMA = (
    "query_sparse_attention(Tensor q, Tensor k, Tensor v, float scale, int gamma, int block, "
    "int top_k, int exact_k, str algorithm, Tensor? lengths, Tensor? start, Tensor? key_mask, "
    "float softcap) -> (Tensor, Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)
BLOCKS = (16, 32, 64, 128)
# The exact slots of "estimated" live in registers, a row's all at once.
MAX_EXACT = 64


def is_too_wide(q: torch.Tensor) -> bool:
    """Whether the kernels that list key blocks have no tiles for q's heads on a GPU: tiles of 512
    float32 channels take more shared memory than any card has."""
    return q.is_cuda and q.dtype == torch.float32 and q.shape[3] > 256


def query_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    gamma: int = 16,
    block: int = 64,
    top_k: int = 128,
    exact_k: int = 8,
    algorithm: str = "estimated",
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of every `gamma`-th query and its `top_k` key blocks (equations above).

    Args:
        q: `[B,Hq,T,D]`; k, v: `[B,Hkv,S,D]`; float32, float16 or bfloat16, any strides.
        scale: factor on q . k, above 0.
        gamma: distance of the attended queries, in tokens.
        block: keys a block, 16, 32, 64 or 128.
        top_k: blocks listed for each row; 0 selects nothing.
        exact_k: how many of them `algorithm="estimated"` chooses exactly, at most 64.
        algorithm: "exact" takes O(top_k) a replacement. "tournament" gives the same set by
            `O(log top_k)`, with 24 bytes of temporary memory a slot. "estimated" has exact_k exact
            ones, and takes O(1) for the rest.
        lengths: int `[1]` or `[B]`, valid tokens in k and v, the T queries being the last T of
            them; None is S.
        start: int `[1]` or `[B]`, the first valid key of each row (left padding); None is 0.
        key_mask: bool `[B,S]`; keys that are False are never seen.
        softcap: cap on the scaled logits; 0 is none.

    Returns:
        out `[B,Hq,R,D]` in q's dtype, lse `[B,Hq,R]` float32 (natural log), index int32 and score
        float32 `[B,Hq,R,top_k]`, R = ceil(T / gamma). Row slots past the last query of a padded
        row, and rows that see no key: 0, -inf, -1, -inf.

    Raises:
        ArgumentError: a shape, dtype, device or option that the text above excludes.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    return _op(
        q, k, v, scale, gamma, block, top_k, exact_k, algorithm, lengths, start, key_mask, softcap
    )


def _allocate(
    q, k, v, scale, gamma, block, top_k, exact_k, algorithm, lengths, start, key_mask, softcap
):
    check_attention_inputs(NAME, q, k, v, head_dims=WIDE_HEAD_DIMS)
    check_sequence_inputs(NAME, q, k, lengths, start, key_mask)
    require(math.isfinite(scale) and scale > 0, NAME, f"scale is {scale}, needs a positive number")
    require(softcap >= 0, NAME, f"softcap is {softcap}, needs 0 (off) or a positive number")
    require(gamma >= 1, NAME, f"gamma is {gamma}, needs at least 1")
    require(block in BLOCKS, NAME, f"block is {block}, needs one of {BLOCKS}")
    require(top_k >= 0, NAME, f"top_k is {top_k}, needs at least 0")
    require(algorithm in ALGORITHMS, NAME, f"algorithm is {algorithm!r}, not one of {ALGORITHMS}")
    if top_k and algorithm == "estimated":
        require(
            0 <= exact_k <= min(top_k, MAX_EXACT),
            NAME,
            f"exact_k is {exact_k}, needs 0 to top_k = {top_k} and at most {MAX_EXACT}",
        )
    shape = (q.shape[0], q.shape[1], (q.shape[2] + gamma - 1) // gamma)
    return (
        q.new_empty((*shape, q.shape[3])),
        q.new_empty(shape, dtype=torch.float32),
        q.new_empty((*shape, top_k), dtype=torch.int32),
        q.new_empty((*shape, top_k), dtype=torch.float32),
    )


# ---- numba reference ----


def _cpu(*args):
    call, outputs = Call(*args[:-4]), args[-4:]
    run_reference(
        NAME,
        (*args[:3], call.lengths, call.start, call.key_mask),
        outputs,
        scale=call.scale,
        gamma=call.gamma,
        block=call.block,
        exact_k=call.exact_k,
        algorithm=ALGORITHMS.index(call.algorithm),
        softcap=call.softcap,
    )


def run_reference(name, inputs, outputs, *, scale, gamma, block, exact_k, algorithm, softcap):
    """Fill the outputs (out, lse, index, score) on the CPU from the inputs (q, k, v, lengths,
    start, key_mask); v may have no columns, and so has out then. `algorithm` is the number of one
    of `online_topk.py`; errors name the op `name`."""
    q, k, v, lengths, start, key_mask = inputs
    out, *rest = outputs
    batch, keys = q.shape[0], k.shape[2]

    def per_row(value, default):
        value = torch.tensor([default], dtype=torch.int64, device="cpu") if value is None else value
        return value.to(torch.int64).expand(batch).contiguous().numpy()

    length, first = per_row(lengths, keys), per_row(start, 0)
    used = int(length.max(initial=0))
    if used > keys or first.min(initial=0) < 0:
        raise ArgumentError(
            f"{name}: lengths go to {used} and start from {first.min(initial=0)}, but k and v hold "
            f"keys 0 to {keys - 1}"
        )
    k, v = k[:, :, :used].float(), v[:, :, :used].float()
    mask = np.ones((0, 0), np.bool_)
    before = np.zeros((0, 0), np.int32)
    if key_mask is not None:
        mask = key_mask.contiguous().numpy()
        before = offered_before(key_mask, start, block).numpy()
        # 0 * NaN is NaN: the product must not read hidden values
        v = v.masked_fill(~key_mask[:, None, :used, None], 0.0)
    result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    q, k, v = (x.contiguous().numpy() for x in (q.float(), k, v))
    options = (scale, gamma, block, exact_k, algorithm, softcap)
    arrays = (x.numpy() for x in (result, *rest))
    _reference(q, k, v, length, first, mask, before, *options, *arrays)
    out.copy_(result)


@njit(parallel=True)
def _reference(
    q,
    k,
    v,
    lengths,
    starts,
    mask,
    before,
    scale,
    gamma,
    block,
    exact_k,
    algorithm,
    softcap,
    out,
    lse,
    index,
    score,
):
    batch, heads, queries, dim = q.shape
    kv_heads, rows, top_k = k.shape[1], out.shape[2], index.shape[3]
    group = heads // kv_heads
    high = max(64 // group, 1)  # rows i of one tile; its height is high * group
    tiles = (rows + high - 1) // high
    for job in prange(batch * kv_heads * tiles):
        b, kv, tile = job // tiles // kv_heads, job // tiles % kv_heads, job % tiles
        length, start = lengths[b], starts[b]
        base = max(length - queries, start)
        tile_q = np.zeros((high * group, dim), np.float32)
        pos = np.full(high * group, start - 1)
        for m in range(high * group):
            i, h = tile * high + m // group, kv * group + m % group
            if i < rows and base + gamma * i < length:
                pos[m] = base + gamma * i
                tile_q[m] = q[b, h, pos[m] - length + queries]
        tile_out, tile_lse, state = _reference_tile(
            tile_q,
            k[b, kv],
            v[b, kv],
            pos,
            start,
            mask[b : b + 1],
            before[b : b + 1],
            scale,
            block,
            top_k,
            exact_k,
            algorithm,
            softcap,
        )
        for m in range(high * group):
            i, h = tile * high + m // group, kv * group + m % group
            if i < rows:
                out[b, h, i], lse[b, h, i] = tile_out[m], tile_lse[m]
                s, t = state[0][m], state[1][m]
                write_row(algorithm, s, t, index[b, h, i], score[b, h, i])


@njit()
def _reference_tile(
    q, k, v, pos, start, mask, before, scale, block, top_k, exact_k, algorithm, softcap
):
    height, end = len(pos), pos.max() + 1
    acc = np.zeros((height, v.shape[1]), np.float32)  # no columns where there are no values
    peak = np.full(height, -np.inf, np.float32)
    mass = np.zeros(height, np.float32)
    state = start_rows(algorithm, height, top_k)
    width = block if top_k else 128
    for lo in range(start, end, width):
        hi = min(lo + width, end)
        j = (lo - start) // width
        p = np.zeros((height, hi - lo), np.float32)
        add_product(q, np.ascontiguousarray(k[lo:hi].T), p)
        for m in range(height):
            tile_peak, tile_mass = _exponentials(
                p[m], min(hi, pos[m] + 1) - lo, mask[:, lo:hi], scale, softcap
            )
            blocks = (pos[m] - start + 1) // width
            offered = blocks if mask.size == 0 else before[0, blocks]
            if top_k and j < blocks and (mask.size == 0 or before[0, j + 1] > before[0, j]):
                value = np.float32(tile_peak + math.log(tile_mass)) if tile_mass > 0 else np.nan
                s, t, leaf, numbers = state
                offer(algorithm, s[m], t[m], leaf[m], numbers[m], exact_k, value, j, offered)
            higher = max(peak[m], tile_peak)
            shift = higher if higher > -np.inf else np.float32(0.0)
            kept = np.float32(math.exp(peak[m] - shift))
            added = np.float32(math.exp(tile_peak - shift))
            # a tile of NaN has no peak: its mass alone carries the NaN
            mass[m] = mass[m] * kept + tile_mass * added
            peak[m] = higher
            acc[m] *= kept
            p[m] *= added
        add_product(p, v[lo:hi], acc)
    lse = np.full(height, -np.inf, np.float32)
    for m in range(height):
        if mass[m] != 0.0:
            acc[m] /= mass[m]
            lse[m] = peak[m] + math.log(mass[m])
    return acc, lse, state


@njit()
def _exponentials(p, visible, mask, scale, softcap):
    """Logits to exp(logit - peak) in place, 0 where unseen. Returns peak and their sum."""
    peak, total = np.float32(-np.inf), np.float32(0.0)
    for c in range(len(p)):
        if c >= visible or (mask.size and not mask[0, c]):
            p[c] = -np.inf
            continue
        x = p[c] * scale
        p[c] = softcap * math.tanh(x / softcap) if softcap > 0 else x
        if p[c] > peak:
            peak = p[c]
    shift = peak if peak > -np.inf else np.float32(0.0)
    for c in range(len(p)):
        p[c] = math.exp(p[c] - shift)
        total += p[c]
    return peak, total


# ---- CUDA ----


def launch_query_sparse_attention(*args):
    """The kernel on the current device, or Triton's interpreted on CPU tensors
    (TRITON_INTERPRET=1). Which one runs is decided by what the host knows, no value is read."""
    call, (out, lse, index, score) = Call(*args[:-4]), args[-4:]
    if out.numel() == 0:
        return
    tensors = call.q, call.k, call.v
    plain = call.start is None and call.key_mask is None and call.softcap == 0.0
    selects = _hopper_selects(call.block, call.top_k, call.exact_k, call.algorithm)
    if plain and selects and _hopper.serves(*tensors):
        choice = call.scale, call.gamma, call.exact_k, call.lengths
        _hopper.launch_query_sparse(*tensors, *choice, out, lse, index, score)
        return
    launch_triton(**call._asdict(), out=out, lse=lse, index=index, score=score)


def _hopper_selects(block, top_k, exact_k, algorithm):
    """Whether the Hopper kernel has the selection asked for."""
    small = block == _hopper.BLOCK and exact_k <= _hopper.MAX_EXACT
    return top_k == 0 or (algorithm == "estimated" and small)


_op = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_query_sparse_attention,
)
