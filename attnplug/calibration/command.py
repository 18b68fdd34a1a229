"""`attnplug calibrate`: make a model's basis and keep it."""

import time
from pathlib import Path
from typing import Any, NamedTuple

from attnplug.calibration.basis_file import Bases, rope_of, weights_of, write
from attnplug.calibration.measure import measure
from attnplug.calibration.texts import TOKENS, windows
from attnplug.models.pretrained import checkpoint_folder, load
from attnplug.ops.sketch.model_basis import fit_model_basis


class Calibrated(NamedTuple):
    """What was made."""

    path: Path
    layers: int
    heads: int  # KV heads of all layers
    tokens: int  # that were read
    seconds: float


def calibrate(name: str, device: str | None = None, tokens: int = TOKENS) -> Calibrated:
    """Measure a model on eight kinds of text, `tokens` of each, and keep its basis.

    Raises WeightsUnavailableError, UnsupportedModelError, and FileError."""
    model, tokenizer = load(name, device=device)
    weights = weights_of(checkpoint_folder(name))
    began = time.monotonic()
    bases, read = make(model, tokenizer, weights, tokens)
    path = write(bases, name)
    heads = sum(len(basis.encoder) for basis in bases.layers.values())
    return Calibrated(path, len(bases.layers), heads, read, time.monotonic() - began)


def make(model: Any, tokenizer: Any, weights: str, tokens: int = TOKENS) -> tuple[Bases, int]:
    """(the bases of a model's layers, how many tokens they were made of)."""
    texts = [ids for _, ids in windows(tokenizer, tokens)]
    inv_freq, moments = measure(model, texts)
    layers = {}
    for layer, own in moments.items():
        layers[layer] = fit_model_basis(own, inv_freq.to(own.k_mean.device))
    rope = rope_of(model.config.get_text_config(decoder=True))
    return Bases(weights, rope, inv_freq, layers), sum(map(len, texts))
