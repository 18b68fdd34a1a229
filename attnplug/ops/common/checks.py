"""The argument checks that ops of several families make, and the values they accept.

A check raises ArgumentError. Its message names the argument, what came and what is needed. Messages
are built only where a check fails, because the checks run at every eager call.
"""

from typing import Any

import torch

from attnplug.errors import ArgumentError, CardError
from attnplug.ops.common.define import require
from attnplug.ops.common.device import card
from attnplug.ops.common.pages import capacity, check_table

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn  # of pages, where an engine quantizes its cache
HEAD_DIMS = tuple(range(16, 257, 16))
WIDE_HEAD_DIMS = (*HEAD_DIMS, 512)  # of dense, gather and momo
BLOCKS = (16, 32, 64, 128)  # keys a block


def check_attention_inputs(
    name: str,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    *,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    fp8: bool = False,
) -> None:
    """The checks every attention op makes of q `[B,Hq,T,D]` and k, v `[B,Hkv,S,D]`; with a `table`
    of pages, k, v `[pages,Hkv,page,D]`. The op has kernels for `head_dims`, and with `fp8` for keys
    and values that are both float8_e4m3fn.

    An op that has no q or no v passes None for it.
    """
    stored = fp8 and k.dtype == FP8
    check_table(name, table, k if q is None else q, None if q is None else q.shape[0])
    for label, pages in (("k", k), ("v", v)) if table is not None else ():
        copied = pages is not None and pages.stride(-1) != 1  # a cache of many sequences
        require(not copied, name, f"{label} has a stride other than 1 in D, which pages may not")
    first, model = ("k", k) if q is None else ("q", q)  # the others must match this one
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None:
            continue
        if tensor.dim() != 4:
            raise ArgumentError(f"{name}: {label} has {tensor.dim()} dimensions, needs [B,H,S,D]")
        if stored and label != "q":
            if tensor.dtype != FP8:
                raise ArgumentError(f"{name}: {label} is {tensor.dtype} but k is {FP8}")
        elif tensor.dtype not in DTYPES:
            raise ArgumentError(
                f"{name}: {label} is {tensor.dtype}, needs float32, float16 or bfloat16"
            )
        elif tensor.dtype != model.dtype:
            raise ArgumentError(f"{name}: {label} is {tensor.dtype} but {first} is {model.dtype}")
        if tensor.device != model.device:
            raise ArgumentError(
                f"{name}: {label} is on {tensor.device} but {first} is on {model.device}; move "
                "them to one device"
            )
    if v is not None and k.shape != v.shape:
        raise ArgumentError(f"{name}: k {tuple(k.shape)} and v {tuple(v.shape)} differ in shape")
    if q is not None:
        _check_query_shape(name, q, k, table is None)
    if k.shape[3] not in head_dims:
        raise ArgumentError(f"{name}: {why_not_width(k.shape[3], head_dims)}")
    if q is not None and q.shape[1] % k.shape[1] != 0:
        raise ArgumentError(
            f"{name}: {q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads"
        )


def check_card_converts(name: str, label: str, tensor: torch.Tensor) -> None:
    """Raise CardError where `tensor` is float8_e4m3fn on a card that does not convert that."""
    if tensor.dtype == FP8 and tensor.device.type == "cuda" and not card(tensor.device).fp8:
        raise CardError(
            f"{name}: {label} is {FP8}, which this GPU does not convert (NVIDIA's do from compute "
            "capability 8.9 on); keep the cache in 16 bits"
        )


def check_scales(
    name: str, k: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> None:
    """The checks of the scales of float8_e4m3fn keys and values, and that the card converts
    these."""
    check_card_converts(name, "k", k)
    for label, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        require(k.dtype == FP8, name, f"{label} is for {FP8} keys and values, k is {k.dtype}")
        fits = scale.dtype == torch.float32 and tuple(scale.shape) in ((), (1,))
        found = f"{label} is {scale.dtype} {tuple(scale.shape)}"
        require(fits, name, f"{found}, needs one float32 number for all heads")
        require(scale.device == k.device, name, f"{label} is on {scale.device}, k on {k.device}")


def why_not_width(width: int, head_dims: tuple[int, ...] = HEAD_DIMS) -> str:
    """Why a head dimension is not served by what serves `head_dims`, "" where it is."""
    if width in head_dims:
        return ""
    if head_dims == WIDE_HEAD_DIMS:
        return f"head dimension {width} is neither a multiple of 16 from 16 to 256 nor 512"
    return f"head dimension {width} is not a multiple of 16 from 16 to 256"


def _check_query_shape(name: str, q: torch.Tensor, k: torch.Tensor, rows: bool) -> None:
    if rows and q.shape[0] != k.shape[0]:
        raise ArgumentError(f"{name}: q has batch {q.shape[0]} but k has batch {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"{name}: q has head dimension {q.shape[3]} but k has {k.shape[3]}")


def check_sequence_inputs(
    name: str,
    q: torch.Tensor | None,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    table: torch.Tensor | None = None,
) -> None:
    """The checks of the per-sequence tensors: `lengths` and `start`, [1] or [B], and `key_mask`
    [B,S] bool. An op that has no q passes None for it."""
    first, model = ("k", k) if q is None else ("q", q)
    shape = model.shape[0], capacity(k, table)
    _check_rows(name, first, model.device, shape, "S", lengths, start, key_mask)


def check_shared_cache_inputs(
    name: str,
    label: str,
    cache: torch.Tensor,
    lengths: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> None:
    """`check_sequence_inputs` of a cache `[B,T,...]` that all heads share, the argument `label`."""
    _check_rows(name, label, cache.device, tuple(cache.shape[:2]), "T", lengths, None, key_mask)


def _check_rows(name, first, device, shape, size_name, lengths, start, key_mask):
    """The checks for rows of a cache of `shape`, on the device of the argument `first`."""
    rows, size = shape
    for label, tensor in (("lengths", lengths), ("start", start)):
        if tensor is None:
            continue
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"{name}: {label} is {tensor.dtype}, needs int32 or int64")
        if tensor.dim() != 1 or tensor.shape[0] not in (1, rows):
            raise ArgumentError(
                f"{name}: {label} has shape {tuple(tensor.shape)}, needs [1] or [B] = [{rows}]"
            )
        if tensor.device != device:
            raise ArgumentError(f"{name}: {label} is on {tensor.device}, {first} on {device}")
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ArgumentError(f"{name}: key_mask is {key_mask.dtype}, needs bool")
    if tuple(key_mask.shape) != (rows, size):
        raise ArgumentError(
            f"{name}: key_mask has shape {tuple(key_mask.shape)}, needs [B,{size_name}] = "
            f"[{rows}, {size}]"
        )
    if key_mask.device != device:
        raise ArgumentError(f"{name}: key_mask is on {key_mask.device}, {first} on {device}")


def check_tensor(
    name: str,
    label: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """The check of a tensor that has one dtype and shape, and is contiguous."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ArgumentError(
            f"{name}: {label} is {tensor.dtype} {tuple(tensor.shape)}, needs {dtype} {list(shape)}"
        )
    require(tensor.device == device, name, f"{label} is on {tensor.device}, needs {device}")
    require(tensor.is_contiguous(), name, f"{label} is not contiguous")


def check_token(name: str, call: Any) -> None:
    """The checks of a step's token `new_k, new_v [B,Hkv,1,D]`, or None, which is to be written to
    the cache `k, v [B,Hkv,S,D]` of q's dtype."""
    q, k = call.q, call.k
    wanted = (*k.shape[:2], 1, k.shape[3]), q.dtype, q.device
    for label, cache, new in (("k", k, call.new_k), ("v", call.v, call.new_v)):
        if new is not None and (tuple(new.shape), new.dtype, new.device) != wanted:
            raise ArgumentError(
                f"{name}: new_{label} is {new.dtype} {tuple(new.shape)} on {new.device}, needs "
                f"{q.dtype} [B,Hkv,1,D] = {list(wanted[0])} on {q.device}"
            )
        require(cache.stride(3) == 1, name, f"{label} has a stride of {cache.stride(3)} in D")


def check_sinks(name: str, q: torch.Tensor, sinks: torch.Tensor) -> None:
    """The checks of `sinks` `[Hq]`, one more logit a head."""
    require(
        tuple(sinks.shape) == (q.shape[1],),
        name,
        f"sinks has shape {tuple(sinks.shape)}, needs [Hq] = [{q.shape[1]}]",
    )
    require(sinks.is_floating_point(), name, f"sinks is {sinks.dtype}, needs a float dtype")
    require(sinks.device == q.device, name, f"sinks is on {sinks.device}, q on {q.device}")
