"""Steps that are captured without having run before.

A call's first step runs as it is, for what it does on the host, and its second one is captured.
Where an earlier call of the same kind has run, the first step is known to do nothing on the host
but what a capture does too. So it is captured at once:

- where all its layers read their caches densely, or say that their steps are alike, in its own
  place: the host takes as long to run a step kernel by kernel as five steps of a graph take;
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
from attnplug.models.hook import state_of
from attnplug.models.patience import PatientStep
from attnplug.models.sliding import SlidingLayer
from attnplug.models.walk import all_modules

Due = Sequence[Sequence[PlugLayer]]  # as `due_layers` gives them
PLAIN = frozenset({bool, str, list})


def capture_ahead(call: Any, step: Step, due: Due, arguments: Sequence[Any]) -> None:
    """Capture `step` of `arguments`, the first of a call of `Decoding`, in front of what its `due`
    layers want prepared, if any do. Nothing where no step of this kind has been captured behind
    another one: the first step then runs as it is, for what it does on the host alone."""
    if not isinstance(step, PatientStep) or not step.is_first:
        return
    if call.last < call.length + 2:  # no second step, which is the one that is captured
        return
    layers = [layer for each in due for layer in each]
    late = all(layer.is_expected is not None for layer in layers)
    if not (late if layers else _are_alike(call)):
        return
    kind = kind_of(call, arguments)
    if kind is not None:
        with _expected(layers):
            step.ahead(kind, *arguments)


def _are_alike(call: Any) -> bool:
    """Whether a call's first step does nothing on the host that later ones do not: all layers read
    their caches as the prompt did, by dense, or have caches that say so."""
    if not all(isinstance(each, (PlugLayer, SlidingLayer)) for each in call.cache.layers):
        return False
    for module, binding in call.bound.items():
        served = binding.served.get("decode")
        dense = served is not None and served.by == "dense"
        layer = state_of(call.cache, module.layer_idx)
        alike = isinstance(layer, PlugLayer) and layer.steps_are_alike
        if binding.policy is not None and not (dense or alike):
            return False
    return True


def kind_of(call: Any, arguments: Sequence[Any]) -> int | None:
    """What says which kernels a step of a call runs, as a hash, of which a model may keep many.
    None where a first step may do more than the next ones: over a cache of the caller's, recorded,
    or in autocast, which casts weights once."""
    given = getattr(call.cache, "_is_user_defined", False)
    traced = any(binding.trace_to is not None for binding in call.bound.values())
    if given or traced or autocast_dtype(call.device) is not None:
        return None
    layers = tuple(
        (type(x), _form(getattr(x, "keys", None)), getattr(x, "round_part", ""))
        for x in call.cache.layers
    )
    policies = tuple(str(binding.policy) for binding in call.bound.values())
    flags = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), call.greedy
    fed = tuple(map(_form, arguments))
    return hash((layers, policies, flags, fed, *map(_state, all_modules(call.model))))


def _form(value: Any) -> Hashable:
    """What kernels depend on of a tensor; of anything else, nothing."""
    tensor = isinstance(value, torch.Tensor)
    return (value.shape, value.dtype, value.device) if tensor else None


def _state(module: torch.nn.Module) -> Hashable:
    """What a module's forward may depend on: its type, the form of its weights, and what it keeps
    of plain values, as a layer of adapters keeps which of them is on."""
    weights = tuple(map(_form, module._parameters.values()))
    values = (str(x) if type(x) is list else x for x in vars(module).values() if type(x) in PLAIN)
    return type(module), weights, *values


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
