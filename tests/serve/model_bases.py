"""The basis of a small model, kept where engines look for it."""

from pathlib import Path

import pytest
import torch

from attnplug.calibration.basis_file import Bases, rope_of, weights_of, write
from attnplug.calibration.measure import measure
from attnplug.ops.sketch.model_basis import fit_model_basis


def keep_basis(model, folder: Path, cache: Path) -> None:
    """Measure a model, whose weights are in `folder`, on random tokens, as it reads no text, and
    keep its basis in `cache`, which stands for attnplug's cache folder."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, 1000, (900,), generator=draw).tolist() for _ in range(3)]
    inv_freq, moments = measure(model, texts)
    layers = {
        layer: fit_model_basis(own, inv_freq.to(own.k_mean.device))
        for layer, own in moments.items()
    }
    with pytest.MonkeyPatch.context() as here:
        here.setenv("ATTNPLUG_CACHE", str(cache))
        write(Bases(weights_of(folder), rope_of(model.config), inv_freq, layers), "qwen2")
