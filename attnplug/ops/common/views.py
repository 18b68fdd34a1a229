"""What kernels and launchers are given, bundled by what it belongs to. Triton takes a NamedTuple of
tensors and numbers as one argument, and as one constant a NamedTuple of constants; the fields of
the latter, as all that a kernel is compiled for, have names in capitals.
"""

import functools
from typing import Any, NamedTuple

import torch

from attnplug.ops.common.device import card
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import next_power_of_two, padded_width
from attnplug.ops.common.triton import tl, triton


class Query(NamedTuple):
    """Queries `[B, Hq, T, D]`, and how far apart those of two rows, heads and tokens lie."""

    at: Any
    b: Any
    h: Any
    t: Any
    T: Any


class Cache(NamedTuple):
    """Keys and values `[B, Hkv, S, D]` and their strides. With a table they are pages, which stand
    where a contiguous cache has rows; v is None for a kernel that reads keys alone. Pages may be
    float8_e4m3fn; `k_scale` and `v_scale` are then what keys and values are to be multiplied by,
    one float32 number each on the device, None for 1."""

    k: Any
    v: Any
    k_b: Any
    k_h: Any
    k_s: Any
    v_b: Any
    v_h: Any
    v_s: Any
    table: Any = None
    table_b: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Rows(NamedTuple):
    """What each row of the batch has of its own; None where all rows are alike."""

    lengths: Any
    start: Any
    key_mask: Any  # bytes
    mask_b: Any
    S: Any  # keys that a row has room for


class RowSteps(NamedTuple):
    """What a row adds to the addresses of its entries in `Rows`, 0 where all share one. With
    QUERIES above 1 a kernel counts the last queries of each row as rows of their own
    (`attnplug.ops.common.rows.row_of`)."""

    LENGTH: int
    START: int
    QUERIES: int = 1


class Token(NamedTuple):
    """A step's key and value `[B, Hkv, 1, D]` that are not in the cache yet."""

    k: Any
    v: Any
    k_b: Any
    k_h: Any
    v_b: Any
    v_h: Any


class Output(NamedTuple):
    """Where attention is stored: in `pieces`, which a kernel merges with the `sinks` into `out` and
    `lse`; without pieces at once (`attnplug.ops.common.splits`)."""

    pieces: Any
    out: Any = None
    lse: Any = None
    sinks: Any = None


class Shape(NamedTuple):
    """What of a call's shapes a kernel is compiled for."""

    GROUP: int  # query heads of a KV head
    ROWS: int  # of a tile of queries
    D: int
    DP: int  # D, padded
    PAGE: int  # keys of a page; 0 without a table


@triton.jit
def begin_of(cache, b, h):
    """Where the keys and the values of row b's KV head h begin; with a table, those of page 0."""
    if cache.table is None:
        k_at = cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h
        v_at = cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h
    else:
        k_at = cache.k + h.to(tl.int64) * cache.k_h
        v_at = cache.v + h.to(tl.int64) * cache.v_h
    return k_at, v_at


def query_of(q: torch.Tensor) -> Query:
    b, h, t = q.stride()[:3]
    return Query(q, b, h, t, q.shape[2])


def cache_of(
    k: torch.Tensor,
    v: torch.Tensor | None,
    table: torch.Tensor | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Cache:
    k_b, k_h, k_s = k.stride()[:3]
    v_b, v_h, v_s = (None, None, None) if v is None else v.stride()[:3]
    table_b = None if table is None else table.stride(0)
    return Cache(k, v, k_b, k_h, k_s, v_b, v_h, v_s, table, table_b, *scales)


def rows_of(
    size: int,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> Rows:
    """Of rows with room for `size` keys; the mask as `mask_bytes` gives it."""
    return Rows(lengths, start, key_mask, None if key_mask is None else key_mask.stride(0), size)


def steps_of(
    lengths: torch.Tensor | None, start: torch.Tensor | None = None, queries: int = 1
) -> RowSteps:
    return RowSteps(row_step(lengths), row_step(start), queries)


def token_of(new_k: torch.Tensor | None, new_v: torch.Tensor | None) -> Token | None:
    if new_k is None or new_v is None:
        return None
    return Token(new_k, new_v, *new_k.stride()[:2], *new_v.stride()[:2])


def chosen_between(device: torch.device, *views: Any) -> tuple[Any, ...]:
    """Tensors and views as a kernel is given them that chooses between their addresses, by
    `tl.where` of tiles of pointers. None stands for what is not there.

    AMD's compiler addresses what it knows to be smaller than 2 GiB by 32-bit offsets, and fails on
    a choice between such addresses and others (Triton 3.8), so it must not know it of any."""
    if not card(device).ranges or sum(x is not None for x in views) < 2:
        return views
    return tuple(map(_of_any_size, views))


def _of_any_size(x: Any) -> Any:
    """A tensor, or each of a view, as its alias of which Triton does not ask the size."""
    if isinstance(x, tuple):
        return type(x)(*map(_of_any_size, x))
    if not isinstance(x, torch.Tensor):
        return x
    alias: Any = x.detach()
    alias.ptr_range = lambda: 1 << 63  # bytes; Triton asks for it before it looks at the memory
    return alias


def shape_of(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor | None = None, rows: int = 0
) -> Shape:
    """`rows`: of a tile of queries; by default the least that a product takes."""
    (_, heads, _, width), (_, kv_heads, page, _) = q.shape, k.shape
    return _shape(heads // kv_heads, rows, width, 0 if table is None else page)


@functools.lru_cache(maxsize=1024)  # of a few shapes; each step of each layer asks
def _shape(group: int, rows: int, width: int, page: int) -> Shape:
    rows = rows or max(16, next_power_of_two(group))
    return Shape(group, rows, width, padded_width(width), page)
