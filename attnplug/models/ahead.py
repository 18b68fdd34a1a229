"""Steps that are captured without having run before.

A call's first step runs as it is, for what it does on the host, and its second one is captured.
Where an earlier call of the same kind has run, the first step is known to do nothing on the host
but what a capture does too. So it is captured at once:

- where all its layers read their caches densely, in its own place: the host takes as long to run a
  step kernel by kernel as five steps of a graph take;
- where sketch is about to prepare its layers, in front of that. A GPU queues about a thousand
  kernels, and then the host waits. sketch makes the bases of a prompt in some eleven hundred, which
  the host would queue in front of a call's capture: it would come to that when all of them have
  run, and the GPU would wait for the capture (90 ms at 131,072 tokens on an H200,
  docs/log/sketch.md). A graph wants only the addresses of what it reads.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attnplug.models.autocast import autocast_dtype
from attnplug.models.cache import PlugLayer
from attnplug.models.captured import Step
from attnplug.models.patience import PatientStep
from attnplug.models.sliding import SlidingLayer
from attnplug.models.walk import all_modules

Due = Sequence[Sequence[PlugLayer]]  # as `due_layers` gives them


def capture_ahead(call: Any, step: Step, due: Due, arguments: Sequence[Any]) -> None:
    """Capture `step` of `arguments`, the first of a call of `Decoding`, whose `due` layers are to
    be prepared. Nothing where a step of this kind has not been captured before: the first one then
    runs as it is, for what it does on the host alone."""
    if not isinstance(step, PatientStep) or not step.is_first:
        return
    if call.last < call.length + 2:  # no second step, which is the one that is captured
        return
    layers = [layer for each in due for layer in each]
    late = all(layer.is_expected is not None for layer in layers)
    if not (late if layers else _reads_densely(call)):
        return
    kind = kind_of(call)
    if kind is not None:
        with _expected(layers):
            step.ahead(kind, *arguments)


def _reads_densely(call: Any) -> bool:
    """Whether a step of a call reads all of its layers' caches as its prompt did, by dense."""
    served = [x.served.get("decode") for x in call.bound.values() if x.policy is not None]
    dense = all(each is not None and each.by == "dense" for each in served)
    return dense and all(isinstance(each, (PlugLayer, SlidingLayer)) for each in call.cache.layers)


def kind_of(call: Any) -> Hashable:
    """What says which kernels a step of a call runs. None where a first step may do more than the
    next ones: over a cache of the caller's, recorded, or in autocast, which casts weights once."""
    given = getattr(call.cache, "_is_user_defined", False)
    traced = any(binding.trace_to is not None for binding in call.bound.values())
    if given or traced or autocast_dtype(call.device) is not None:
        return None
    layers = tuple(
        (type(layer), layer.keys.shape, layer.keys.dtype)
        for layer in call.cache.layers
        if getattr(layer, "keys", None) is not None
    )
    policies = tuple(str(binding.policy) for binding in call.bound.values())
    modules = [*all_modules(call.model)]
    types = tuple(map(type, modules))
    held = (weight for each in modules for weight in each._parameters.values())
    weights = tuple((weight.shape, weight.dtype) for weight in held if weight is not None)
    masked = "attention_mask" in call.inputs
    ends = 0 if call.ends is None else len(call.ends)
    flags = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), call.greedy, masked, ends
    return layers, policies, types, weights, flags


@contextmanager
def _expected(layers: Iterable[PlugLayer]) -> Iterator[None]:
    """Within it these layers have steps read what they will make."""
    try:
        for layer in layers:
            layer.is_expected = True
        yield
    finally:
        for layer in layers:
            layer.is_expected = False
