"""Offline evidence for any policy: tasks, paired statistics, fidelity and captured attention mass.

`attnplug eval` runs it from a terminal. From Python: `run_study` runs a `Study` and logs its
samples, `attnplug.eval.rows` compares them, `attnplug.eval.output` shows the comparison."""

from attnplug.eval.mass import (
    BlockMass,
    block_mass,
    captured_mass,
    mask_density,
    oracle_blocks,
    visible_blocks,
)
from attnplug.eval.needle import Needle, needle_prompt
from attnplug.eval.runner import Study, run_study
from attnplug.eval.tasks import TASKS, Sample, make_sample

__all__ = [
    "TASKS",
    "BlockMass",
    "Needle",
    "Sample",
    "Study",
    "block_mass",
    "captured_mass",
    "make_sample",
    "mask_density",
    "needle_prompt",
    "oracle_blocks",
    "run_study",
    "visible_blocks",
]
