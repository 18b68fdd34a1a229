"""The score of every cached token in a decode step, read from INT8 keys.

    score[b, h, n] = max over the group's heads g of  q[b, g] . codes[b, h, n]  steps[b, h, n]

k = codes * steps to within steps / 2, so the score is max_g q . k up to the rounding of the keys.
`topk` ranks tokens by it. The softmax's scale is left out; a softcap would not change the order.
Tokens that the decode step reads in any case (sink, window), and tokens it may not see, get -inf.
A NaN, of a bad key or query, becomes +inf: the token is selected and the NaN surfaces in attention.
The kernel reads one byte a number and one float a token; dense attention reads four bytes a number.
Source: the indexer of "Guess-Verify-Refine: Data-Aware Top-K for Sparse-Attention Decoding on
Blackwell via Temporal Correlation" (docs/papers.md), on quantized keys of its own.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import DTYPES, check_sequence_inputs, why_not_width
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity, check_table, table_at
from attnplug.ops.common.pipeline import BESIDE
from attnplug.ops.common.product import add_product
from attnplug.ops.common.rows import NO_MASK, mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.common.views import query_of, rows_of, shape_of, steps_of
from attnplug.ops.gvr.kernels.score_cache import score

NAME = "score_tokens"
MOST_QUERIES = 16  # of a row, which a program holds


def score_tokens(
    q: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    *,
    sink: int = 0,
    window: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scores of the cached tokens for one decode step, or for each of a few queries.

    Args:
        q: `[B,Hq,T,D]`, float32, float16 or bfloat16; the last T tokens of each row, up to 16. With
            a table T is 1.
        codes: int8 `[B,Hkv,S,D]`, Hkv dividing Hq; see `quantize_keys`. With a table pages
            `[pages,Hkv,page,D]`, and S is `P * page`.
        steps: float32 `[B,Hkv,S]`, each key's quantization scale: the value of code 1. With a table
            `[pages,Hkv,page]`.
        sink: the first so many real tokens of each row get -inf.
        window: the last so many tokens before a query get -inf, and those behind it, its own
            included.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens. None: all S. Others are not read.
        start: int32 or int64 `[1]` or `[B]`, first real token of a left-padded row. None: 0.
        key_mask: bool `[B,S]`, False where a token must not be seen.
        table: int32 `[B,P]`, the pages of each row, as `dense_decode` has it; `page_codes` writes
            codes and scales of pages.

    Returns:
        scores `[B * Hkv * T, S]` float32. With a table what lies past a row's length is
        unspecified, because a table has room for the longest row that an engine takes. `topk` with
        the rows' lengths does not read it.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: q requires grad.
    """
    refuse_gradients(NAME, q)
    options = sink, window, lengths, start, key_mask
    if table is not None:
        return _score_tokens_paged(q, codes, steps, table, *options)
    return _score_tokens(q, codes, steps, *options)


def quantize_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 codes `[...,D]` and float32 scales `[...]` of keys `[...,D]`: k = codes * scales.

    The largest number of a key has the code 127 or -127. A key that is not finite has a scale that
    is not finite, and so are its scores.
    """
    wide = keys.float()
    scales = wide.abs().amax(-1) / 127
    codes = (wide / scales[..., None]).nan_to_num(0.0, 0.0, 0.0).round()
    return codes.to(torch.int8), scales


def _allocate(q, codes, steps, sink, window, lengths, start, key_mask, table=None):
    options = sink, window, lengths, start, key_mask, table
    rows, size = score_shape(NAME, q, codes, steps, *options, MOST_QUERIES if table is None else 1)
    return q.new_empty((rows * q.shape[2], size), dtype=torch.float32)


def score_shape(name, q, codes, steps, sink, window, lengths, start, key_mask, table, queries=1):
    """Check what the op `name` got, and return the shape of a query's scores."""
    if q.dim() != 4 or not 1 <= q.shape[2] <= queries:
        needed = "[B,Hq,1,D]" if queries == 1 else f"[B,Hq,T,D] with T from 1 to {queries}"
        raise ArgumentError(f"{name}: q is {tuple(q.shape)}, needs {needed}")
    require(q.dtype in DTYPES, name, f"q is {q.dtype}, needs float32, float16 or bfloat16")
    unserved = why_not_width(q.shape[3])
    require(not unserved, name, unserved)
    check_table(name, table, q, q.shape[0])
    rows = table is not None or codes.shape[0] == q.shape[0]
    fits = codes.dim() == 4 and rows and codes.shape[3] == q.shape[3]
    if not fits or codes.dtype != torch.int8 or q.shape[1] % codes.shape[1]:
        raise ArgumentError(
            f"{name}: codes is {codes.dtype} {tuple(codes.shape)}, needs int8 [B,Hkv,S,D] for q "
            f"{tuple(q.shape)}"
        )
    whole = table is None or codes.stride(3) == 1
    require(whole, name, "codes has a stride other than 1 in D, which pages may not")
    if steps.dtype != torch.float32 or steps.shape != codes.shape[:3]:
        raise ArgumentError(
            f"{name}: steps is {steps.dtype} {tuple(steps.shape)}, needs float32 [B,Hkv,S] = "
            f"{list(codes.shape[:3])}"
        )
    for label, tensor in (("codes", codes), ("steps", steps)):
        require(tensor.device == q.device, name, f"{label} is on {tensor.device}, q on {q.device}")
    check_sequence_inputs(name, q, codes, lengths, start, key_mask, table)
    require(sink >= 0, name, f"sink is {sink}, needs at least 0")
    require(window >= 1, name, f"window is {window}, needs at least 1, the query's own token")
    return len(q) * codes.shape[1], capacity(codes, table)


def score_lengths(lengths, heads):
    """The lengths of the rows of scores, which are (sequence, KV head) pairs."""
    if lengths is None or lengths.shape[0] == 1:
        return lengths
    return lengths.repeat_interleave(heads)


# --- CPU: the specification ------------------------------------------------------------------


REFERENCE_TILE = 256  # tokens that one task of the reference dequantizes at once


@njit()
def key_products(q, codes, scales, pages, tokens):
    """q . k `[G, N]` of the `tokens` `[N]` of a row for a group's heads `q [G, D]`: token n is that
    of `codes [pages, page, D]`, `scales [pages, page]` at `pages[n // page], n % page`. The order
    of the sums depends on D alone."""
    count, page, width = len(tokens), codes.shape[1], codes.shape[2]
    keys = np.empty((width, count), np.float32)
    for i in range(count):
        at, place = pages[tokens[i] // page], tokens[i] % page
        for d in range(width):
            keys[d, i] = codes[at, place, d]
    products = np.zeros((q.shape[0], count), np.float32)
    add_product(q, keys, products)
    for i in range(count):
        scale = scales[pages[tokens[i] // page], tokens[i] % page]
        for g in range(q.shape[0]):
            products[g, i] *= scale
    return products


@njit()
def _score_tile(q, codes, scales, pages, first, mask, scores):
    """Scores `[N]` of tokens `first` and on (see `key_products`); an empty `mask` hides nothing."""
    tokens = np.arange(first, first + len(scores))
    products = key_products(q, codes, scales, pages, tokens)
    for n in range(len(scores)):
        if mask.shape[0] > 0 and not mask[n]:
            continue
        for g in range(q.shape[0]):
            score = products[g, n]
            scores[n] = max(scores[n], np.inf if np.isnan(score) else score)


@njit(parallel=True)
def _reference(q, codes, scales, table, lengths, start, mask, sink, window, scores):
    """Every (row, KV head, tile of tokens), in parallel; `scores [B, Hkv, S]` come as -inf."""
    batch, heads, size = scores.shape
    group = q.shape[1] // heads
    tiles = (size + REFERENCE_TILE - 1) // REFERENCE_TILE
    for item in prange(batch * heads * tiles):
        b, h = item // (heads * tiles), item // tiles % heads
        begin = item % tiles * REFERENCE_TILE
        first = max(begin, start[b] + sink)
        last = min(begin + REFERENCE_TILE, lengths[b] - window)
        if first < last:
            _score_tile(
                q[b, h * group : (h + 1) * group],
                codes[:, h],
                scales[:, h],
                table[b],
                first,
                mask[b * len(mask) // batch][first:last],
                scores[b, h, first:last],
            )


def arrays_on_cpu(q, codes, steps, lengths, start, key_mask, table):
    """The arguments of a reference: (q, codes, scales, table, lengths, start, mask)."""
    lengths, start = rows_on_cpu(codes, lengths, start, table)
    if table is None:  # a contiguous cache is one page a row
        table = torch.arange(len(q), dtype=torch.int32, device="cpu")[:, None]
    return (
        q[:, :, 0].float().contiguous().numpy(),
        codes.contiguous().numpy(),
        steps.contiguous().numpy(),
        table.contiguous().numpy(),
        lengths.numpy(),
        start.numpy(),
        NO_MASK if key_mask is None else key_mask.contiguous().numpy(),
    )


def _cpu(q, codes, steps, sink, window, lengths, start, key_mask, scores, table=None):
    rows, queries = (len(q), codes.shape[1]), q.shape[2]
    for t in range(queries):
        arrays = list(
            arrays_on_cpu(q[:, :, t : t + 1], codes, steps, lengths, start, key_mask, table)
        )
        arrays[4] = arrays[4] - (queries - 1 - t)  # the tokens up to this query's
        own = torch.full((*rows, scores.shape[1]), -torch.inf, dtype=torch.float32, device="cpu")
        _reference(*arrays, sink, window, own.numpy())
        scores.view(*rows, queries, -1)[:, :, t] = own


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernel cuts the work; chosen from static shapes alone."""

    tile: int  # tokens that a program reads at once
    programs: int  # of one row and KV head
    warps: int
    stages: int  # of the pipeline over tiles
    keys_first: bool = False  # whether products have a row a token, not a row a head
    halves: bool = False  # whether a bfloat16 query is multiplied as float16
    whole: bool = False  # whether tiles are read without a mask, where all tokens of a tile are


def plan_for(rows: int, size: int, width: int, multiprocessors: int) -> Plan:
    """The pre-tuned plan of a shape: `rows` (sequence, KV head) pairs of `size` tokens. With
    tokens as rows and float16 a tile is less work, so that what counts is the bytes in flight."""
    tile, each, warps = (128, 6, 4) if width <= 128 else (128, 3, 8)
    programs = max(1, min(cdiv(size, tile), each * multiprocessors // rows))
    return Plan(tile, programs, warps, 3, keys_first=True, halves=True, whole=True)


def plain_plan_for(rows: int, size: int, width: int, multiprocessors: int) -> Plan:
    """That of pages, for which no other was compared."""
    wide = 2 if width > 128 else 1
    if rows * size <= 2**21:  # one wave of few, long programs
        tile = 256 // wide
        return Plan(tile, max(1, min(cdiv(size, tile), 2 * multiprocessors // rows)), 8, 3)
    tile = 128 // wide
    return Plan(tile, max(1, min(cdiv(size, tile), 8 * multiprocessors // rows)), 4, 3)


@functools.lru_cache(maxsize=1024)
def fitting(plan: Plan, group: int, width: int, itemsize: int, shared: int) -> Plan:
    """The plan, with shorter tiles where `shared` bytes of shared memory are not enough. They hold
    the query, codes of the turns to come, and a tile of float32 keys; 16-bit keys are widened in
    registers."""
    padded = padded_width(width)
    query = dot_rows(plan, group) * padded * itemsize
    widened = padded * itemsize if itemsize == 4 else 0
    for tile in (plan.tile, *(x for x in (128, 64, 32) if x < plan.tile)):
        for stages in sorted({plan.stages, min(2, plan.stages)}, reverse=True):
            codes = (stages - 1) * tile * (padded + 4)
            if query + tile * widened + codes + BESIDE <= shared:
                return plan._replace(tile=tile, stages=stages)
    return plan._replace(tile=16, stages=1)


def dot_rows(plan: Plan, group: int) -> int:
    """Rows of a query in a product, padded."""
    return max(8 if plan.keys_first else 16, next_power_of_two(group))


def launch_score_tokens(
    q,
    codes,
    steps,
    sink,
    window,
    lengths,
    start,
    key_mask,
    scores,
    plan=None,
    table=None,
):
    """Run the kernel; tensors as in `score_tokens`, on a GPU or in Triton's interpreter."""
    (batch, _, _, width), heads, size = q.shape, codes.shape[1], capacity(codes, table)
    queries = q.shape[2]
    group = q.shape[1] // heads * queries
    if q.stride(3) != 1:
        q = q.contiguous()
    if codes.stride(3) != 1:
        codes = codes.contiguous()
    found = card(q.device)
    if plan is None:
        plans = plan_for if table is None else plain_plan_for
        plan = plans(batch * heads, size, width, found.processors)
        if table is not None:  # the codes' addresses are loaded, and no such pipeline was compared
            plan = plan._replace(stages=1)
        if queries > 1:  # float32 products of more rows would leave the registers
            plan = plan._replace(warps=8, tile=32 if q.element_size() == 4 else plan.tile)
        plan = fitting(plan, group, width, q.element_size(), found.shared)
    unmasked = table is None and width in (64, 128, 256) and size % plan.tile == 0
    launch_kernel(
        score,
        grid=(plan.programs, heads, batch),
        q=query_of(q),
        codes=codes,
        scales=steps,
        rows=rows_of(size, lengths, start, mask_bytes(key_mask)),
        table=table,
        scores=scores,
        programs=plan.programs,
        codes_strides=codes.stride()[:3],
        scales_strides=steps.stride(),
        table_stride=None if table is None else table.stride(0),
        SHAPE=shape_of(q, codes, table, dot_rows(plan, group)),
        SINK=sink,
        WINDOW=window,
        TILE=plan.tile,
        STAGES=plan.stages,
        STEPS=steps_of(lengths, start),
        KEYS_FIRST=plan.keys_first,
        HALVES=(2 - found.asm) * (plan.halves and q.dtype == torch.bfloat16),
        WHOLE=plan.whole and unmasked,
        PDL=found.pdl,
        QUERIES=queries,
        num_warps=plan.warps,
        **({"launch_pdl": True} if found.pdl else {}),
    )


_score_tokens = define_op(
    f"{NAME}(Tensor q, Tensor codes, Tensor steps, int sink, int window, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_score_tokens,
    repeats=True,
)

_score_tokens_paged = define_op(
    f"{NAME}_paged(Tensor q, Tensor codes, Tensor steps, Tensor table, int sink, int window, "
    "Tensor? lengths, Tensor? start, Tensor? key_mask) -> Tensor",
    allocate=table_at(3, _allocate),
    cpu=table_at(3, _cpu),
    cuda=table_at(3, launch_score_tokens),
    repeats=True,
)
