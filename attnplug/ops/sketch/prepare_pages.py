"""What a step of `sketch` over pages knows before it reads a code: the exact attention to the sink
and the last blocks, in pieces; the query's weights of codes in each band; and sums over a sample.

    whole, unit, offset:  scale log2(e) ((R(-s) q) @ scorer) = (whole * unit, offset) of each band
    sums of s, s^2, s v and v  over 2,048 evenly spaced candidates, s exact scores to the base 2

The sample says what the tokens are worth that nobody reads: a regression of values on scores, as
`basis` has it of a prompt. It is taken anew at each step, so that nothing is kept of a sequence but
its pages. The pieces are those of `prepare_query`.
"""

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs, check_table
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity, page_rows
from attnplug.ops.common.reference import arrays, reference_kept
from attnplug.ops.common.rows import rows_on_cpu
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.softmax import LOG2E, base_two
from attnplug.ops.common.views import cache_of, query_of, rows_of, shape_of, steps_of
from attnplug.ops.sketch.encode_keys import check_float, near_block
from attnplug.ops.sketch.encode_pages import turned_back
from attnplug.ops.sketch.estimates import in_units
from attnplug.ops.sketch.kernels import pages as kernels
from attnplug.ops.sketch.kernels.codes import Code, pieces_of
from attnplug.ops.sketch.model_basis import BAND
from attnplug.ops.sketch.pages import check_turns
from attnplug.ops.sketch.prepare_query import PIECE, PIECES, fixed_token
from attnplug.ops.sketch.state import BLOCK, COORDINATES

NAME = "sketch_prepare_pages"
SAMPLE = kernels.SAMPLE.value  # tokens
SAMPLES = 8  # parts of the sample, one program each
ROWS = 32  # of queries, those of several bands, that one program projects
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor scorer, Tensor turns, Tensor table, "
    "Tensor lengths, float scale, float softcap) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)


def prepare_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scorer: torch.Tensor,
    turns: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Attend to what every step reads, project the query for each band, and add up a sample.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[pages, Hkv, page, D]` like q, Hkv dividing Hq.
        scorer: float32 `[Hkv, D, r + 1]` of `fit_model_basis`.
        turns: float32 `[bands, 2, P]` of `turns_of`, for as many tokens as a row has room for.
        table: int32 `[B, pages a row]`.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the query's own the last.
        scale: factor on q.k, commonly `D ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off. Weights and the sample are
            of the scores before it.

    Returns:
        whole int8 `[B, Hq, bands, r]` and facts float32 `[B, Hq, bands, 2]`, unit and offset, of
        bands that have candidates; fixed_out `[B, Hq, 10, D]` and fixed_lse `[B, Hq, 10]`; scores
        `[B, Hq, 8, 2 + D]` and values `[B, Hkv, 8, D]`, the sample's sums in parts; float32.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    return _prepare_pages(q, k, v, scorer, turns, table, lengths, scale, softcap)


def _allocate(*args):
    call = Call(*args)
    check_paged_step(NAME, call.q, call.k, call.v, call.table, call.lengths, call.softcap)
    check_scorer(NAME, call.scorer, call.turns, call.k, call.table)
    return outputs(call.q, call.k, call.scorer, call.table)


def check_paged_step(name, q, k, v, table, lengths, softcap):
    """The checks of a step's inputs over pages."""
    check_attention_inputs(name, q, k, v, table)
    check_table(name, table, q, q.shape[0])
    check_sequence_inputs(name, q, k, lengths, None, None, table)
    require(q.shape[2] == 1, name, f"q has {q.shape[2]} queries a row, needs 1")
    require(softcap >= 0, name, f"softcap is {softcap}, needs 0 (off) or a positive cap")


def check_scorer(name, scorer, turns, k, table):
    """The checks of a layer's scorer, and of the turns of all bands that a row has room for."""
    heads, width = k.shape[1], k.shape[3]
    ranks = [sum(pair) for pair in COORDINATES.values() if sum(pair) <= width]
    if scorer.dim() != 3 or scorer.shape[2] - 1 not in ranks:
        found = f"scorer has shape {tuple(scorer.shape)}"
        raise ArgumentError(f"{name}: {found}, needs [Hkv,D,r+1] with r one of {ranks}")
    check_float(name, "scorer", scorer, (heads, width, scorer.shape[2]), k.device)
    check_turns(name, turns, k)
    room = capacity(k, table)
    enough = len(turns) * BAND >= room
    require(enough, name, f"turns has {len(turns)} bands, a row has room for {room} keys")


def outputs(q, k, scorer, table) -> tuple[torch.Tensor, ...]:
    """Memory for what `prepare_pages` returns."""
    batch, heads, _, width = q.shape
    bands = cdiv(capacity(k, table), BAND)
    new = {"dtype": torch.float32}
    return (
        q.new_empty((batch, heads, bands, scorer.shape[2] - 1), dtype=torch.int8),
        q.new_empty((batch, heads, bands, 2), **new),
        q.new_empty((batch, heads, PIECES, width), **new),
        q.new_empty((batch, heads, PIECES), **new),
        q.new_empty((batch, heads, SAMPLES, 2 + width), **new),
        q.new_empty((batch, k.shape[1], SAMPLES, width), **new),
    )


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def sample_token(j, candidates):
    """The token of place 0..2047 of the sample; from 128 + `candidates` on there is none."""
    return BLOCK + (j * candidates // SAMPLE if candidates > SAMPLE else j)


@njit(parallel=True)
def _reference(
    q,
    k,
    v,
    scorer,
    turns,
    table,
    lengths,
    scale,
    softcap,
    whole,
    facts,
    fixed_out,
    fixed_lse,
    scores,
    values,
):
    """All that is needed of every row and KV head, these in parallel."""
    batch, heads, _, width = q.shape
    kv_heads, page, rank = k.shape[1], k.shape[2], whole.shape[3]
    group = heads // kv_heads
    log2e = np.float32(LOG2E)
    none = np.empty(0, np.float32)
    for item in prange(batch * kv_heads):
        b, h = item // kv_heads, item % kv_heads
        g0 = h * group
        near = near_block(lengths[b], 0)
        for g in range(group):
            turned, product = np.empty(width, np.float32), np.empty(rank + 1, np.float32)
            for band in range((near * BLOCK - 1) // BAND + 1):
                turned_back(q[b, g0 + g, 0], turns[band], turned)
                product[:] = 0
                for d in range(width):
                    product += turned[d] * scorer[h, d]
                product *= scale * log2e
                units, unit = in_units(product[:rank])
                for i in range(rank):
                    whole[b, g0 + g, band, i] = np.int8(units[i])
                facts[b, g0 + g, band, 0], facts[b, g0 + g, band, 1] = unit, product[rank]
        query = np.ascontiguousarray(q[b, g0 : g0 + group])
        for p in range(PIECES):
            keys, vals = np.empty((PIECE, width), np.float32), np.empty((PIECE, width), np.float32)
            count = 0
            for i in range(PIECE):
                n = fixed_token(p * PIECE + i, lengths[b], 0)
                if n < lengths[b]:
                    keys[count] = k[table[b, n // page], h, n % page]
                    vals[count] = v[table[b, n // page], h, n % page]
                    count += 1
            out, lse = np.empty((group, 1, width), np.float32), np.empty((group, 1), np.float32)
            kept = np.arange(count)
            reference_kept(query, keys, vals, kept, none, scale, softcap, out, lse)
            fixed_out[b, g0 : g0 + group, p] = out[:, 0]
            fixed_lse[b, g0 : g0 + group, p] = lse[:, 0] * log2e
        candidates = (near - 1) * BLOCK
        scores[b, g0 : g0 + group] = 0
        values[b, h] = 0
        for j in range(SAMPLE):
            n = sample_token(j, candidates)
            if n >= BLOCK + candidates:
                break
            key, value = k[table[b, n // page], h, n % page], v[table[b, n // page], h, n % page]
            part = j // (SAMPLE // SAMPLES)
            values[b, h, part] += value
            for g in range(group):
                s = np.float32(0)
                for d in range(width):
                    s += query[g, 0, d] * key[d]
                s *= scale * log2e
                own = scores[b, g0 + g, part]
                own[0] += s
                own[1] += s * s
                own[2:] += s * value


def _cpu(*args):
    call, outs = Call(*args[:-6]), args[-6:]
    lengths, _ = rows_on_cpu(call.k, call.lengths, None, call.table)
    k, v, table = page_rows(call.k, call.v, call.table, int(lengths.max()))
    _reference(
        *arrays(call.q.contiguous(), k, v, call.scorer, call.turns, table, lengths),
        *arrays(call.scale, call.softcap, *outs),
    )


# --- CUDA ------------------------------------------------------------------------------------


def launch_prepare_pages(*args, total=None, marks=None):
    """Run the kernel; tensors as in `prepare_pages`, on a GPU or in Triton's interpreter. In the
    chain also clear `total` and `marks`."""
    call, (whole, facts, fixed_out, fixed_lse, scores, values) = Call(*args[:-6]), args[-6:]
    q, k, v, bands = call.q, call.k, call.v, whole.shape[2]
    q = q if q.stride(3) == 1 else q.contiguous()
    shape, wide = shape_of(q, k, call.table), k.shape[3] * q.element_size()
    # As many bands at a time as fill the rows of a product, with the heads padded.
    per = max(1, ROWS // next_power_of_two(shape.GROUP))
    rows = max(16, per * next_power_of_two(shape.GROUP))
    roles = kernels.Roles(PIECES, SAMPLES, cdiv(bands, per))
    factor, cap = base_two(call.scale, call.softcap)
    fine, coarse = next(pair for pair in COORDINATES.values() if sum(pair) == whole.shape[3])
    launch_kernel(
        kernels.prepare,
        grid=(sum(roles), k.shape[1], len(q)),
        q=query_of(q),
        cache=cache_of(k, v, call.table),
        rows=rows_of(capacity(k, call.table), call.lengths),
        scorer=call.scorer,
        turns=call.turns,
        weights=kernels.Weights(whole, facts, bands),
        fixed=pieces_of(fixed_out, fixed_lse),
        sampled=kernels.Sampled(scores, values, SAMPLES),
        total=total,
        marks=marks,
        mark_count=0 if marks is None else marks.shape[2],
        MARKS=1 if marks is None else next_power_of_two(marks.shape[2]),
        q_scale=call.scale * LOG2E,
        scale=factor,
        cap=cap,
        SHAPE=shape,
        HALF=call.turns.shape[2],
        TILE=16 if wide > 512 else 32 if wide > 256 else 64,
        ROLES=roles,
        BAND=BAND,
        ROWS=rows,
        PER=per,
        CODE=Code(fine, coarse),
        CAPPED=call.softcap > 0,
        STEPS=steps_of(call.lengths),
        PRECISION=card(q.device).precision,
        **{"num_warps": 8 if wide >= 256 else 4},
    )


_prepare_pages = define_op(SCHEMA, allocate=_allocate, cpu=_cpu, cuda=launch_prepare_pages)
