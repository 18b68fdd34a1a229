"""Offline quality measurements: needle prompts and captured attention mass."""

from attnplug.eval.mass import (
    BlockMass,
    block_mass,
    captured_mass,
    mask_density,
    oracle_blocks,
    visible_blocks,
)
from attnplug.eval.needle import Needle, needle_prompt

__all__ = [
    "BlockMass",
    "Needle",
    "block_mass",
    "captured_mass",
    "mask_density",
    "needle_prompt",
    "oracle_blocks",
    "visible_blocks",
]
