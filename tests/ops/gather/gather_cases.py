"""What the tests of the gather ops define alike: the options of a decode step, fresh summaries, and
what INT8 codes stand for."""

import torch

from attnplug.ops.common import card, views
from attnplug.ops.gather.block_bounds import empty_bounds, frame_of

# The options of gather_decode and tiered_decode, in the order of their schemas.
OPTIONS = (
    "scale",
    "block",
    "top_k",
    "sink",
    "local",
    "scoring",
    "start",
    "key_mask",
    "softcap",
    "sinks",
)
DEFAULTS = {
    "scale": 0.125,
    "block": 16,
    "top_k": 3,
    "sink": 1,
    "local": 2,
    "scoring": "bounds",
    "softcap": 0.0,
}


def ask_for_sizes(monkeypatch):
    """Have launchers prepare what kernels choose between, as for AMD's compiler."""
    monkeypatch.setattr(views, "card", lambda device: card(device)._replace(ranges=True))


def hold_progress(progress, k, options):
    """A fresh cache's progress is what one selection over it must have noted."""
    batch, size = k.shape[0], k.shape[2]
    lengths = torch.tensor([size]) if options.get("lengths") is None else options["lengths"]
    start = torch.tensor([0]) if options.get("start") is None else options["start"]
    lengths, start = (x.long().clamp(0, size).expand(batch) for x in (lengths, start))
    until = (lengths - 1 - start).clamp(min=0) // options["block"] - options["local"] + 1
    assert progress.tolist() == torch.stack([until.clamp(min=0), start], 1).tolist()


def empty(k, block, parts=2, dtype=None):
    """(summaries of a fresh cache, its progress), with garbage where no kernel has written: NaN, or
    a code that no test makes."""
    garbage = -77 if dtype == torch.int8 else torch.nan
    bounds = empty_bounds(k, block, parts, dtype=dtype).fill_(garbage)
    return bounds, torch.zeros(k.shape[0], 2, dtype=torch.int32)


def decoded(bounds, blocks):
    """What codes stand for, max and min or a band's edges, fp64 `[B, Hkv, blocks, 2, D]`; and one
    code's worth, `[.., 1, D]`."""
    centre, unit, scale, width = (x.double() for x in frame_of(bounds, blocks))
    worth = (unit[:, :, None] * scale[..., None])[:, :, :, None]
    said = centre[:, :, None, None] + worth * bounds[:, :, :blocks].double()
    if bounds.shape[3] == 1:
        half = (unit[:, :, None] * width[..., None])[:, :, :, None]
        said = torch.cat([said + half, said - half], 3)
    return said, worth
