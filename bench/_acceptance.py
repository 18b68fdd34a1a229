"""Drafts of exact whose acceptance a bench imposes, as random weights say nothing of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attnplug.models import pace, round_steps
from attnplug.models.decode_loop import Decoding


@contextmanager
def accepting(share: int | float, over_filled_caches: bool = False) -> Iterator[None]:
    """Within it every round accepts `share` drafts of each row, or each draft behind accepted ones
    with the chance `share`. `over_filled_caches`: caches that a bench has filled count as
    generate's own, which nobody sees again, and a call of any length as long enough for rounds."""
    own, kept, ready = round_steps.settle, Decoding.is_kept, pace.READY

    def settle(cache: Any, tokens: torch.Tensor, *state: Any) -> None:
        *state, chosen = state
        # what dense would have had to choose
        agreed = torch.cat([tokens[:, 1:], chosen[:, -1:]], 1)
        if isinstance(share, int):
            refused = torch.arange(agreed.shape[1], device=agreed.device) >= share
        else:
            refused = torch.rand(agreed.shape, device=agreed.device) >= share
        own(cache, tokens, *state, torch.where(refused, torch.where(agreed == 7, 8, 7), agreed))

    round_steps.settle = settle
    if over_filled_caches:
        Decoding.is_kept, pace.READY = lambda self: False, 0
    try:
        yield
    finally:
        round_steps.settle, Decoding.is_kept, pace.READY = own, kept, ready
