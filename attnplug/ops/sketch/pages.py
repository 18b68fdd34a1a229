"""What `sketch` keeps beside the pages of a paged cache, by physical page: the codes of its tokens
in the basis of the model (`model_basis`), so that sequences which share a page share its codes.

A code depends on a token's key and position alone. Pages that sequences share hold the same
positions, and a slot that is written again is coded again, so there is no count of what is done.
Whoever copies a page's keys copies its codes along, or has the copies' slots coded.
"""

from typing import NamedTuple

import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_tensor
from attnplug.ops.common.define import require
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.sketch.model_basis import BAND, back_to_start
from attnplug.ops.sketch.state import COORDINATES, coordinates


class PageSketch(NamedTuple):
    """The codes of all slots of a paged cache, contiguous."""

    fine: torch.Tensor  # uint8 [pages, Hkv, page, r4 / 2], as in `state.Codes`
    coarse: torch.Tensor  # uint8 [pages, Hkv, page, r2 / 4]
    odd: torch.Tensor  # uint8 [pages, Hkv, page]: the key or value is not finite


class LayerBasis(NamedTuple):
    """A layer's basis of the model (`model_basis.ModelBasis`), of the KV heads that are here, and
    how far back each band turns."""

    encoder: torch.Tensor  # float32 [Hkv, D + 1, r]
    scorer: torch.Tensor  # float32 [Hkv, D, r + 1]
    turns: torch.Tensor  # float32 [bands, 2, P]


class SketchedPages(NamedTuple):
    """What a layer's pages have beside keys and values: codes, and the basis that they are in."""

    codes: PageSketch
    basis: LayerBasis | None  # None where only the codes' size is asked for


def empty_page_sketch(k: torch.Tensor, size: int) -> PageSketch:
    """Codes of `size` bytes a token of fresh pages `k [pages, Hkv, page, D]`, zeros."""
    fine, coarse = coordinates("empty_page_sketch", size, k.shape[3])
    shapes = (*k.shape[:3], fine // 2), (*k.shape[:3], coarse // 4), k.shape[:3]
    return PageSketch(*(torch.zeros(s, dtype=torch.uint8, device=k.device) for s in shapes))


def turns_of(inv_freq: torch.Tensor, tokens: int) -> torch.Tensor:
    """float32 `[bands, 2, P]`: cosines and sines of how far back the keys of each band turn, for
    sequences of up to `tokens` tokens."""
    angles = back_to_start(inv_freq, max(1, cdiv(tokens, BAND)))
    return torch.stack((angles.cos(), angles.sin()), 1).float().contiguous()


def check_pages(name: str, k: torch.Tensor, fine, coarse, odd) -> None:
    """The checks of the codes of pages `k [pages, Hkv, page, D]`."""
    pairs = [(a // 2, b // 4) for a, b in COORDINATES.values() if a + b <= k.shape[3]]
    found = (fine.shape[-1], coarse.shape[-1])
    if found not in pairs:
        raise ArgumentError(
            f"{name}: fine and coarse have {found} bytes a token, need one of {pairs} for head "
            f"dimension {k.shape[3]}"
        )
    _check_shapes(name, k.shape[:3], k.device, fine, coarse, odd)


def check_codes_of(name: str, rank: int, fine, coarse, odd) -> None:
    """The checks of codes of `rank` coordinates, of pages that an op does not read."""
    found = 2 * fine.shape[-1], 4 * coarse.shape[-1]
    if found not in COORDINATES.values() or sum(found) != rank:
        raise ArgumentError(
            f"{name}: fine and coarse have {found} coordinates of 4 and 2 bits a token, the query "
            f"has weights of {rank}"
        )
    _check_shapes(name, odd.shape, odd.device, fine, coarse, odd)


def _check_shapes(name, slots, device, fine, coarse, odd):
    for label, tensor, more in (
        ("fine", fine, fine.shape[-1:]),
        ("coarse", coarse, coarse.shape[-1:]),
        ("odd", odd, ()),
    ):
        check_tensor(name, label, tensor, torch.uint8, (*slots, *more), device)


def check_turns(name: str, turns: torch.Tensor, k: torch.Tensor) -> None:
    """The checks of `turns_of` for keys `[..., D]`."""
    fits = turns.dim() == 3 and turns.shape[1] == 2 and 2 * turns.shape[2] <= k.shape[3]
    found = f"turns has shape {tuple(turns.shape)}"
    require(fits, name, f"{found}, needs [bands,2,P], 2 P at most {k.shape[3]}")
    check_tensor(name, "turns", turns, torch.float32, tuple(turns.shape), k.device)
