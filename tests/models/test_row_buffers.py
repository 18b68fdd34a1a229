"""The side buffers that a layer declares follow its rows, are emptied by reset, and are marked for
CUDA graphs."""

from typing import ClassVar, NamedTuple

import pytest
import torch

from attnplug.models.cache import PlugLayer, RowBuffers

ROWS = 3


class Pair(NamedTuple):
    """Two tensors of one buffer."""

    big: torch.Tensor
    small: torch.Tensor


class Layer(PlugLayer):
    """A layer with a buffer of each kind."""

    row_buffers: ClassVar[RowBuffers] = {"marks": -1, "pair": None, "absent": 0}
    absent: torch.Tensor | None = None
    marks: torch.Tensor
    pair: Pair

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        row = torch.arange(ROWS)
        self.bind_rows(marks=row.clone(), pair=Pair(row[:, None] * torch.ones(1, 4), row.clone()))


@pytest.fixture
def layer() -> Layer:
    made = Layer(max_cache_len=8)
    rows = torch.arange(float(ROWS)).view(ROWS, 1, 1, 1).expand(ROWS, 2, 5, 4)
    made.update(rows, rows)
    return made


def rows_of(layer: Layer) -> list[int]:
    """The row that every buffer says it is, the same in all."""
    assert layer.keys is not None and layer.values is not None
    told = [layer.keys[:, 0, 0, 0], layer.values[:, 1, 4, 3], layer.marks]
    told += [layer.pair.big[:, 2], layer.pair.small]
    found = [[int(number) for number in one] for one in told]
    assert all(one == found[0] for one in found), found
    return found[0]


def tensors(layer: Layer) -> list[torch.Tensor]:
    return [layer.marks, *layer.pair]


def test_reordering_moves_them_in_place(layer):
    places = [tensor.data_ptr() for tensor in tensors(layer)]
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert rows_of(layer) == [2, 2, 0]
    assert [tensor.data_ptr() for tensor in tensors(layer)] == places


def test_repeating_and_selecting_move_them(layer):
    layer.batch_repeat_interleave(2)
    assert rows_of(layer) == [0, 0, 1, 1, 2, 2]
    layer.batch_select_indices(torch.tensor([5, 0]))
    assert rows_of(layer) == [2, 0]
    assert isinstance(layer.pair, Pair)


def test_reset_empties_those_that_say_so(layer):
    layer.reset()
    assert layer.marks.tolist() == [-1] * ROWS
    assert layer.pair.small.tolist() == list(range(ROWS))


def test_addresses_are_marked_as_fixed(layer):
    """As those of keys: Dynamo then copies no buffer into a graph's own memory."""
    layer.batch_select_indices(torch.tensor([1]))
    for tensor in (layer.keys, *tensors(layer)):
        assert tensor._dynamo_static_input_type == "unguarded"


def test_a_layer_without_tokens_has_nothing_to_move():
    empty = Layer(max_cache_len=8)
    empty.reorder_cache(torch.tensor([0]))
    empty.batch_repeat_interleave(2)
    empty.batch_select_indices(torch.tensor([0]))
    empty.reset()
    assert not empty.is_initialized
