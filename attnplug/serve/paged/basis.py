"""The part of a model's basis that a layer of an engine's process has, and where a batch's tokens
are in their sequences."""

from typing import NamedTuple

import torch

from attnplug.calibration.basis_file import Bases
from attnplug.ops.sketch.model_basis import BAND
from attnplug.ops.sketch.pages import LayerBasis, turns_of


class Place(NamedTuple):
    """Where a process's layers are: its rank among those that share the heads, the KV heads that it
    has of each layer, and the device."""

    rank: int
    ranks: int
    heads: int
    device: torch.device


def basis_of_rank(bases: Bases, layer: int, place: Place, longest: int) -> LayerBasis:
    """The basis of the KV heads that tensor parallelism gives to this rank, for requests of up to
    `longest` tokens. Where there are more ranks than heads, neighbours have the same head. Raises
    KeyError for a layer that has none."""
    whole, device = bases.layers[layer], place.device
    first = place.rank * len(whole.encoder) // place.ranks
    here = slice(first, first + place.heads)
    encoder, scorer = (x[here].to(device).contiguous() for x in whole)
    return LayerBasis(encoder, scorer, turns_of(bases.inv_freq, longest + BAND).to(device))


class Positions:
    """Where the tokens of batches of up to `most` are in their sequences, in one place in memory:
    CUDA graphs read it there."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._kept = torch.zeros(most, dtype=torch.int64, device=device)

    def of(self, starts: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """The positions of a batch's first `count` tokens, and anything for others. Row r has the
        tokens `starts[r]` to `starts[r + 1] - 1`, which are the last of its `lengths[r]`. Nothing
        is read on the host."""
        at = torch.arange(count, dtype=starts.dtype, device=starts.device)
        row = torch.searchsorted(starts[1:].contiguous(), at, right=True)
        row = row.clamp(max=len(lengths) - 1)
        self._kept[:count] = lengths[row] - starts[row + 1] + at
        return self._kept
