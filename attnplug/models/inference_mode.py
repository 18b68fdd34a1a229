"""Tensors that outlast torch.inference_mode: outside of it torch refuses to write what was made in
it, such as a cache that one turn of a conversation has made and the next one goes on with."""

from collections.abc import Iterable

import torch


def is_foreign(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any was made in inference mode, and the caller is outside of it. Traced code is not
    asked: it has the tensors that eager code has left."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return any(tensor.is_inference() for tensor in tensors)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that anybody may write."""
    return tensor.clone() if tensor.is_inference() else tensor
