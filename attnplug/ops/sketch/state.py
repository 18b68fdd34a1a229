"""What `sketch` keeps beside a KV cache: the codes of its tokens, and the basis that they are in.
`basis.fit_basis` makes it.
"""

from typing import NamedTuple

import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.define import require

BLOCK, CHUNK = 128, 32
COORDINATES = {16: (16, 32), 24: (32, 32), 32: (32, 64)}  # bytes: of 4 bits, of 2 bits


class Codes(NamedTuple):
    """The codes of a cache and what they cover; contiguous, of a fixed shape."""

    fine: torch.Tensor  # uint8 [B, Hkv, S, r4 / 2]: coordinates i and r4 / 2 + i in byte i
    coarse: torch.Tensor  # uint8 [B, Hkv, S, r2 / 4]: coordinate (r2 / 4) j + i at bit 2 j, byte i
    odd: torch.Tensor  # uint8 [B, Hkv, ceil(S / 32)]: a key or value of 32 tokens is not finite
    progress: torch.Tensor  # int32 [B, 2]: leading blocks that are done, the start they count from


class Basis(NamedTuple):
    """What makes codes of keys and scores of codes, float32, contiguous."""

    encoder: torch.Tensor  # [B, Hkv, D + 1, r]: (k, 1) @ encoder is x in steps of its code
    queries: torch.Tensor  # [B, Hkv, D, 2 r + 2 + D]: what `prepare_query` makes of a query
    v_mean: torch.Tensor  # [B, Hkv, D]


def coordinates(name: str, size: int, width: int) -> tuple[int, int]:
    """(coordinates of 4 bits, of 2 bits) of codes of `size` bytes, for a head dimension."""
    if size not in COORDINATES:
        raise ArgumentError(f"{name}: bytes is {size}, needs {', '.join(map(str, COORDINATES))}")
    fine, coarse = COORDINATES[size]
    require(
        fine + coarse <= width,
        name,
        f"bytes is {size}, {fine + coarse} coordinates, more than the head dimension {width}",
    )
    return fine, coarse


def empty_codes(k: torch.Tensor, size: int) -> Codes:
    """Codes of `size` bytes a token for a fresh cache `k [B, Hkv, S, D]`: none is done."""
    batch, heads, tokens, width = k.shape
    fine, coarse = coordinates("empty_codes", size, width)
    return Codes(
        k.new_zeros((batch, heads, tokens, fine // 2), dtype=torch.uint8),
        k.new_zeros((batch, heads, tokens, coarse // 4), dtype=torch.uint8),
        k.new_zeros((batch, heads, -(-tokens // CHUNK)), dtype=torch.uint8),
        k.new_zeros((batch, 2), dtype=torch.int32),
    )


def empty_basis(k: torch.Tensor, size: int) -> Basis:
    """A basis of zeros for codes of `size` bytes a token of a cache `k [B, Hkv, S, D]`."""
    rows, width = k.shape[:2], k.shape[3]
    rank = sum(coordinates("empty_basis", size, width))
    shapes = (width + 1, rank), (width, 2 * rank + 2 + width), (width,)
    return Basis(*(k.new_zeros((*rows, *shape), dtype=torch.float32) for shape in shapes))
