"""What the tests of momo's spans define alike: calls that a span ends in, and momo's selections."""

import torch

from attnplug.policies import AttentionCall

TOKENS, ROOM, PADDING = 235, 300, 37
SELECTIONS = {
    "": {},
    "corrected": {"delta": 0.5},
    "lists": {"selection": "exact"},
    "corrected lists": {"selection": "estimated", "delta": 1.0},
}


def call(device: str, *, room: int = TOKENS, sinks: bool = False, batch: int = 2) -> AttentionCall:
    random = torch.Generator().manual_seed(5)
    shapes = ((batch, 4, TOKENS, 64), (batch, 2, room, 64), (batch, 2, room, 64))
    made = AttentionCall(*(torch.randn(s, generator=random).to(device) for s in shapes), 0.125)
    if room > TOKENS:
        made.lengths = torch.full((1,), TOKENS, device=device)
    if sinks:
        made.sinks = torch.linspace(-1, 3, 4, device=device)
    return made


def padded(device: str, *, room: int = TOKENS, hole: bool = False) -> AttentionCall:
    """Rows of no padding, of some, and of nothing else."""
    c = call(device, room=room, batch=3)
    c.start = torch.tensor([0, PADDING, TOKENS], dtype=torch.int32, device=device)
    c.key_mask = torch.arange(room, device=device) >= c.start[:, None]
    c.key_mask[1, 90] = not hole
    return c
