"""A whole decode step of `sketch`: the best tokens read exactly, the rest estimated from the codes.

    encode_keys; prepare_query; scan_sketch; pick_tokens; attend_picks; merge_sketch

in one chain of five kernels, each launched before the one in front of it has ended (programmatic
dependent launch), nothing asked of the host. The first writes the new token to the cache, attends
to the sink and the last blocks, and projects the query. It makes the codes of a block that has just
left the last ones. The others scan the codes; list the picks; attend to them; merge, and count the
token. Exact where there are no more than `top_k` candidates.

Several queries of a row are as many rows of a batch over one cache: each has a length, a fixed part
and picks of its own, as if the tokens behind its own had not come.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_sinks, check_token
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.sketch import attend_picks as attend
from attnplug.ops.sketch import encode_keys as encode
from attnplug.ops.sketch import merge_sketch as merge
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_query as prepare
from attnplug.ops.sketch import scan_sketch as scan
from attnplug.ops.sketch.kernels.codes import LEAST, PART

NAME = "sketch_decode"
MOST_QUERIES = 16  # of a row
SCHEMA = (
    "(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor? new_k, Tensor? new_v, Tensor encoder, "
    "Tensor queries, Tensor v_mean, Tensor(c!) fine, Tensor(d!) coarse, Tensor(e!) odd, "
    "Tensor(f!) progress, Tensor(g!)? recent, Tensor(i!)? hint, {lengths} lengths, "
    "float scale, int top_k, str tail, Tensor? start, Tensor? key_mask, float softcap, "
    "Tensor? sinks) -> (Tensor, Tensor)"
)


def sketch_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    encoder: torch.Tensor,
    queries: torch.Tensor,
    v_mean: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    progress: torch.Tensor,
    *,
    scale: float,
    top_k: int = 2048,
    tail: str = "regression",
    lengths: torch.Tensor | None = None,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    count: bool = True,
    recent: torch.Tensor | None = None,
    hint: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last token of each row, which `new` writes to the cache first, or from each
    of the last T.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16; with `new` and `recent` T is 1, else 1 to
            16. Query t is what a step of its own over `lengths - (T - 1 - t)` keys would be.
        k, v: `[B, Hkv, S, D]` like q, the cache; with `new` written, and neighbours in D then next
            to each other.
        encoder, queries, v_mean: of `fit_basis`.
        fine, coarse, odd, progress: of `empty_codes`; written. After a prefill call `encode_keys`
            once: a step makes missing codes with few programs.
        scale: factor on q.k, commonly `D ** -0.5`.
        top_k: tokens that are read exactly beside the sink and the last blocks.
        tail: what the rest is: "regression" or "drop" (`merge_sketch`).
        lengths: int32 or int64 `[]`, `[1]` or `[B]`, contiguous: valid keys. None: all S. With
            `new` the token is not among them; with `count`, too, they are one more after the call.
        new: key and value `[B, Hkv, 1, D]` of the query's token, which are written to k, v behind
            the valid keys. The output of a row that has S keys already is NaN, and nothing of it
            is written. None: the token is in the cache.
        count: whether to count the token of `new`. Compiled code must count it itself where it
            reads `lengths` elsewhere, as with `gather_decode`.
        recent: `[B, Hq, N, D]` like q, contiguous: the query is written to its place modulo N.
        hint: float32 `[B, Hkv]`, contiguous: the bin of shares from which on the scan counts
            tokens, which the step before left; 0 where nobody knows. Overwritten by this step's,
            or the last query's. It costs time where it is wrong, and changes no result.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.

    Returns:
        out `[B, Hq, T, D]` of q's dtype and lse `[B, Hq, T]` float32 (natural logarithm, sinks left
        out).

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    new_k, new_v = (None, None) if new is None else new
    refuse_gradients(NAME, q, k, v, new_k, new_v, sinks)
    tensors = q, k, v, new_k, new_v, encoder, queries, v_mean, fine, coarse, odd, progress
    options = scale, top_k, tail, start, key_mask, softcap, sinks
    counts = count and new is not None
    op = _sketch_decode if counts else _sketch_decode_uncounted
    return op(*tensors, recent, hint, lengths, *options)


class Call(arguments_of(NAME + SCHEMA.format(lengths="Tensor?"))):
    """The arguments of the op."""

    __slots__ = ()

    @property
    def codes(self) -> tuple[torch.Tensor, ...]:
        """What `empty_codes` makes, in its order."""
        return self.fine, self.coarse, self.odd, self.progress

    @property
    def counted(self) -> torch.Tensor | None:
        """The lengths as `[1]` or `[B]`."""
        return None if self.lengths is None else self.lengths.reshape(-1)


def _allocate(*args):
    call = Call(*args)
    q, k, v = call.q, call.k, call.v
    rows = call.counted, call.start, call.key_mask
    prepare.check_step(NAME, q, k, v, *rows, call.softcap, MOST_QUERIES)
    encode.check_codes(NAME, k, *call.codes)
    batch, heads, queries, width = q.shape
    rank = 2 * call.fine.shape[3] + 4 * call.coarse.shape[3]
    rows = tuple(k.shape[:2])
    columns = 2 * rank + 2 + width
    encode.check_float(NAME, "encoder", call.encoder, (*rows, width + 1, rank), q.device)
    encode.check_float(NAME, "queries", call.queries, (*rows, width, columns), q.device)
    encode.check_float(NAME, "v_mean", call.v_mean, (*rows, width), q.device)
    require(call.top_k >= 1, NAME, f"top_k is {call.top_k}, needs at least 1")
    known = ", ".join(merge.TAILS)
    require(call.tail in merge.TAILS, NAME, f"tail is {call.tail!r}, needs one of {known}")
    if call.sinks is not None:
        check_sinks(NAME, q, call.sinks)
    _check_new(call)
    lse = q.new_empty((batch, queries, heads), dtype=torch.float32)
    return q.new_empty((batch, queries, heads, width)).transpose(1, 2), lse.transpose(1, 2)


def _check_new(call: Call) -> None:
    """The checks of the new token, of the ring of queries and of the hint."""
    q, k = call.q, call.k
    if call.new_k is not None or call.new_v is not None:
        check_token(NAME, call)
    require((call.new_k is None) == (call.new_v is None), NAME, "new needs a key and a value")
    alone = q.shape[2] == 1 or (call.new_k is None and call.recent is None)
    require(alone, NAME, f"q has {q.shape[2]} queries a row, with new or recent it needs 1")
    if call.new_k is not None:
        require(call.lengths is not None, NAME, "lengths is None: nothing says where new goes")
    if call.lengths is not None:
        require(call.lengths.is_contiguous(), NAME, "lengths is not contiguous")
    if call.hint is not None:
        encode.check_float(NAME, "hint", call.hint, tuple(k.shape[:2]), q.device)
    recent = call.recent
    if recent is None:
        return
    fits = recent.dim() == 4 and recent.shape[2] >= 1 and recent.dtype == q.dtype
    if not fits or (*recent.shape[:2], recent.shape[3]) != (*q.shape[:2], q.shape[3]):
        raise ArgumentError(
            f"{NAME}: recent is {recent.dtype} {tuple(recent.shape)}, needs {q.dtype} [B,Hq,N,D]"
        )
    require(recent.device == q.device, NAME, f"recent is on {recent.device}, q on {q.device}")
    require(recent.is_contiguous(), NAME, "recent is not contiguous")


# --- CPU: the specification ------------------------------------------------------------------


def _write(call: Call, full: torch.Tensor) -> torch.Tensor | None:
    """Write the new token, if there is one, to the rows that have a place for it, and the query to
    its ring; returns the lengths with the token."""
    lengths, size = call.counted, call.k.shape[2]
    if lengths is not None and call.new_k is not None and call.new_v is not None:
        for b, at in enumerate(lengths.expand(len(full)).tolist()):
            if not full[b] and at >= 0:
                call.k[b, :, at], call.v[b, :, at] = call.new_k[b, :, 0], call.new_v[b, :, 0]
        lengths = (lengths + 1).clamp(max=size)
    if call.recent is not None:
        ends = (
            torch.tensor([size], dtype=torch.int64, device="cpu")
            if lengths is None
            else lengths.clamp(max=size)
        )
        for b, end in enumerate(ends.expand(len(full)).tolist()):
            if end > 0:
                call.recent[b, :, (end - 1) % call.recent.shape[2]] = call.q[b, :, 0]
    return lengths


def _cpu(*args, count=True, prepare_query: Callable[..., Any] = prepare._prepare_query):
    """A step a query; a cache that is elsewhere brings its own way to read the fixed part."""
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    queries, whole = call.q.shape[2], call.lengths
    if whole is None and queries > 1:
        whole = torch.tensor(call.k.shape[2], dtype=torch.int64, device="cpu")
    for t in range(queries):
        if whole is not None and queries > 1:
            own = (whole - (queries - 1 - t)).clamp(min=0)
            call = call._replace(q=args[0][:, :, t : t + 1], lengths=own)
        _step_on_cpu(call, out[:, :, t : t + 1], lse[:, :, t : t + 1], count, prepare_query)


def _step_on_cpu(call, out, lse, count, prepare_query):
    q, k, v, counted = call.q, call.k, call.v, call.counted
    full = torch.zeros(q.shape[0], dtype=torch.bool, device="cpu")
    if counted is not None and call.new_k is not None:
        full = (counted >= k.shape[2]).expand(q.shape[0])
    now = _write(call, full)
    if count and counted is not None:
        counted.add_(1)
    rows, softcap = (now, call.start), call.softcap
    encode._encode_keys(k, v, call.encoder, *call.codes, *rows, call.key_mask)
    projected, *fixed = prepare_query(
        q, k, v, call.queries, call.scale, *rows, call.key_mask, softcap
    )
    shares, total, sums, norm, middle = scan._scan_sketch(
        projected, fixed[1], *call.codes, call.top_k, 1, *rows, call.key_mask, softcap
    )
    picks, cut = pick._pick_tokens(shares, total, middle, call.top_k, *rows)
    if call.hint is not None:
        call.hint.copy_(pick.coming_hint(call.hint, cut[..., 2]))
    picked = attend._attend_picks(
        q, k, v, projected, call.fine, call.coarse, picks, cut, norm, call.scale, 1, softcap
    )
    rest = sums, norm, cut, call.v_mean, call.tail, softcap, call.sinks
    result, result_lse = torch.empty_like(q), torch.empty(lse.shape, dtype=lse.dtype, device="cpu")
    merge._cpu(q, projected, *fixed, *picked, *rest, result, result_lse)
    result[full], result_lse[full] = torch.nan, torch.nan
    out.copy_(result)
    lse.copy_(result_lse)


# --- CUDA ------------------------------------------------------------------------------------


# Tokens and KV heads whose codes fill the L2 when the scan has read them, 24 MiB: above it codes
# leave first, so that the shares stay, which `pick` reads next.
CACHED = 1 << 20


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    parts: int  # of a full row's candidates in the scan
    fewest: int  # of a shorter row's, about (`parts_of`)
    scan: scan.Plan
    pick: pick.Plan
    pieces: int  # of the list of picks
    attend_warps: int
    columns: int  # of the head dimension, for one program of the merge


@functools.lru_cache(maxsize=1024)
def plan_for(
    rows: int, size: int, top_k: int, width: int, itemsize: int, multiprocessors: int
) -> Plan:
    """The plan of a shape: `rows` (sequence, KV head, query) triples with caches of `size`
    tokens."""
    blocks = max(1, size // encode.BLOCK)
    # Four programs of the scan fit a multiprocessor; short caches get one, of several steps.
    fewest = max(1, multiprocessors // rows)
    parts = min(max(fewest, blocks // PART.value), blocks // LEAST.value)
    parts = max(1, min(parts, 4 * multiprocessors // rows))
    steps = pick.capacity_for(top_k) // attend.TILE
    pieces = max(1, min(steps, 3 * multiprocessors // rows))  # all at once
    wide = width * itemsize > 256
    pieces = -(-steps // -(-steps // pieces))
    evict = "evict_first" if rows * size > CACHED else ""
    how = scan.PLAN._replace(evict=evict), pick.plan_for(rows, size, multiprocessors)
    return Plan(parts, fewest, *how, pieces, 8 if wide else 4, 32)


def launch_sketch_decode(
    *args,
    plan=None,
    count=True,
    prepare_query=prepare.launch_prepare_query,
    attend_picks=attend.launch_attend_picks,
):
    """Run the kernels: arguments and outputs as those of the op, on a GPU or in Triton's
    interpreter. A cache that is elsewhere brings its own launchers of what reads it."""
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    (batch, heads, queries, width), softcap = call.q.shape, call.softcap
    kv_heads, size = call.k.shape[1:3]
    if plan is None:
        processors = card(out.device).processors
        shape = batch * queries * kv_heads, size, call.top_k, width, out.element_size()
        plan = plan_for(*shape, processors)
    q = call.q
    if queries > 1:  # as rows, in the order of the output
        q = q.transpose(1, 2).reshape(batch * queries, heads, 1, width)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, call.k, call.v))
    rows = call.counted, call.start
    projected, *fixed = prepare.outputs(q, call.queries)
    scanned = shares, total, sums, norm, middle = scan.outputs(projected, call.fine, plan.parts)
    notes = pick.Notes.empty(shares, plan.pick)
    prepare_query(
        *(q, k, v, call.queries, call.scale, *rows, call.key_mask, softcap),
        projected,
        *fixed,
        total=total,
        encoder=call.encoder,
        codes=call.codes,
        new=(call.new_k, call.new_v),
        recent=call.recent,
        marks=notes.marks,
    )
    behind = {"hint": call.hint, "is_new": call.new_k is not None}
    how = {"plan": plan.scan, "fewest": plan.fewest, "counted": notes.counted, "chained": True}
    asked = call.top_k, plan.parts, *rows, call.key_mask, softcap
    scan.launch_scan_sketch(projected, fixed[1], *call.codes, *asked, *scanned, **how, **behind)
    picks, cut = pick.outputs(shares, call.top_k)
    pick.launch_pick_tokens(
        *(shares, total, middle, call.top_k, *rows, picks, cut, plan.pick, notes),
        queries=queries,
        **behind,
    )
    picked = attend.outputs(q, plan.pieces)
    attend_picks(
        *(q, k, v, projected, call.fine, call.coarse, picks, cut, norm),
        *(call.scale, plan.pieces, softcap, *picked),
        warps=plan.attend_warps,
        chained=True,
    )
    merge.launch_merge_sketch(
        *(q, projected, *fixed, *picked, sums, norm, cut),
        *(call.v_mean, call.tail, softcap, call.sinks, out, lse),
        note=(call.progress, *rows, size),
        counted=call.counted if call.new_k is not None and count else None,
        **behind,
        columns=plan.columns,
    )


_sketch_decode = define_op(
    NAME + SCHEMA.format(lengths="Tensor(h!)?"),
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_sketch_decode,
    repeats=True,
)

_sketch_decode_uncounted = define_op(
    f"{NAME}_uncounted" + SCHEMA.format(lengths="Tensor?"),
    allocate=_allocate,
    cpu=functools.partial(_cpu, count=False),
    cuda=functools.partial(launch_sketch_decode, count=False),
    repeats=True,
)
