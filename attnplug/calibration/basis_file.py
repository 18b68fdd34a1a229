"""The file that a model's basis is kept in: one safetensors file in attnplug's cache folder,
bases/WEIGHTS-ROPE.safetensors. WEIGHTS is a fingerprint of the checkpoint's weights, by which any
program that has the checkpoint's folder finds the file, whatever it loads the weights into. ROPE is
one of what the config says of the rope and of the heads, as a config alone may stretch a model.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from attnplug import files
from attnplug.errors import FileError
from attnplug.models.pretrained import CACHE, cache_dir
from attnplug.ops.common.checks import why_not_width
from attnplug.ops.sketch.model_basis import ModelBasis
from attnplug.ops.sketch.state import COORDINATES

FORMAT = "attnplug-basis-1"
HEAD = 64  # bytes of each tensor that the fingerprint is of: other weights differ in all tensors
LONGEST_HEADER = 1 << 26  # bytes
# What a config may say of its rope: in `rope_parameters`, or as older versions of transformers have
# it, in `rope_scaling` and beside it.
BESIDE = ("rope_theta", "partial_rotary_factor")


class Bases(NamedTuple):
    """The basis of each layer of a model."""

    weights: str  # their fingerprint
    rope: str  # its fingerprint
    inv_freq: torch.Tensor  # float32 [P]
    layers: dict[int, ModelBasis]


def weights_of(folder: Path) -> str:
    """Sixteen hexadecimal digits of a checkpoint's weights: of the names, types, shapes and first
    bytes of all tensors. How they are spread over files does not matter.

    Raises FileError where the folder has no safetensors files, or damaged ones."""
    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
        raise FileError(
            f"{folder} has no *.safetensors files, by which a basis knows its model; download all "
            "of it first, as `hf download` does"
        )
    found: list[tuple[str, str]] = []
    for part in parts:
        with files.reading(part, "weights"):
            found += _tensors(part)
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]


def rope_of(config: Any) -> str:
    """Eight hexadecimal digits of what turns the keys of layers that see everything: the rope and
    the heads of a text decoder's config, of whichever version of transformers."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = dict(found.get("full_attention") or found)
    for name in BESIDE:
        value = getattr(config, name, None)
        if value is not None:
            found.setdefault(name, value)
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    if found.get("partial_rotary_factor") == 1:
        del found["partial_rotary_factor"]
    heads = [
        getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    ]
    plain = sorted((name, repr(_plain(value))) for name, value in found.items())
    return hashlib.sha256(repr((plain, heads)).encode()).hexdigest()[:8]


def _plain(value: Any) -> Any:
    """Numbers as floats: 10000 and 10000.0 are one."""
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number else value


def _tensors(part: Path) -> list[tuple[str, str]]:
    """(name, its type, shape and first bytes) of each tensor in a safetensors file."""
    found = []
    with part.open("rb") as file:
        (length,) = struct.unpack("<Q", _exactly(file, 8))
        if length > LONGEST_HEADER:
            raise ValueError(f"its header claims {length:,} bytes")
        header = files.json_of(_exactly(file, length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            try:
                begin, end = facts["data_offsets"]
                told = json.dumps([facts["dtype"], facts["shape"]])
                file.seek(8 + length + int(begin))
                data = _exactly(file, min(HEAD, max(int(end) - int(begin), 0)))
            except (TypeError, KeyError, OverflowError) as error:
                raise ValueError(f"its header describes {name!r} wrongly") from error
            found.append((name, told + data.hex()))
    return found


def _exactly(file, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it is cut short")
    return data


def folder_of_bases() -> Path:
    return cache_dir() / "bases"


def path_of(weights: str, rope: str) -> Path:
    """Where the basis of a model is kept."""
    return folder_of_bases() / f"{weights}-{rope}.safetensors"


def make_place(weights: str, rope: str) -> Path:
    """`path_of`, where a file can be written now. Raises FileError."""
    path = path_of(weights, rope)
    with files.named_by(CACHE):
        files.make_place(path)
    return path


def write(bases: Bases, model: str) -> Path:
    """Keep a model's bases; `model` is what the user called it. Raises FileError."""
    tensors = {"inv_freq": bases.inv_freq.cpu().contiguous()}
    for layer, basis in bases.layers.items():
        for name, tensor in basis._asdict().items():
            tensors[f"{layer}.{name}"] = tensor.cpu().contiguous()
    path = make_place(bases.weights, bases.rope)
    facts = {"format": FORMAT, "weights": bases.weights, "rope": bases.rope, "model": model}
    with files.named_by(CACHE), files.replacing(path) as part:
        part.write_bytes(save_tensors(tensors, metadata=facts))
    return path


def read(path: Path, weights: str | None = None, rope: str | None = None) -> Bases:
    """What a file holds. Raises FileError where it cannot be read, holds no basis, or that of a
    model with another fingerprint of its weights or its rope than the given."""
    with files.reading(path, "a model's basis"):
        data = files.read_bytes(path)
        try:
            tensors = load_tensors(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        facts = _metadata(data)
        if facts.get("format") != FORMAT:
            raise ValueError(f"its format is {facts.get('format')!r}, needs {FORMAT!r}")
        for name, wanted in (("weights", weights), ("rope", rope)):
            own = facts.get(name, "")
            if wanted is not None and own != wanted:
                what = "other weights" if name == "weights" else "another rope"
                raise FileError(
                    f"{path} is the basis of {what} ({own or 'none'}, not {wanted}); run "
                    "`attnplug calibrate` for this model"
                )
        return Bases(facts.get("weights", ""), facts.get("rope", ""), *_checked(tensors))


def _metadata(data: bytes) -> dict[str, str]:
    (length,) = struct.unpack("<Q", data[:8])
    return files.json_of(data[8 : 8 + length]).get("__metadata__") or {}


def _checked(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[int, ModelBasis]]:
    """(inv_freq, the bases by layer). Raises ValueError where they do not fit together: a kernel
    trusts what it is given."""
    wrong = [k for k, x in tensors.items() if x.dtype != torch.float32 or not x.isfinite().all()]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not float32, or not finite")
    inv_freq = tensors.pop("inv_freq", None)
    if inv_freq is None or inv_freq.dim() != 1:
        raise ValueError("it has no inv_freq [P]")
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".")
        if not (layer.isascii() and layer.isdigit() and part in ModelBasis._fields):
            raise ValueError(f"nobody knows what {name!r} is")
        found.setdefault(int(layer), {})[part] = tensor
    if not found:
        raise ValueError("it has no layers")
    for layer, parts in sorted(found.items()):
        if not _fits(parts, len(inv_freq)):
            raise ValueError(f"the tensors of layer {layer} do not fit together")
    return inv_freq, {layer: ModelBasis(**found[layer]) for layer in sorted(found)}


def _fits(parts: dict[str, torch.Tensor], pairs: int) -> bool:
    encoder, scorer = (parts.get(name) for name in ModelBasis._fields)
    if encoder is None or scorer is None or encoder.dim() != 3 or scorer.dim() != 3:
        return False
    heads, width, columns = scorer.shape
    ranks = [sum(pair) for pair in COORDINATES.values() if sum(pair) <= width]
    fits = encoder.shape == (heads, width + 1, columns - 1) and columns - 1 in ranks
    return fits and heads > 0 and 2 * pairs <= width and not why_not_width(width)


def find(folder: Path, rope: str, name: str) -> Bases:
    """The basis of the checkpoint in a folder, with `rope_of` the config of its text decoder.
    `name` is what the user calls the model.

    Raises FileError where there is none, or the file cannot be read."""
    weights = weights_of(folder)
    path = path_of(weights, rope)
    with files.reading(path, "a model's basis"):
        there = path.exists()
    if there:
        return read(path, weights, rope)
    if any(folder_of_bases().glob(f"{weights}-*.safetensors")):
        raise FileError(
            f"{name} has a basis only for another rope: `attnplug calibrate` takes the rope that "
            "config.json in a checkpoint's folder says. Write the rope that you serve there, "
            "calibrate that folder, and serve it without changes to its config"
        )
    raise FileError(
        f"{name} has no basis (none in attnplug's cache folder); run `attnplug calibrate {name}` "
        "once"
    )
