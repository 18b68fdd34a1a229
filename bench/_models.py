"""Models of a real shape with random weights, for the end-to-end benches."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.pytorch_utils import apply_chunking_to_forward

from attnplug.models.layers import config_heads
from attnplug.policies import certificates

PART = 32768  # tokens that an MLP takes at once


def random_model(model_class: type, config: PreTrainedConfig, device: str) -> Any:
    """Random bf16 weights, made on the device: no initialisation, no copy."""
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16)
    model.to_empty(device=device).eval().requires_grad_(False)
    with torch.device(device):  # to_empty left its buffers unset
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02)
    return model


def heads_of(config: PreTrainedConfig) -> dict[str, int]:
    """A row's columns of what a model's attention looks like."""
    return dict(zip(("heads_q", "heads_kv", "head_dim"), config_heads(config), strict=True))


def recomputed(cache: Cache) -> float:
    """The mean over a cache's certified layers of the share of heads that were recomputed."""
    layers = certificates(cache)
    return sum(layer.exact for layer in layers) / max(1, len(layers))


@contextmanager
def mlps_in_parts(model: Any) -> Iterator[None]:
    """The MLPs take PART tokens at a time: 14,336 channels of a million tokens fit no GPU."""
    mlps = [layer.mlp for layer in model.base_model.layers]
    for mlp in mlps:
        mlp.forward = functools.partial(apply_chunking_to_forward, mlp.forward, PART, 1)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward


def timed(fn: Callable[[], Any]) -> float:
    """Seconds of the device that one call takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
