"""A paged cache: pages of keys that sequences share, and the table that says which are whose.

    key n of row b  =  k[table[b, n // page], h, n % page]         k [pages, Hkv, page, D]

A page's number is its place in k, whatever the strides are: an engine's layout with heads first or
with tokens first is a view of this shape. Table entries from a row's length on are never used, and
may hold anything, -1 for instance. For launchers, CPU references and kernels.
"""

from collections.abc import Callable
from typing import Any

import torch

from attnplug.ops.common.define import require
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.triton import tl, triton


def capacity(k: torch.Tensor, table: torch.Tensor | None) -> int:
    """Keys that a row has room for."""
    return k.shape[2] if table is None else table.shape[1] * k.shape[2]


def check_table(
    name: str, table: torch.Tensor | None, model: torch.Tensor, batch: int | None = None
) -> None:
    """The checks of a table, int32 `[B, P]` on the device of `model`; None passes."""
    if table is None:
        return
    fits = table.dim() == 2 and table.dtype == torch.int32 and table.shape[1] > 0
    fits = fits and (batch is None or table.shape[0] == batch)
    rows = "B" if batch is None else f"B = {batch}"
    found = f"table is {table.dtype} {tuple(table.shape)}"
    require(fits, name, f"{found}, needs int32 [{rows}, pages a row]")
    require(table.stride(1) == 1, name, "the rows of table are not contiguous")
    require(table.device == model.device, name, f"table is on {table.device}, q on {model.device}")


def whole_rows(x: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first `tokens` keys of each row, side by side: `[B, Hkv, tokens, D]`, a copy. This is
    what a table means."""
    pages = table[:, : max(1, cdiv(tokens, x.shape[2]))].long()
    inside = (pages >= 0) & (pages < x.shape[0])  # entries past a row's length may be anything
    return x[pages.where(inside, 0)].transpose(1, 2).flatten(2, 3)[:, :, :tokens]


def page_rows(
    k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 (k, v) and a table for a CPU reference, of which it reads the first `tokens` keys of
    each row: a contiguous cache is one page a row. Copies only what is not float32."""
    if table is not None and k.dtype == torch.float32:
        return k, v, table
    if table is None:
        k, v = k[:, :, :tokens], v[:, :, :tokens]
    else:
        k, v = whole_rows(k, table, tokens), whole_rows(v, table, tokens)
    return k.float(), v.float(), torch.arange(len(k), dtype=torch.int32, device="cpu")[:, None]


def block_places(table: torch.Tensor, blocks: int, per_page: int, most: int) -> torch.Tensor:
    """int64 `[B, blocks]`: where the summary of each row's block lies among those of all pages'
    blocks, of which a page has `per_page` and all have `most`. A sink may have more blocks than a
    row has room for; those of them that are none lie anywhere."""
    j = torch.arange(blocks, device=table.device)
    pages = (j // per_page).clamp(max=table.shape[1] - 1)
    places = table.long()[:, pages] * per_page + j % per_page
    return places.clamp(0, most - 1)  # entries past a row's length may be anything


def table_at(place: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(..., table=table)` as a function with the table among its arguments, at `place`: what the
    form of an op with pages registers."""

    def with_table(*args: Any, **options: Any) -> Any:
        return fn(*args[:place], *args[place + 1 :], table=args[place], **options)

    return with_table


@triton.jit
def page_of(row_table, n, seen, PAGE: tl.constexpr):
    """The pages of a row's keys n, int64, 0 where not `seen`; `row_table` is the row's part."""
    return tl.load(row_table + n // PAGE, mask=seen, other=0).to(tl.int64)


@triton.jit
def place_of_block(table, b, table_step, j, inside, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Where the summaries of row b's blocks j lie, int64: j itself without a table."""
    if table is None:
        return j
    else:
        PER_PAGE: tl.constexpr = PAGE // BLOCK
        page = tl.load(table + b * table_step + j // PER_PAGE, mask=inside, other=0)
        return page.to(tl.int64) * PER_PAGE + j % PER_PAGE
