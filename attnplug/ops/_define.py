"""How an op of attnplug reaches torch: `define_op` registers schema, fake, CPU and CUDA
implementations with one call, and the argument checks that several ops share stand beside it.

`Library.define` + `impl` costs 2 us a call where `torch.library.custom_op` costs 9 (and
`triton_op` ignores its CPU kernel under compile), which is why the ops are registered this way.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from attnplug.errors import ArgumentError, GradientError

# Kept alive for the life of the process: torch forgets the ops when the Library is collected.
LIBRARY = torch.library.Library("attnplug", "DEF")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 80, 96, 128, 256)


def define_op(
    schema: str,
    *,
    allocate: Callable[..., Any],
    cpu: Callable[..., None],
    cuda: Callable[..., None],
) -> torch._ops.OpOverload:
    """Register one op and return its overload.

    `schema` is a torch schema without default values (the dispatcher drops trailing arguments that
    equal their default). `allocate(*args)` checks the arguments and returns the empty outputs, a
    tensor, a tuple of tensors, or None for an op that only mutates; traced, it is the fake, and it
    is the first step of every real call. `cpu(*args, *outputs)` and `cuda(*args, *outputs)` fill
    the outputs.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, _run(allocate, cpu), "CPU")
    LIBRARY.impl(name, _run_on_device(allocate, cuda), "CUDA")
    torch.library.register_fake(f"attnplug::{name}", allocate, lib=LIBRARY)
    return getattr(torch.ops.attnplug, name).default


def _outputs(allocated: Any) -> tuple[torch.Tensor, ...]:
    if allocated is None:
        return ()
    return (allocated,) if isinstance(allocated, torch.Tensor) else tuple(allocated)


def _run(allocate: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        allocated = allocate(*args)
        fill(*args, *_outputs(allocated))
        return allocated

    return run


def _run_on_device(allocate: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    run = _run(allocate, fill)

    def run_on_device(*args: Any) -> Any:
        # Triton launches on the current device, which need not be the tensors' one.
        with torch.cuda.device(args[0].device):
            return run(*args)

    return run_on_device


def refuse_gradients(name: str, *tensors: torch.Tensor | None) -> None:
    """Raise GradientError where autograd would record the call: the ops have no backward."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise GradientError(
            f"{name}: an input requires grad, and attnplug's ops are inference only. Call the "
            "model under torch.no_grad() or torch.inference_mode()."
        )


def require(condition: bool, name: str, message: str) -> None:
    """Raise ArgumentError `name: message` unless the condition holds."""
    if not condition:
        raise ArgumentError(f"{name}: {message}")


def check_attention_inputs(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The checks every attention op makes of q `[B,Hq,T,D]` and k, v `[B,Hkv,S,D]`.

    Messages are built only where a check fails: this runs at every eager call.
    """
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ArgumentError(f"{name}: {label} has {tensor.dim()} dimensions, needs [B,H,S,D]")
        if tensor.dtype not in DTYPES:
            raise ArgumentError(
                f"{name}: {label} is {tensor.dtype}, needs float32, float16 or bfloat16"
            )
        if tensor.dtype != q.dtype:
            raise ArgumentError(f"{name}: {label} is {tensor.dtype} but q is {q.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(
                f"{name}: {label} is on {tensor.device} but q is on {q.device}; move them to one "
                "device"
            )
    if k.shape != v.shape:
        raise ArgumentError(f"{name}: k {tuple(k.shape)} and v {tuple(v.shape)} differ in shape")
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(f"{name}: q has batch {q.shape[0]} but k has batch {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"{name}: q has head dimension {q.shape[3]} but k has {k.shape[3]}")
    if q.shape[3] not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise ArgumentError(f"{name}: head dimension {q.shape[3]} is not one of {sizes}")
    if q.shape[1] % k.shape[1] != 0:
        raise ArgumentError(
            f"{name}: {q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads"
        )


def check_sequence_inputs(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> None:
    """The checks of the per-sequence tensors: `lengths` and `start`, [1] or [B], and `key_mask`
    [B,S] bool."""
    for label, tensor in (("lengths", lengths), ("start", start)):
        if tensor is None:
            continue
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"{name}: {label} is {tensor.dtype}, needs int32 or int64")
        if tensor.dim() != 1 or tensor.shape[0] not in (1, q.shape[0]):
            raise ArgumentError(
                f"{name}: {label} has shape {tuple(tensor.shape)}, needs [1] or [B] = "
                f"[{q.shape[0]}]"
            )
        if tensor.device != q.device:
            raise ArgumentError(f"{name}: {label} is on {tensor.device}, q on {q.device}")
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ArgumentError(f"{name}: key_mask is {key_mask.dtype}, needs bool")
    if tuple(key_mask.shape) != (k.shape[0], k.shape[2]):
        raise ArgumentError(
            f"{name}: key_mask has shape {tuple(key_mask.shape)}, needs [B,S] = "
            f"[{k.shape[0]}, {k.shape[2]}]"
        )
    if key_mask.device != q.device:
        raise ArgumentError(f"{name}: key_mask is on {key_mask.device}, q on {q.device}")


def row_step(tensor: torch.Tensor | None) -> int:
    """What a row adds to the address of its entry in `[1 or B, ...]`: 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def rows_on_cpu(
    k: torch.Tensor, lengths: torch.Tensor | None, start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths, start) as int64 `[B]`, both within the buffer."""
    batch, size = k.shape[0], k.shape[2]
    lengths = torch.tensor([size]) if lengths is None else lengths.to(torch.int64)
    start = torch.tensor([0]) if start is None else start.to(torch.int64)
    lengths, start = lengths.clamp(max=size), start.clamp(min=0)
    return lengths.expand(batch).contiguous(), start.expand(batch).contiguous()


def sinks_on_cpu(sinks: torch.Tensor | None) -> np.ndarray:
    """The sinks as float32, none as no element; contiguous, as numba compiles every layout."""
    if sinks is None:
        return np.empty(0, np.float32)
    return sinks.float().contiguous().numpy()


def mask_bytes(key_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The key mask as bytes, its rows contiguous."""
    if key_mask is None:
        return None
    return (key_mask if key_mask.stride(1) == 1 else key_mask.contiguous()).view(torch.uint8)
