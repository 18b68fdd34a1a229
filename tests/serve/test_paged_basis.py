"""Where a batch's tokens are in their sequences, and which heads of a model's basis a rank has."""

import pytest
import torch

from attnplug.calibration.basis_file import Bases
from attnplug.ops.sketch.model_basis import BAND, ModelBasis
from attnplug.ops.sketch.pages import turns_of
from attnplug.serve.paged.basis import Place, Positions, basis_of_rank


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_are_those_of_the_last_tokens_of_each_row(dtype):
    """Steps, a first chunk, a later one, a row without queries, and rows that pad the batch."""
    starts = torch.tensor([0, 1, 2, 7, 7, 10, 11], dtype=dtype)
    lengths = torch.tensor([5000, 1, 5, 80, 100, 0], dtype=dtype)
    kept = Positions(64, torch.device("cpu"))
    found = kept.of(starts, lengths, 10)
    assert found[:10].tolist() == [4999, 0, 0, 1, 2, 3, 4, 97, 98, 99]
    again = kept.of(torch.tensor([0, 1]), torch.tensor([7]), 1)
    assert again.data_ptr() == found.data_ptr() and again[0] == 6  # CUDA graphs read it there


@pytest.mark.parametrize(
    "heads, ranks, rank, mine",
    [(8, 1, 0, range(8)), (8, 4, 3, (6, 7)), (2, 4, 1, (0,)), (2, 4, 2, (1,)), (1, 8, 7, (0,))],
)
def test_a_rank_has_its_heads(heads, ranks, rank, mine):
    numbers = torch.arange(heads).float()[:, None, None]
    whole = ModelBasis(numbers.expand(-1, 65, 64), numbers.expand(-1, 64, 65))
    bases = Bases("", "", 0.9 ** torch.arange(32), {3: whole})
    place = Place(rank, ranks, max(1, heads // ranks), torch.device("cpu"))
    found = basis_of_rank(bases, 3, place, 5000)
    for part in found[:2]:
        assert part[:, 0, 0].tolist() == list(mine) and part.is_contiguous()
    assert torch.equal(found.turns, turns_of(bases.inv_freq, 5000 + BAND))
    with pytest.raises(KeyError):
        basis_of_rank(bases, 4, place, 5000)
