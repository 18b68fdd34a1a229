"""A decode step of `sketch` whose cache lies in host memory.

It computes what `sketch_decode` does, with keys and values in host memory that the GPU reads
over the link. The codes are on the GPU, and so is the fixed part: the first block and the last
four, side by side. It moves up when a block is full, and is read from the host again where the row
has changed otherwise. The chain of `sketch_decode` gets two more kernels. `stage` in front has the
fixed part as this step reads it and writes the new token to the host. `fetch` behind the picks
brings their keys and values over the link. All others compute on the GPU's memory, the same to the
bit.
"""

import functools
from typing import NamedTuple

import torch

from attnplug.ops.common.checks import check_tensor
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import cdiv, padded_width
from attnplug.ops.common.triton import triton
from attnplug.ops.common.views import (
    cache_of,
    chosen_between,
    query_of,
    rows_of,
    shape_of,
    steps_of,
    token_of,
)
from attnplug.ops.sketch import attend_picks as attend
from attnplug.ops.sketch import prepare_query as prepare
from attnplug.ops.sketch import sketch_decode as chain
from attnplug.ops.sketch.encode_keys import near_block
from attnplug.ops.sketch.kernels import host as kernels
from attnplug.ops.sketch.kernels.codes import Code
from attnplug.ops.sketch.state import BLOCK, Codes

NAME = "sketch_host_decode"
FIXED = kernels.FIXED.value
FETCHED = 16  # picks that a program fetches


class FixedPart(NamedTuple):
    """The tokens of a cache in host memory that every step reads, in the GPU's.

    tokens: `[B,Hkv,2,640,D]`, keys and values: the first block, and from place 128 on the last
        four, the one being filled included.
    held: int32 `[B,Hkv,2]`: the first real key of the row, and the block at place 128, that they
        are of. Every token of these blocks that is in the cache is here. Whoever writes tokens in
        another way than by this op, or takes some from elsewhere, makes it -1.
    """

    tokens: torch.Tensor
    held: torch.Tensor

    @classmethod
    def empty(cls, k: torch.Tensor) -> "FixedPart":
        """Nothing held, for a cache `k [B,Hkv,S,D]`, on its device."""
        batch, heads, _, width = k.shape
        return cls(
            k.new_zeros((batch, heads, 2, FIXED, width)),
            k.new_full((batch, heads, 2), -1, dtype=torch.int32),
        )


def sketch_host_decode(
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
    fixed: FixedPart,
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
    """Attend from the last token of each row, which `new` writes to the cache first.

    Args:
        k, v: `[B, Hkv, S, D]` like q, tensors of the GPU whose memory is the host's;
            neighbours in D next to each other.
        fixed: what of them is on the GPU; written.
        q, encoder to progress, scale to sinks: as `sketch_decode` has them.

    Returns:
        out `[B, Hq, 1, D]` of q's dtype and lse `[B, Hq, 1]` float32 (natural logarithm, sinks left
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
    op = _sketch_host_decode if counts else _sketch_host_decode_uncounted
    return op(*tensors, recent, hint, lengths, *options, *fixed)


def _allocate(*args):
    call, fixed = chain.Call(*args[:-2]), FixedPart(*args[-2:])
    require(call.q.shape[2] == 1, NAME, f"q has {call.q.shape[2]} queries a row, needs 1")
    outputs = chain._allocate(*call)
    rows, width = tuple(call.k.shape[:2]), call.k.shape[3]
    for label, tensor in (("k", call.k), ("v", call.v)):
        require(tensor.stride(3) == 1, NAME, f"{label} has a stride of {tensor.stride(3)} in D")
    wanted = ((*rows, 2, FIXED, width), call.k.dtype), ((*rows, 2), torch.int32)
    for label, tensor, (shape, dtype) in zip(FixedPart._fields, fixed, wanted, strict=True):
        check_tensor(NAME, f"fixed.{label}", tensor, dtype, shape, call.k.device)
    return outputs


# --- CPU: the specification ------------------------------------------------------------------


def _places(low: int, near: int) -> torch.Tensor:
    """The tokens of a row that the places of the fixed part are for, int64 `[640]`."""
    place = torch.arange(FIXED, device="cpu")
    return low + place + torch.where(place < BLOCK, 0, (near - 1) * BLOCK)


def _hold(fixed: FixedPart, k, v, b: int, end: int, low: int, near: int, is_new: bool) -> None:
    """Have the fixed part of row b, of `end` tokens, the last of which may be new."""
    at = _places(low, near)
    for h in range(k.shape[1]):
        own = fixed.tokens[b, h]
        was_low, was_near = fixed.held[b, h].tolist()
        wanted = at == end - 1 if is_new else at < 0
        if (was_low, was_near + 1) == (low, near):
            own[:, BLOCK:-BLOCK] = own[:, 2 * BLOCK :].clone()
            wanted = (at < end) & (torch.arange(FIXED, device="cpu") >= FIXED - BLOCK) | wanted
        elif (was_low, was_near) != (low, near):
            wanted = at < end
        place, chosen = wanted.nonzero()[:, 0], at[wanted]
        own[0, place], own[1, place] = k[b, h, chosen], v[b, h, chosen]
        fixed.held[b, h] = torch.tensor([low, near], dtype=torch.int32, device="cpu")


def _prepare_from(fixed: FixedPart, written: torch.Tensor):
    """`prepare_query` that reads the fixed part where it is; `written` says which rows have a new
    token."""

    def prepare_query(q, k, v, queries, scale, lengths, start, key_mask, softcap):
        batch, size = k.shape[0], k.shape[2]
        ends, lows = rows_on_cpu(k, lengths, start)
        counts, mask = torch.zeros(batch, dtype=torch.int64, device="cpu"), None
        if key_mask is not None:
            mask = torch.zeros((batch, FIXED), dtype=torch.bool, device="cpu")
        rows = zip(ends.tolist(), lows.tolist(), strict=True)
        for b, (end, low) in enumerate(rows):
            near = near_block(end, low)
            _hold(fixed, k, v, b, end, low, near, bool(written[b]))
            counts[b] = max(end - low - (near - 1) * BLOCK, 0)
            if key_mask is not None and mask is not None:
                mask[b] = key_mask[b, _places(low, near).clamp(max=size - 1)]
        near_k, near_v = fixed.tokens.unbind(2)
        return prepare._prepare_query(
            q, near_k, near_v, queries, scale, counts, None, mask, softcap
        )

    return prepare_query


def _cpu(*args, count=True):
    *asked, tokens, held, out, lse = args
    call = chain.Call(*asked)
    written = torch.zeros(len(call.k), dtype=torch.bool, device="cpu")
    if call.new_k is not None and call.counted is not None:
        at = call.counted.expand(len(call.k))
        written = (at >= 0) & (at < call.k.shape[2])
    prepare_query = _prepare_from(FixedPart(tokens, held), written)
    chain._cpu(*asked, out, lse, count=count, prepare_query=prepare_query)


# --- CUDA ------------------------------------------------------------------------------------


class _OverLink:
    """The launchers of what reads keys and values, and the memory between their kernels, which
    must not be given to another before the last has been launched: kernels start early."""

    def __init__(self, fixed: FixedPart):
        self.fixed = fixed
        self.lengths = self.mask = self.near = None

    def prepare_query(
        self,
        q,
        k,
        v,
        queries,
        scale,
        lengths,
        start,
        key_mask,
        softcap,
        projected,
        fixed_out,
        fixed_lse,
        *,
        encoder,
        codes,
        new,
        recent,
        **more,
    ):
        """`stage`, then `prepare` on the fixed part, as `launch_prepare_query` in the chain."""
        new = tuple(x if x is None or x.stride(3) == 1 else x.contiguous() for x in new)
        batch = k.shape[0]
        self.lengths = q.new_empty(batch, dtype=torch.int32)
        if key_mask is not None:
            self.mask = q.new_empty((batch, FIXED), dtype=torch.bool)
        self._stage(q, k, v, new, recent, encoder, codes, lengths, start, key_mask)
        near_k, near_v = self.fixed.tokens.unbind(2)
        prepare.launch_prepare_query(
            *(q, near_k, near_v, queries, scale, self.lengths, None, self.mask),
            *(softcap, projected, fixed_out, fixed_lse),
            new=new,
            **more,
        )

    def _stage(self, q, k, v, new, recent, encoder, codes, lengths, start, key_mask):
        batch, heads, size, width = k.shape
        fine, coarse, odd, _ = codes
        wide = width * k.element_size() > 512
        views = cache_of(k, v), token_of(*new), self.fixed.tokens
        cache, token, fixed = chosen_between(q.device, *views)
        launch_kernel(
            kernels.stage,
            grid=(1 + prepare.ENCODERS, heads, batch),
            q=query_of(q),
            cache=cache,
            rows=rows_of(size, lengths, start, mask_bytes(key_mask)),
            token=token,
            recent=recent,
            fixed=fixed,
            held=self.fixed.held,
            fixed_lengths=self.lengths,
            fixed_mask=mask_bytes(self.mask),
            encoder=encoder,
            codes=Codes(*codes),
            chunks=odd.shape[2],
            RING=1 if recent is None else recent.shape[2],
            SHAPE=shape_of(q, k, rows=triton.next_power_of_2(q.shape[1] // heads)),
            TILE=16 if wide else 32,
            SLOTS=triton.next_power_of_2(FIXED),
            CODE=Code.of(fine, coarse),
            CODERS=prepare.ENCODERS,
            STEPS=steps_of(lengths, start),
            PRECISION=card(q.device).precision,
            num_warps=4,
        )

    def attend_picks(self, q, k, v, projected, fine, coarse, picks, *rest, **more):
        """`fetch`, then `attend` on what it brought, as `launch_attend_picks` in the chain. `fetch`
        has waited for all before it when `attend` starts, as `pick` has in front of it."""
        batch, heads, size, width = k.shape
        capacity = picks.shape[2]
        self.near = k.new_empty((batch, heads, 2, capacity, width))
        pdl, dependent = early(q.device)
        launch_kernel(
            kernels.fetch,
            grid=(cdiv(capacity, FETCHED), heads, batch),
            cache=cache_of(k, v),
            picks=picks,
            near=self.near,
            S=size,
            capacity=capacity,
            D=width,
            DP=padded_width(width),
            TILE=FETCHED,
            PDL=pdl,
            num_warps=4,
            **dependent,
        )
        near_k, near_v = self.near.unbind(2)
        attend.launch_attend_picks(
            *(q, near_k, near_v, projected, fine, coarse, picks, *rest), **more, fetched=True
        )


def launch_sketch_host_decode(*args, plan=None, count=True):
    """Run the kernels: arguments and outputs as those of the op, on a GPU or in Triton's
    interpreter."""
    *asked, tokens, held, out, lse = args
    link = _OverLink(FixedPart(tokens, held))
    chain.launch_sketch_decode(
        *(*asked, out, lse),
        plan=plan,
        count=count,
        prepare_query=link.prepare_query,
        attend_picks=link.attend_picks,
    )


SCHEMA = chain.SCHEMA.replace(
    "Tensor? sinks)", "Tensor? sinks, Tensor(j!) tokens, Tensor(k!) held)"
)

_sketch_host_decode = define_op(
    NAME + SCHEMA.format(lengths="Tensor(h!)?"),
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_sketch_host_decode,
)

_sketch_host_decode_uncounted = define_op(
    f"{NAME}_uncounted" + SCHEMA.format(lengths="Tensor?"),
    allocate=_allocate,
    cpu=functools.partial(_cpu, count=False),
    cuda=functools.partial(launch_sketch_host_decode, count=False),
)
