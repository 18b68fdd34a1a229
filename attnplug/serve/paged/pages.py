"""Views of an engine's pages, and copies of a row's keys or values."""

from typing import NamedTuple

import torch

from attnplug.ops.common.checks import FP8


class Pages(NamedTuple):
    """Keys and values, each `[pages, Hkv, page, D]`. In fp8 they are to be multiplied by `k_scale`
    and `v_scale`, float32 numbers `[]` on the device, None for 1."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def fp8(self) -> bool:
        """Whether keys and values are float8_e4m3fn."""
        return self.k.dtype == FP8

    def in_fp8(self, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> "Pages":
        """The same bytes as float8_e4m3fn, with these scales of one number each."""
        scales = (None if x is None else x.reshape(()) for x in (k_scale, v_scale))
        return Pages(self.k.view(FP8), self.v.view(FP8), *scales)


def contiguous_row(
    pages: torch.Tensor, row: torch.Tensor, length: int, dtype: torch.dtype
) -> torch.Tensor:
    """A copy `[1, Hkv, length, D]`, in this dtype, of one row's keys or values, from `pages [pages,
    Hkv, page, D]` through its block table `row`, int32 `[blocks]`."""
    # Heads outside of pages: one copy brings a head's tokens into order. torch copies fp8 as bytes.
    stored = pages.view(torch.uint8) if pages.dtype == FP8 else pages
    taken = stored.transpose(0, 1).index_select(1, row[: -(-length // pages.shape[2])])
    return taken.flatten(1, 2)[None, :, :length].view(pages.dtype).to(dtype)
