"""Views of an engine's pages, and copies of a row's keys or values."""

import torch

Pages = tuple[torch.Tensor, torch.Tensor]  # keys and values, each [pages, Hkv, page, D]


def contiguous_row(pages: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    """A copy `[1, Hkv, length, D]` of one row's keys or values, from `pages [pages, Hkv, page, D]`
    through its block table `row`, int32 `[blocks]`."""
    # Heads outside of pages: one copy brings a head's tokens into order.
    taken = pages.transpose(0, 1).index_select(1, row[: -(-length // pages.shape[2])])
    return taken.flatten(1, 2)[None, :, :length]
