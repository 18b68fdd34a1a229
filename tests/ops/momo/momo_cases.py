"""What the tests of momo's ops define alike: random attention inputs, the dtypes of a path, and the
call of an op on a path."""

from collections.abc import Callable
from typing import Any

import torch


def attention_inputs(
    batch, heads, kv_heads, queries, keys, dim, dtype=torch.float32, seed=0
) -> list[torch.Tensor]:
    """q `[B,Hq,T,D]`, k and v `[B,Hkv,S,D]`, standard normal, rounded to `dtype`."""
    gen = torch.Generator().manual_seed(seed)
    kv = (batch, kv_heads, keys, dim)
    shapes = ((batch, heads, queries, dim), kv, kv)
    return [torch.randn(shape, generator=gen).to(dtype) for shape in shapes]


def dtypes(device_path: tuple[str, str]) -> tuple[torch.dtype, ...]:
    """The dtypes that a path computes in: Triton's interpreter cannot multiply bfloat16."""
    exact = (torch.float32, torch.float16)
    return exact if device_path == ("cpu", "kernel") else (*exact, torch.bfloat16)


def call_op(
    device_path: tuple[str, str],
    op: Callable[..., Any],
    allocate: Callable[..., Any],
    launch: Callable[..., None],
    tensors: tuple[torch.Tensor | None, ...],
    options: dict[str, Any],
) -> Any:
    """The op's outputs, on the CPU: of the public op, or on ("cpu", "kernel") of its launcher with
    the kernel interpreted. `options` are in the order of the op's schema."""
    device, path = device_path
    tensors = tuple(None if x is None else x.to(device) for x in tensors)
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    if (device, path) == ("cpu", "kernel"):
        args = (*tensors, *options.values())
        outputs = allocate(*args)
        launch(*args, *(outputs if isinstance(outputs, tuple) else (outputs,)))
    else:
        outputs = op(*tensors, **options)
    return [x.cpu() for x in outputs] if isinstance(outputs, tuple) else outputs.cpu()
