"""Steps that are captured before their layers are prepared.

A GPU queues about a thousand kernels, and then the host waits. sketch makes the bases of a prompt
in some eleven hundred, which the host would queue in front of a call's capture: it would come to
that when all of them have run, and the GPU would wait for the capture (90 ms at 131,072 tokens on
an H200, docs/log/sketch.md). A graph wants only the addresses of what it reads. So where an earlier
call of the same kind has run, the step is captured while the prompt still runs.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attnplug.models.autocast import autocast_dtype
from attnplug.models.cache import PlugLayer
from attnplug.models.captured import Step
from attnplug.models.patience import PatientStep
from attnplug.models.walk import all_modules

Due = Sequence[Sequence[PlugLayer]]  # as `due_layers` gives them


def capture_ahead(call: Any, step: Step, due: Due, arguments: Sequence[Any]) -> None:
    """Capture `step` of `arguments`, the first of a call of `Decoding`, whose `due` layers are to
    be prepared. Nothing where a step of this kind has not been captured before: the first one then
    runs as it is, for what it does on the host alone."""
    layers = [layer for each in due for layer in each]
    late = [layer for layer in layers if layer.is_expected is not None]
    if not isinstance(step, PatientStep) or not layers or len(late) < len(layers):
        return
    if call.last < call.length + 2:  # no second step, which is the one that is captured
        return
    kind = kind_of(call)
    if kind is not None:
        with _expected(late):
            step.ahead(kind, *arguments)


def kind_of(call: Any) -> Hashable:
    """What says which kernels a step of a call runs, beside the model's weights. None where a first
    step may do more than the next ones: over a cache of the caller's, recorded, or in autocast,
    which casts weights once."""
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
    modules = tuple(map(type, all_modules(call.model)))
    masked = "attention_mask" in call.inputs
    ends = 0 if call.ends is None else len(call.ends)
    flags = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), call.greedy, masked, ends
    return layers, policies, modules, flags


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
