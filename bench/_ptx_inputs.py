"""What the cases of bench/ptx.py are made of: arguments without memory, numbered and kept."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

GPU = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
FP8 = torch.float8_e4m3fn
MADE: dict[int, int] = {}  # of an op's cases, the arguments' numbers by their storage
KEPT: list[torch.Tensor] = []  # so that no storage gets the address of another
Cases = Iterator[tuple[str, Callable[[], Any]]]
CASES: dict[str, Callable[[Any], Cases]] = {}


def cases(function: Callable[[Any], Cases]) -> Callable[[Any], Cases]:
    """Register a generator of (case, call) of the op whose name it has."""
    CASES[function.__name__] = function
    return function


def new(*shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
    """An argument of an op, which is numbered and kept."""
    made = torch.empty(shape, dtype=dtype, device=GPU)
    MADE[made.untyped_storage()._cdata] = len(MADE)
    KEPT.append(made)
    return made


def attention(batch, heads, kv_heads, queries, size, width, dtype=BF16) -> tuple[torch.Tensor, ...]:
    """q, k, v."""
    rows = (batch, kv_heads, size, width)
    q = new(batch, heads, queries, width, dtype=dtype)
    return q, new(*rows, dtype=dtype), new(*rows, dtype=dtype)


def padding(batch: int, size: int, *, mask: bool = True) -> dict[str, torch.Tensor]:
    """lengths, start and a key mask."""
    made = {"lengths": new(batch, dtype=INT64), "start": new(batch)}
    return {**made, "key_mask": new(batch, size, dtype=torch.bool)} if mask else made


def summaries(k: torch.Tensor, block: int, parts: int = 2, int8: bool = False):
    """bounds and progress of a cache."""
    (batch, heads, _, width), blocks = k.shape, -(-k.shape[2] // block)
    frame = 4 * (2 * width + blocks * (3 - parts))  # bytes
    rows = blocks + -(-frame // (parts * width)) if int8 else blocks
    made = new(batch, heads, rows, parts, width, dtype=torch.int8 if int8 else k.dtype)
    return made, new(batch, 2)
