"""A decode step over a keep set of key blocks whose cache lies in host memory.

It computes what `gather_decode` does, with keys and values in host memory that the GPU reads
over the link. GPU memory holds the last `local * block` tokens, in a ring, and the blocks that
recent steps wanted, in slots. If a step wants a block that no slot has, the program that attends to
it reads it from the host. It writes it to the slot that it is given. The host computes nothing.

Slots are given by a clock: its hand passes by those whose block was wanted since it last passed.

Sources: "Attention Pays Its Bill" (docs/papers.md); Corbato, A Paging Experiment (1968).
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from attnplug.ops.common.checks import check_tensor, check_token
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.reference import reference_rows, sinks_on_cpu
from attnplug.ops.common.rows import NO_MASK, mask_bytes
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.softmax import base_two
from attnplug.ops.common.splits import launch_merge, pieces_of
from attnplug.ops.common.views import (
    Output,
    cache_of,
    chosen_between,
    query_of,
    rows_of,
    shape_of,
    steps_of,
    token_of,
)
from attnplug.ops.gather import attend_plan
from attnplug.ops.gather.gather_attention import allocate_attention, kept_keys
from attnplug.ops.gather.gather_decode import attention, selection
from attnplug.ops.gather.kernels import tiered as kernels
from attnplug.ops.gather.kernels.slots import Keep
from attnplug.ops.gather.reference import place_blocks
from attnplug.ops.gather.select_blocks import (
    allocate_index,
    launch_choice,
    launch_scores,
    select_on_cpu,
)

NAME = "tiered_decode"
SCHEMA = (
    "tiered_decode(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor? new_k, Tensor? new_v, "
    "Tensor(c!) bounds, Tensor(d!) progress, Tensor(e!) ring, Tensor(f!) slots, "
    "Tensor(g!) table, Tensor(h!) owner, Tensor(i!) used, Tensor(j!) counters, Tensor lengths, "
    "float scale, int block, int top_k, int sink, int local, str scoring, Tensor? start, "
    "Tensor? key_mask, float softcap, Tensor? sinks) -> (Tensor, Tensor)"
)


class ResidentBlocks(NamedTuple):
    """What of a cache in host memory is in the GPU's, and where.

    ring: `[B,Hkv,2,local * block,D]`, keys and values of the last tokens: position p at p modulo
        the ring's size.
    slots: `[B,Hkv,R,2,block,D]`, keys and values of R blocks for each KV head.
    table: int32 `[B,Hkv,ceil(S / block)]`, the slot that each block was given last.
    owner: int32 `[B,Hkv,R]`, position of the first key of a slot's block, -1 where there is none:
        a block is in the slot that the table listed if that is the slot's owner.
    used: int32 `[B,Hkv,R]`, 1 where a slot's block was wanted again since the hand passed.
    counters: int64 `[B,Hkv,3]`: blocks that were wanted, those found in slots, and the hand.
    """

    ring: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    owner: torch.Tensor
    used: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        size: int,
        width: int,
        block: int,
        local: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "ResidentBlocks":
        """Nothing resident, for a cache of `size` tokens."""
        made = {"dtype": torch.int32, "device": device}
        rows, blocks = (batch, heads), -(-size // block)
        return cls(
            torch.zeros((*rows, 2, local * block, width), dtype=dtype, device=device),
            torch.zeros((*rows, slots, 2, block, width), dtype=dtype, device=device),
            torch.zeros((*rows, blocks), **made),
            torch.full((*rows, slots), -1, **made),
            torch.zeros((*rows, slots), **made),
            torch.zeros((*rows, 3), dtype=torch.int64, device=device),
        )


def tiered_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    progress: torch.Tensor,
    near: ResidentBlocks,
    *,
    scale: float,
    block: int,
    top_k: int,
    lengths: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    sink: int = 1,
    local: int = 4,
    scoring: str = "bounds",
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one token over the keep set, as `select_blocks` and `gather_attention` would.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[B, Hkv, S, D]` like q, the whole cache; neighbours in D next to each other.
        bounds, progress: as `select_blocks` has them; written.
        near: what is on the GPU; written.
        scale, block, top_k, sink, local, scoring: as `select_blocks` has them.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. With `new` the token is not among them.
        new: key and value `[B, Hkv, 1, D]` of the query's token, which are then written to k, v and
            the ring; the caller counts the token afterwards. The output of a row that has S already
            is NaN. No token is written for such a row, nor for one with a negative length. None:
            the token is in k, v and the ring.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap, sinks: as `gather_attention` has them.

    Returns:
        out `[B, Hq, 1, D]` of q's dtype and lse `[B, Hq, 1]` float32, as `gather_attention`.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    new_k, new_v = (None, None) if new is None else new
    refuse_gradients(NAME, q, k, v, new_k, new_v, sinks)
    tensors = q, k, v, new_k, new_v, bounds, progress, *near, lengths
    options = scale, block, top_k, sink, local, scoring, start, key_mask, softcap, sinks
    return _tiered_decode(*tensors, *options)


class Call(arguments_of(SCHEMA)):
    """The arguments of the op."""

    __slots__ = ()

    @property
    def near(self) -> ResidentBlocks:
        return ResidentBlocks(*(getattr(self, name) for name in ResidentBlocks._fields))


def _allocate(*args):
    call = Call(*args)
    q = call.q
    index = allocate_index(*selection(call, call.lengths))
    outputs = allocate_attention(*attention(call, index, call.lengths))
    require(q.shape[2] == 1, NAME, f"q has {q.shape[2]} queries a row, needs 1")
    check_token(NAME, call)
    _check_near(call)
    return outputs


def _check_near(call: Call) -> None:
    k, near, block, count = call.k, call.near, call.block, call.owner.shape[-1]
    rows, width, blocks = tuple(k.shape[:2]), k.shape[3], -(-k.shape[2] // block)
    least = min(call.sink + call.top_k, blocks)
    require(count >= least, NAME, f"near has {count} slots, needs sink + top_k = {least}")
    wanted = (
        ("ring", k.dtype, (*rows, 2, call.local * block, width)),
        ("slots", k.dtype, (*rows, count, 2, block, width)),
        ("table", torch.int32, (*rows, blocks)),
        ("owner", torch.int32, (*rows, count)),
        ("used", torch.int32, (*rows, count)),
        ("counters", torch.int64, (*rows, 3)),
    )
    for tensor, (label, dtype, shape) in zip(near, wanted, strict=True):
        check_tensor(NAME, f"near.{label}", tensor, dtype, shape, k.device)


# --- CPU: the specification ------------------------------------------------------------------


def _near_rows(near, b, h, kept, start, first, block):
    """Keys and values `[2, kept, D]` of the positions `kept`: those from `first` on are in the
    ring, the others in slots."""
    j = (kept - start) // block
    ring = near.ring[b, h][:, kept % near.ring.shape[3]]
    slot = near.table[b, h].long()[j]
    stored = near.slots[b, h][slot, :, (kept - start) % block].transpose(0, 1)
    return torch.where((kept >= first)[:, None], ring, stored).float().numpy()


def _attend_row(q, near, listed, mask, length, start, options, b, h):
    """(out, lse) of one row and KV head, `q [G, 1, D]`."""
    block, sink, local, scale, softcap, sinks = options
    kept = kept_keys(listed, length - 1, start, mask, block, sink, local)
    first = start + (max(length - 1 - start, 0) // block - local + 1) * block
    keys, values = _near_rows(near, b, h, torch.from_numpy(kept), start, first, block)
    out = np.empty(q.shape, np.float32)
    lse = np.empty(q.shape[:2], np.float32)
    reference_rows(
        q, keys, values, np.empty(0, np.bool_), len(kept) - 1, 0, 0, sinks, scale, softcap, out, lse
    )
    return torch.from_numpy(out), torch.from_numpy(lse)


def _append_on_cpu(call: Call) -> torch.Tensor:
    """Write the new token, if there is one, to the cache and the ring of rows whose length is a
    place of the cache; returns the lengths with it."""
    if call.new_k is None or call.new_v is None:
        return call.lengths
    for b, at in enumerate(call.lengths.expand(len(call.k)).tolist()):
        if 0 <= at < call.k.shape[2]:
            key, value = call.new_k[b, :, 0], call.new_v[b, :, 0]
            call.k[b, :, at], call.v[b, :, at] = key, value
            place = at % call.ring.shape[3]
            call.ring[b, :, 0, place], call.ring[b, :, 1, place] = key, value
    return call.lengths + 1


def _cpu(*args):
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    q, k, v, near, block = call.q, call.k, call.v, call.near, call.block
    batch, group = q.shape[0], q.shape[1] // k.shape[1]
    full = (call.lengths >= k.shape[2] + (call.new_k is None)).expand(batch)
    lengths = _append_on_cpu(call)
    index = q.new_empty((*k.shape[:2], 1, call.top_k), dtype=torch.int32)
    if call.top_k > 0:
        select_on_cpu(*selection(call, lengths), index)
    ends = lengths.expand(batch).clamp(0, k.shape[2]).tolist()
    starts = (
        [0] * batch
        if call.start is None
        else call.start.expand(batch).clamp(0, k.shape[2]).tolist()
    )
    logits = sinks_on_cpu(call.sinks)
    for b, h in np.ndindex(*k.shape[:2]):
        listed = index[b, h, 0].numpy()
        edge = max(ends[b] - 1 - starts[b], 0) // block - call.local + 1
        every = np.concatenate([np.arange(call.sink, dtype=np.int32), listed])
        state = (x[b, h].numpy() for x in near[2:])
        for j in place_blocks(every, starts[b], edge, block, *state).tolist():
            keys = slice(starts[b] + j * block, starts[b] + (j + 1) * block)
            near.slots[b, h, near.table[b, h, j]] = torch.stack([k[b, h, keys], v[b, h, keys]])
        heads = slice(h * group, (h + 1) * group)
        numbers = np.float32(call.scale), np.float32(call.softcap)
        options = block, call.sink, call.local, *numbers, logits[heads]
        mask = NO_MASK[0] if call.key_mask is None else call.key_mask[b].numpy()
        query = q[b, heads].float().contiguous().numpy()
        found = _attend_row(query, near, listed, mask, ends[b], starts[b], options, b, h)
        out[b, heads], lse[b, heads] = found[0].to(out.dtype), found[1]
    out[full], lse[full] = torch.nan, torch.nan


# --- CUDA ------------------------------------------------------------------------------------


def plan_for(
    rows: int, group: int, keys: int, block: int, width: int, itemsize: int, multiprocessors: int
) -> attend_plan.Plan:
    """The plan of the attending kernel: `gather_attention`'s, but not pipelined, which costs more
    than it hides, and a program for each tile while there are not too many."""
    plan = attend_plan.plan_for(rows, group, keys, block, width, itemsize, multiprocessors)
    tile = min(plan.tile, block)
    splits = keys // tile
    if rows * splits > 32 * multiprocessors:
        splits = max(1, min(splits, 16 * multiprocessors // rows))
    return plan._replace(tile=tile, splits=splits, stages=1)


def launch_tiered_decode(*args, plan=None):
    """Run the kernels; arguments and outputs as those of `tiered_decode`, on a GPU or in Triton's
    interpreter."""
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    q, k, near, lengths, start = call.q, call.k, call.near, call.lengths, call.start
    block, top_k, sink = call.block, call.top_k, call.sink
    batch, kv_heads, size = q.shape[0], k.shape[1], k.shape[2]
    blocks, count = cdiv(size, block), near.owner.shape[2]
    shape, keep = shape_of(q, k), Keep.of(block, sink, call.local, top_k)
    if plan is None:
        cut = batch * kv_heads, shape.GROUP, keep.keys, block, shape.D, q.element_size()
        plan = plan_for(*cut, card(q.device).processors)
    q = q if q.stride(3) == 1 else q.contiguous()
    new_k, new_v = (
        x if x is None or x.stride(3) == 1 else x.contiguous() for x in (call.new_k, call.new_v)
    )
    token, new = token_of(new_k, new_v), int(new_k is not None)
    pdl, dependent = early(q.device)
    index = torch.empty((batch, kv_heads, 1, top_k), dtype=torch.int32, device=q.device)
    place = torch.empty((batch * kv_heads, sink + top_k), dtype=torch.int32, device=q.device)
    # Kernels start early: what one of them reads must not be given to another before the last.
    scores = None
    if top_k > 0:
        scores = launch_scores(*selection(call, lengths), new=new)
        where = lengths, start, blocks, index
        launch_choice(scores, k, call.progress, block, top_k, call.local, *where, new=new)
    both: dict[str, Any] = {
        "index": index,
        "near": near,
        "rows": rows_of(size, lengths, start, mask_bytes(call.key_mask)),
        "place": place,
        "SLOTS": count,
        "KEEP": keep,
        "MP": next_power_of_two(max(1, sink + top_k)),
        "STEPS": steps_of(lengths, start),
        "PDL": pdl,
        **dependent,
    }
    launch_kernel(
        kernels.place_blocks,
        grid=(batch * kv_heads,),
        N=blocks,
        heads=kv_heads,
        RP=next_power_of_two(count),
        NEW=new,
        CHAINED=top_k > 0,
        **{"num_warps": 4, **both},
    )
    views = cache_of(k, call.v), token, near
    cache, token, both["near"] = chosen_between(q.device, *views)
    fused = plan.splits == 1
    output = Output(None if fused else pieces_of(out, plan.splits), out, lse, call.sinks)
    factor, cap = base_two(call.scale, call.softcap)
    launch_kernel(
        kernels.attend_tiered,
        grid=(plan.splits, kv_heads, batch),
        q=query_of(q),
        cache=cache,
        token=token,
        output=output,
        scale=factor,
        cap=cap,
        splits=plan.splits,
        SHAPE=shape,
        TILE=plan.tile,
        STAGES=plan.stages,
        CAPPED=call.softcap > 0,
        **{"num_warps": plan.warps, **both},
    )
    if not fused:
        launch_merge(output, plan.splits, plan.columns)
    del scores


_tiered_decode = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_tiered_decode,
)
