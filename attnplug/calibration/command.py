"""`attnplug calibrate`: make a model's basis and keep it."""

import time
from pathlib import Path
from typing import Any, NamedTuple

from attnplug.calibration.basis_file import Bases, make_place, rope_of, weights_of, write
from attnplug.calibration.measure import measure
from attnplug.calibration.texts import TOKENS, windows
from attnplug.errors import UnsupportedModelError
from attnplug.models.layers import positions
from attnplug.models.pretrained import checkpoint_folder, load
from attnplug.ops.sketch.model_basis import ModelBasis, Moments, fit_model_basis
from attnplug.ops.sketch.state import BLOCK


class Calibrated(NamedTuple):
    """What was made."""

    path: Path
    layers: int
    heads: int  # KV heads of all layers
    tokens: int  # that were read
    seconds: float


def calibrate(name: str, device: str | None = None, tokens: int = TOKENS) -> Calibrated:
    """Measure a model on eight kinds of text, `tokens` of each, and keep its basis.

    Raises WeightsUnavailableError, UnsupportedModelError, and FileError. A basis that is there
    stays then."""
    model, tokenizer = load(name, device=device)
    weights = weights_of(checkpoint_folder(name))
    make_place(weights, _rope(model))  # which should not wait for the work
    began = time.monotonic()
    bases, read = make(model, tokenizer, weights, tokens)
    path = write(bases, name)
    heads = sum(len(basis.encoder) for basis in bases.layers.values())
    return Calibrated(path, len(bases.layers), heads, read, time.monotonic() - began)


def make(model: Any, tokenizer: Any, weights: str, tokens: int = TOKENS) -> tuple[Bases, int]:
    """(the bases of a model's layers, how many tokens they were made of). No text is longer than
    the model reads.

    Raises UnsupportedModelError where `measure` does, where the model reads no more than the block
    that is left out, and where its keys or queries are not finite."""
    most = positions(model.config)
    if most is not None and most <= BLOCK:
        raise UnsupportedModelError(
            f"the model reads {most} tokens at most, and its basis is measured on those behind the "
            f"first {BLOCK}"
        )
    texts = [ids for _, ids in windows(tokenizer, min(tokens, most or tokens))]
    inv_freq, moments = measure(model, texts)
    layers = {}
    for layer, own in moments.items():
        _check_finite(layer, own)
        layers[layer] = fit_model_basis(own, inv_freq.to(own.k_mean.device))
        _check_finite(layer, layers[layer])
    return Bases(weights, _rope(model), inv_freq, layers), sum(map(len, texts))


def _rope(model: Any) -> str:
    return rope_of(model.config.get_text_config(decoder=True))


def _check_finite(layer: int, found: Moments | ModelBasis) -> None:
    if not all(x.isfinite().all() for x in found):
        raise UnsupportedModelError(
            f"layer {layer} of this model computes keys or queries that are not finite, and has no "
            "basis then; look for damaged weights, or for a dtype that is too narrow"
        )
