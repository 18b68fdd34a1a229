"""The noise of a sampled call, in the order in which torch.multinomial would draw it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

KEPT = 16  # draws that are at hand; others are drawn again


@dataclass
class Noise:
    """The `e` of `argmax(p / e)` for the tokens at each place of the rows of a sampled call, as one
    draw for all rows gives them, place by place from the first on. `states` are the random states
    before these draws, from which a draw can be had again: rows come to a place at different
    times."""

    call: Any
    states: dict[int, torch.Tensor]
    drawn: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, places: Sequence[int], shares: torch.Tensor) -> torch.Tensor:
        """`e` `[B,V]` for shares of the tokens at a place of each row."""
        if len(set(places)) == 1:
            return self._draw(places[0], shares)
        return torch.stack([self._draw(place, shares)[row] for row, place in enumerate(places)])

    def forget_before(self, place: int) -> None:
        """Forget what no row comes to again: all go on from `place` or behind it."""
        for known in (self.states, self.drawn):
            for old in [each for each in known if each < place]:
                del known[old]

    def _draw(self, place: int, like: torch.Tensor) -> torch.Tensor:
        if place not in self.drawn:
            self.call.set_random(self.states[place])
            self.drawn[place] = torch.empty_like(like).exponential_(1)
            self.states[place + 1] = self.call.random_state()
            for old in list(self.drawn)[:-KEPT]:
                del self.drawn[old]
        return self.drawn[place]
