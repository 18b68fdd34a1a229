"""How an op of attnplug reaches torch: `define_op` registers schema, fake, CPU and CUDA
implementations with one call, and the argument checks that several ops share stand beside it.

`Library.define` + `impl` costs 2 us a call where `torch.library.custom_op` costs 9 (and
`triton_op` ignores its CPU kernel under compile), which is why the ops are registered this way.
"""

from collections.abc import Callable
from typing import Any

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
    """The checks every attention op makes of q `[B,Hq,T,D]` and k, v `[B,Hkv,S,D]`."""
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        require(tensor.dim() == 4, name, f"{label} has {tensor.dim()} dimensions, needs [B,H,S,D]")
        require(
            tensor.dtype in DTYPES,
            name,
            f"{label} is {tensor.dtype}, needs float32, float16 or bfloat16",
        )
        require(tensor.dtype == q.dtype, name, f"{label} is {tensor.dtype} but q is {q.dtype}")
        require(
            tensor.device == q.device,
            name,
            f"{label} is on {tensor.device} but q is on {q.device}; move them to one device",
        )
    require(k.shape == v.shape, name, f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in shape")
    require(
        q.shape[0] == k.shape[0], name, f"q has batch {q.shape[0]} but k has batch {k.shape[0]}"
    )
    require(
        q.shape[3] == k.shape[3],
        name,
        f"q has head dimension {q.shape[3]} but k has {k.shape[3]}",
    )
    require(
        q.shape[3] in HEAD_DIMS,
        name,
        f"head dimension {q.shape[3]} is not one of {', '.join(map(str, HEAD_DIMS))}",
    )
    require(
        q.shape[1] % k.shape[1] == 0,
        name,
        f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads",
    )


def check_sequence_inputs(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> None:
    """The checks of the per-sequence tensors: `lengths` [1] or [B], `start` [B], `key_mask`
    [B,S] bool."""
    for label, tensor in (("lengths", lengths), ("start", start)):
        if tensor is None:
            continue
        require(
            tensor.dtype in (torch.int32, torch.int64),
            name,
            f"{label} is {tensor.dtype}, needs int32 or int64",
        )
        require(
            tensor.dim() == 1 and tensor.shape[0] in (1, q.shape[0]),
            name,
            f"{label} has shape {tuple(tensor.shape)}, needs [1] or [B] = [{q.shape[0]}]",
        )
        require(tensor.device == q.device, name, f"{label} is on {tensor.device}, q on {q.device}")
    if key_mask is not None:
        require(key_mask.dtype == torch.bool, name, f"key_mask is {key_mask.dtype}, needs bool")
        require(
            tuple(key_mask.shape) == (k.shape[0], k.shape[2]),
            name,
            f"key_mask has shape {tuple(key_mask.shape)}, needs [B,S] = "
            f"[{k.shape[0]}, {k.shape[2]}]",
        )
        require(
            key_mask.device == q.device, name, f"key_mask is on {key_mask.device}, q on {q.device}"
        )
