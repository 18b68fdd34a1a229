"""A whole decode step over a keep set of key blocks: append, select, attend.

    k[:, :, length], v[:, :, length] = new_k, new_v;  length += 1
    index = select_blocks(q, k, ...);  out, lse = gather_attention(q, k, v, index, ...)

in one chain of kernels, of which each starts before the one in front of it has ended (programmatic
dependent launch). They score the blocks and select. They attend to the keep set, where they read
the token from `new_k, new_v` and write it to the cache. They merge, and count the token.

Sources: "Attention Pays Its Bill" (docs/papers.md); bounds of Quest (Tang et al., 2024).
"""

import functools
from typing import Any, NamedTuple

import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_token
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.pages import capacity
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.gather.attend_plan import Plan as AttendPlan
from attnplug.ops.gather.attend_plan import plan_for as plan_attention
from attnplug.ops.gather.gather_attention import (
    Step,
    allocate_attention,
    attend_on_cpu,
    launch_gather_attention,
)
from attnplug.ops.gather.select_blocks import (
    allocate_index,
    launch_choice,
    launch_scores,
    select_on_cpu,
)
from attnplug.ops.gather.select_plan import Plan as SelectPlan
from attnplug.ops.gather.select_plan import candidates_of
from attnplug.ops.gather.select_plan import plan_for as plan_selection

NAME = "gather_decode"
SCHEMA = (
    "(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor new_k, Tensor new_v, Tensor(c!) bounds, "
    "Tensor(d!) progress, {lengths} lengths, float scale, int block, int top_k, int sink, "
    "int local, str scoring, Tensor? start, Tensor? key_mask, float softcap, Tensor? sinks) "
    "-> (Tensor, Tensor)"
)


def gather_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    new_k: torch.Tensor | None,
    new_v: torch.Tensor | None,
    bounds: torch.Tensor,
    progress: torch.Tensor | None,
    lengths: torch.Tensor,
    *,
    scale: float,
    block: int,
    top_k: int,
    sink: int = 1,
    local: int = 4,
    scoring: str = "bounds",
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    count: bool = True,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write one token to the cache and attend from it, over the keep set, as `select_blocks` and
    `gather_attention` would with the token in the cache. With a `table` of pages the token is in
    the cache already: nothing is written, and `lengths` counts it.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[B, Hkv, S, D]` like q, the cache; written. Neighbours in D next to each other.
        new_k, new_v: `[B, Hkv, 1, D]` like q, the token's key and value.
        bounds, progress: as `select_blocks` has them; written.
        lengths: int32 or int64 `[]`, `[1]` or `[B]`, contiguous: tokens before this one; one
            more after the call, with `count`. The output of a row that has S already is NaN. No
            token is written for such a row, nor for one with a negative length.
        scale, block, top_k, sink, local, scoring: as `select_blocks` has them.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap, sinks: as `gather_attention` has them.
        count: whether to count the token. Compiled code must count it itself where it reads
            `lengths` elsewhere. Inductor (2.11 to 2.13) moves such reads, a position's say, behind
            an op that writes what they read.
        table: int32 `[B, P]`, the pages of each row, as `dense_decode` has it. k and v are then
            pages `[pages, Hkv, page, D]`, bounds those that `page_bounds` keeps, new_k, new_v and
            progress None; there is no start and no key_mask.

    Returns:
        out `[B, Hq, 1, D]` of q's dtype and lse `[B, Hq, 1]` float32, as `gather_attention`.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v, new_k, new_v, sinks)
    if table is not None:
        lone = new_k is None and new_v is None
        require(lone, NAME, "with a table there are no new_k and no new_v: write them to the pages")
        choice = scale, block, top_k, sink, local, scoring, start, key_mask, softcap, sinks
        return _gather_decode_paged(q, k, v, bounds, progress, table, lengths, *choice)
    tensors = q, k, v, new_k, new_v, bounds, progress, lengths
    options = scale, block, top_k, sink, local, scoring, start, key_mask, softcap, sinks
    return (_gather_decode if count else _gather_decode_uncounted)(*tensors, *options)


class Call(arguments_of(NAME + SCHEMA.format(lengths="Tensor"))):
    """The arguments of the op."""

    __slots__ = ()


# No types of what these return: pyright works out how many arguments it is.
def selection(call: Any, lengths: torch.Tensor):
    """The arguments of `select_blocks` in those of a decode step, in the order of its schema."""
    tensors = call.q, call.k, call.bounds, call.progress
    choice = call.block, call.top_k, call.sink, call.local, call.scoring
    return *tensors, *choice, lengths, call.start, call.key_mask


def attention(call: Any, index: torch.Tensor, lengths: torch.Tensor):
    """The arguments of `gather_attention` in those of a decode step, in the order of its schema."""
    blocks = call.scale, call.block, call.sink, call.local
    rows = lengths, call.start, call.key_mask
    return call.q, call.k, call.v, index, *blocks, *rows, call.softcap, call.sinks


def _allocate(*args, table=None):
    call = Call(*args)
    q, lengths = call.q, call.lengths
    rows = lengths.reshape(1) if lengths.dim() == 0 else lengths
    index = allocate_index(*selection(call, rows), table=table)
    outputs = allocate_attention(*attention(call, index, rows), table=table)
    if q.shape[2] != 1:
        raise ArgumentError(f"{NAME}: q has {q.shape[2]} queries a row, needs 1")
    if table is None:
        check_token(NAME, call)
        require(lengths.is_contiguous(), NAME, "lengths is not contiguous")
    return outputs


# --- CPU: the specification ------------------------------------------------------------------


def _cpu(*args, count=True):
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    q, k, v = call.q, call.k, call.v
    assert call.new_k is not None and call.new_v is not None  # else a table would be there
    lengths = call.lengths.reshape(-1)
    full = (lengths >= k.shape[2]).expand(q.shape[0])
    for b, at in enumerate(lengths.expand(q.shape[0]).tolist()):
        if 0 <= at < k.shape[2]:
            k[b, :, at], v[b, :, at] = call.new_k[b, :, 0], call.new_v[b, :, 0]
    now = lengths.add_(1) if count else lengths + 1
    index = q.new_empty((*k.shape[:2], 1, call.top_k), dtype=torch.int32)
    if call.top_k > 0:
        select_on_cpu(*selection(call, now), index)
    attend_on_cpu(*attention(call, index, now), out, lse)
    out[full], lse[full] = torch.nan, torch.nan


def _cpu_paged(*args, table):
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    lengths = call.lengths.reshape(-1)
    shape = call.q.shape[0], call.k.shape[1], 1, call.top_k
    index = call.q.new_empty(shape, dtype=torch.int32)
    if call.top_k > 0:
        select_on_cpu(*selection(call, lengths), index, table=table)
    attend_on_cpu(*attention(call, index, lengths), out, lse, table=table)


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    select: SelectPlan
    attend: AttendPlan


@functools.lru_cache(maxsize=1024)
def plan_for(
    rows: int,
    group: int,
    candidates: int,
    block: int,
    top_k: int,
    kept: int,
    width: int,
    itemsize: int,
    multiprocessors: int,
    summary_size: int,
    paged: bool = False,
    masked: bool = False,
) -> Plan:
    """The pre-tuned plan of a shape: `rows` (sequence, KV head) pairs keep `kept` blocks each, the
    listed ones out of `candidates` (`candidates_of`) in a full cache; a summary's element has
    `summary_size` bytes."""
    pipelined = not paged and not masked
    select = plan_selection(rows, candidates, top_k, width, summary_size, pipelined)
    shape = rows, group, kept * block, block, width, itemsize, multiprocessors
    return Plan(select, plan_attention(*shape, masked))


def plan_of(call: Call, table: torch.Tensor | None) -> Plan:
    """The plan of a call. Where its sizes are a compiler's symbols (`gather_pieces` sizes what it
    returns by the plan) the graph then holds for the sizes that it was traced with."""
    batch, heads, width = (int(call.q.shape[i]) for i in (0, 1, 3))
    kv_heads = int(call.k.shape[1])
    return plan_for(
        rows=batch * kv_heads,
        group=heads // kv_heads,
        candidates=candidates_of(cdiv(int(capacity(call.k, table)), call.block), call.local),
        block=call.block,
        top_k=call.top_k,
        kept=call.sink + call.local + call.top_k,
        width=width,
        itemsize=call.q.element_size(),
        multiprocessors=card(call.q.device).processors,
        summary_size=call.bounds.element_size(),
        paged=table is not None,
        masked=call.key_mask is not None,
    )


def launch_gather_decode(
    *args, plan=None, count=True, table=None, slots=None, pieces=None, scales=(None, None)
):
    """Run the kernels: arguments and outputs as those of `gather_decode`, on a GPU or in Triton's
    interpreter. `slots`, `pieces` and `scales` (of keys and of values) are as `gather_pieces` has
    them, which leaves the outputs."""
    call, outputs = Call(*args[:-2]), args[-2:]
    q, k, block, top_k = call.q, call.k, call.block, call.top_k
    lengths = call.lengths.reshape(-1)
    batch, kv_heads, blocks = q.shape[0], k.shape[1], cdiv(capacity(k, table), block)
    if plan is None:
        plan = plan_of(call, table)
    new_k, new_v = (
        x if x is None or x.stride(3) == 1 else x.contiguous() for x in (call.new_k, call.new_v)
    )
    index = q.new_empty((batch, kv_heads, 1, top_k), dtype=torch.int32)
    step, more = Step(new_k, new_v, count), {"new": int(table is None)}
    if table is not None:
        more["table"] = table
    if top_k > 0:
        scores = launch_scores(*selection(call, lengths), plan=plan.select, slots=slots, **more)
        rows = lengths, call.start, blocks, index
        launch_choice(scores, k, call.progress, block, top_k, call.local, *rows, **more)
    made = {"plan": plan.attend, "step": step, "table": table, "pieces": pieces}
    launch_gather_attention(*attention(call, index, lengths), *outputs, scales=scales, **made)


_gather_decode = define_op(
    "gather_decode" + SCHEMA.format(lengths="Tensor(e!)"),
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_gather_decode,
    repeats=True,
)

_gather_decode_uncounted = define_op(
    "gather_decode_uncounted" + SCHEMA.format(lengths="Tensor"),
    allocate=_allocate,
    cpu=functools.partial(_cpu, count=False),
    cuda=functools.partial(launch_gather_decode, count=False),
    repeats=True,
)


def _paged(fn):
    """`fn` of a step's arguments, without those that pages have not: the token, what is written."""

    def on_pages(q, k, v, bounds, progress, table, *rest, **options):
        return fn(q, k, v, None, None, bounds, progress, *rest, table=table, **options)

    return on_pages


launch_gather_decode_paged = _paged(functools.partial(launch_gather_decode, count=False))

_gather_decode_paged = define_op(
    "gather_decode_paged(Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? progress, "
    "Tensor table, Tensor lengths, float scale, int block, int top_k, int sink, int local, "
    "str scoring, Tensor? start, Tensor? key_mask, float softcap, Tensor? sinks) "
    "-> (Tensor, Tensor)",
    allocate=_paged(_allocate),
    cpu=_paged(_cpu_paged),
    cuda=launch_gather_decode_paged,
    repeats=True,
)
