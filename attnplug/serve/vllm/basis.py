"""The basis of the model that a server runs, for methods that code its pages by it."""

import functools
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.models.utils import extract_layer_index

from attnplug.calibration.basis_file import Bases, find, rope_of
from attnplug.errors import AttnplugError
from attnplug.models.pretrained import checkpoint_folder
from attnplug.ops.sketch.pages import LayerBasis
from attnplug.serve.paged.basis import Place, basis_of_rank
from attnplug.serve.paged.phases import Phases
from attnplug.serve.vllm.options import VLLM


def check_basis(config: Any) -> Bases:
    """The bases of a server's model. Raises ServeError where there are none, and where nobody can
    tell whose they are."""
    model = config.model_config
    if model.revision is not None and not Path(model.model).is_dir():
        raise VLLM.error(
            f"sketch: --revision {model.revision}: `attnplug calibrate` reads a model's default "
            "revision; download yours, and give its folder to both commands"
        )
    return _bases(model.model, rope_of(model.hf_text_config))


@functools.cache
def _bases(name: str, rope: str) -> Bases:
    try:
        return find(checkpoint_folder(name), rope, name)
    except AttnplugError as error:
        raise VLLM.error(f"sketch: {error}") from error


def basis_of(
    config: Any, phases: Phases, layer_name: str, heads: int, device: torch.device
) -> LayerBasis | None:
    """The basis of a layer with so many KV heads on this rank; None where its method has none."""
    if phases.decode is None or not phases.decode.has_model_basis:
        return None
    ranks = get_tensor_model_parallel_world_size()
    place = Place(get_tensor_model_parallel_rank(), ranks, heads, device)
    index, bases = extract_layer_index(layer_name), check_basis(config)
    if index not in bases.layers:
        raise VLLM.error(
            f"sketch: the model's basis has no layer {index}, only {sorted(bases.layers)}; name "
            "that layer in `layers` with 'dense'"
        )
    return basis_of_rank(bases, index, place, config.model_config.max_model_len)
