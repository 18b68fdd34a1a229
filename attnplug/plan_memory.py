"""What a method's cache takes of memory, on the GPU and on the host, and what a step reads of it.

The bytes are counted on the cache layer that the method itself makes, on the device "meta", where
tensors have no memory. So no second account of a cache's form has to be kept.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from attnplug.models.cache import PlugLayer
from attnplug.plan import Shape, on_gpu
from attnplug.policies._certified_layer import CertifiedLayer
from attnplug.policies.base import Phase
from attnplug.policies.crossover import DenseBelow
from attnplug.policies.gather import Gather
from attnplug.policies.gvr import Gvr
from attnplug.policies.sketch import Sketch


class Memory(NamedTuple):
    """Bytes of the caches of a batch: on the GPU and on the host, and what a step reads of them at
    least; None where that is not known."""

    gpu: float
    host: float = 0.0
    reads: float | None = None


def memory_of(shape: Shape, method: Phase, batch: int, tokens: int) -> Memory:
    """What `method` keeps of `batch` sequences with room for `tokens`, were it to serve at every
    length. `reads` is None for rounds of `exact`, which `plan_answer` tells."""
    cache = batch * shape.cached(tokens)
    layer = _layer(shape, method, batch, tokens)
    if layer is None:
        return Memory(cache, reads=None if shape.shared else cache)
    assert layer.keys is not None and layer.values is not None
    originals = layer.keys.nbytes + layer.values.nbytes
    beside = shape.layers * (sum(tensor.nbytes for tensor in layer.tensors()) - originals)
    is_hosted, reads = not on_gpu(method), None
    if isinstance(layer, CertifiedLayer) and layer.tier is not None:
        is_hosted, reads = layer.originals == "host", shape.layers * layer.tier.nbytes()
    elif isinstance(method, Gather | Gvr | Sketch):
        reads = batch * shape.read(method, tokens)
    host = cache if is_hosted else 0.0
    return Memory(cache - host + beside, host, reads)


def serving(method: Any) -> DenseBelow:
    """The method as it serves caches of any length."""
    return dataclasses.replace(method, min_tokens=0)


def _layer(shape: Shape, method: Phase, batch: int, tokens: int) -> PlugLayer | None:
    """One layer's cache of a method, which has no memory; None where it is dense's."""
    layer = (serving(method) if isinstance(method, DenseBelow) else method).cache_layer(tokens)
    if layer is None or not shape.layers:
        return None
    layer.query_heads = shape.heads
    rows = torch.empty(
        (batch, shape.heads_kv, 0, shape.head_dim), dtype=torch.bfloat16, device="meta"
    )
    layer.lazy_initialization(rows, rows)
    return layer
