"""Where vLLM keeps the keys and values of a layer: views of its cache, and copies of a row's."""

import torch

Pages = tuple[torch.Tensor, torch.Tensor]


def pages(kv_cache: torch.Tensor, *, heads_first: bool) -> Pages:
    """Keys and values of a layer's cache as strided views `[pages, Hkv, page, D]`.

    kv_cache: `[2, pages, Hkv, page, D]` where `heads_first` (vLLM's CPU backend), otherwise
    `[2, pages, page, Hkv, D]` (FlashAttention's, in whatever order it lies in memory).
    """
    k, v = kv_cache.unbind(0)
    return (k, v) if heads_first else (k.transpose(1, 2), v.transpose(1, 2))


def contiguous_row(pages: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    """A copy `[1, Hkv, length, D]` of one row's keys or values, from `pages [pages, Hkv, page, D]`
    through its block table `row`, int32 `[blocks]`."""
    # Heads outside of pages: one copy brings a head's tokens into order.
    taken = pages.transpose(0, 1).index_select(1, row[: -(-length // pages.shape[2])])
    return taken.flatten(1, 2)[None, :, :length]
