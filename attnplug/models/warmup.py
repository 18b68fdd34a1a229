"""What a first call of generate would compile, compiled ahead: calls of generate on random tokens,
with a progress bar."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from attnplug.models.generate import LARGEST, LENGTHS, LONGEST, LOOP
from attnplug.models.layer_kernels import has_quick_steps
from attnplug.models.layers import positions

STEPS = 4  # tokens: the first compiled step warms up, the second is captured, the others replay
KEPT = (LONGEST, LENGTHS, LARGEST)  # how long the caches of later calls are made


def generate_ahead(
    model: Any, lengths: Sequence[int], batch: int, padded: bool, options: dict[str, Any]
) -> dict[int, float]:
    """Seconds of a call of generate for each prompt length, as the first to come; their steps are
    compiled if that will pay. Leaves random state and the size of later caches as they were. Warns
    of a length that the model does not read."""
    longest, reads = max(lengths, default=0), positions(model.config)
    if reads is not None and longest > reads:
        warnings.warn(
            f"warm: {longest:,} tokens are more than the {reads:,} that this model reads",
            RuntimeWarning,
            stacklevel=3,
        )
    if LOOP in vars(model) and not has_quick_steps(model):
        vars(model)[LOOP].compile_soon()
    kept = {name: vars(model)[name] for name in KEPT if name in vars(model)}
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    seconds: dict[int, float] = {}
    places = [model.device] if model.device.type == "cuda" else []
    console = Console(stderr=True)
    with torch.random.fork_rng(devices=places), Progress(*columns, console=console) as bar:
        for length in lengths:
            task = bar.add_task(f"{length:,} tokens: compiling what is missing", total=1)
            begun = time.perf_counter()
            _call(model, length, batch, padded, options)
            seconds[length] = time.perf_counter() - begun
            bar.update(task, completed=1, description=f"{length:,} tokens: ready")
    for name in KEPT:
        vars(model).pop(name, None)
    vars(model).update(kept)
    return seconds


def _call(model: Any, length: int, batch: int, padded: bool, options: dict[str, Any]) -> None:
    size = model.config.get_text_config(decoder=True).vocab_size
    # The same on all ranks of a split model, and so what they sample: who ends before the others
    # leaves them waiting. The caller has the random state put back.
    torch.default_generator.manual_seed(length)
    if model.device.type == "cuda":
        with torch.cuda.device(model.device):
            torch.cuda.manual_seed(length)
    ids = torch.randint(0, size, (batch, length), device=model.device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 0] = 0
    model.generate(ids, attention_mask=mask, **({"max_new_tokens": STEPS} | options))
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
