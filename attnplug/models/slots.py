"""The slots of a cache's full-attention layers: tokens taken back, and holes closed."""

from collections.abc import Sequence

import torch

from attnplug.models.cache import PlugCache, PlugLayer


def full_layers(cache: PlugCache) -> list[PlugLayer]:
    """Those that are no sliding windows and hold tokens: a layer that never runs counts none, and
    on the host."""
    return [x for x in cache.layers if isinstance(x, PlugLayer) and x.is_initialized]


def take_back(layers: Sequence[PlugLayer], tokens: int | torch.Tensor) -> None:
    """Of layers that hold the same tokens."""
    for kind in {type(layer) for layer in layers}:
        kind.take_back_all([layer for layer in layers if type(layer) is kind], tokens)


def close_holes(
    layers: Sequence[PlugLayer], mask: torch.Tensor, begin: int, end: int, keep: int
) -> None:
    """Move each row's tokens in the slots from `begin` to `end` together: its last `keep` come to
    the slots from `begin` on, behind holes where it has fewer. `mask` is `[B,S]`."""
    real = mask[:, begin:end]
    order = real.to(torch.uint8).sort(dim=-1, stable=True).indices[:, end - begin - keep :]

    def moved(buffer: torch.Tensor) -> torch.Tensor:
        places = order[:, None, :, None].expand(*buffer.shape[:2], keep, buffer.shape[3])
        return buffer[:, :, begin:end].gather(2, places)

    shown = real.gather(1, order)
    mask[:, begin:end] = False
    mask[:, begin : begin + keep] = shown
    take_back(layers, end - begin)  # which leaves all tokens where they are
    for layer in layers:
        layer.update(*map(moved, layer.tensors()[:2]))
