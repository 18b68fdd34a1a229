"""A model's own step, captured, until a compiled one pays.

A compiled step of a 7B model takes 2 to 4 ms a token less than the model's own kernels in a CUDA
graph, at 64 tokens a call, and 10 s to compile (docs/log/house.md). So steps are compiled once a
model has decoded as many tokens as make up for it, and before that where nobody could capture them.
Where norms, rotary embeddings and activations have kernels (layer_kernels.py), a compiled step is
0.2 ms faster, which 17 s of compilation take 97,000 tokens to make up for: it is not compiled.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnplug.models.cache import PlugLayer
from attnplug.models.captured import CapturedStep, Step
from attnplug.models.layer_kernels import layer_kernels
from attnplug.models.regional import LayeredStep
from attnplug.models.walk import devices_of

PATIENCE = 4096  # steps of a model before they are compiled
PATIENT = frozenset({"cuda"})  # devices that capture steps
OWN = "transformers."  # models whose code is known to do nothing on the host from step to step
LOG = logging.getLogger("attnplug")
BOOLEAN = torch.bool, torch.uint8  # dtypes of an index that says where
aten = torch.ops.aten


def is_on_one_device(model: torch.nn.Module) -> bool:
    """A graph that is captured on one GPU has no kernels of another."""
    return len(devices_of(model)) == 1


def is_capturable(model: torch.nn.Module) -> bool:
    """Whether a model's own step may be captured, as far as can be seen before it has run: code of
    transformers, all of it on one GPU, not the share of a rank."""
    if model.device.type not in PATIENT:
        return False
    shares = any(isinstance(each, DTensor) for each in model.parameters())
    return type(model).__module__.startswith(OWN) and is_on_one_device(model) and not shares


class PatientStep:
    """Captures and replays `step`; runs what `compiled` makes after `left` steps (never, if that is
    infinite), or as soon as it turns out that `step` cannot be captured. `begin` starts a call."""

    def __init__(self, step: Step, compiled: Callable[[], Step], left: float = PATIENCE):
        self.compiled, self.left = compiled, left
        # No cycle, which would have Python destroy the graph at a time of its own.
        self.now: Step = CapturedStep(functools.partial(_own, step))

    def begin(self) -> None:
        """A call of generate begins."""
        if isinstance(self.now, (CapturedStep, LayeredStep)):
            self.now.begin()

    @property
    def is_first(self) -> bool:
        """Whether a call's first step is to come, and steps are captured."""
        return isinstance(self.now, CapturedStep) and self.now.first

    def ahead(self, kind: int, *arguments: Any) -> None:
        """`CapturedStep.ahead`, while steps are captured."""
        if not isinstance(self.now, CapturedStep) or self.left <= 0:
            return
        try:
            self.now.ahead(kind, *arguments)
        except NotReplayable as why:
            self._give_up(why, arguments)

    def __call__(self, *arguments: Any) -> torch.Tensor | None:
        if not isinstance(self.now, CapturedStep):
            return self.now(*arguments)
        if self.left <= 0:
            LOG.warning("decode steps are compiled now, which takes some seconds, once")
            return self._compile()(*arguments)
        self.left -= 1
        try:
            return self.now(*arguments)
        except NotReplayable as why:
            return self._give_up(why, arguments)(*arguments)

    def _give_up(self, why: "NotReplayable", arguments: Sequence[Any]) -> Step:
        LOG.warning("decode steps cannot be captured: %s", why)
        _forget_pending(arguments[1].layers)
        return self._compile()

    def _compile(self) -> Step:
        self.now = self.compiled()
        return self.now

    def __str__(self) -> str:
        """What steps are, "" where they are compiled."""
        if not isinstance(self.now, CapturedStep):
            return str(self.now) if isinstance(self.now, LayeredStep) else ""
        if math.isinf(self.left):
            return ""
        return (
            "decode steps replay the model's own kernels, and are compiled after "
            f"{max(self.left, 0):,.0f} more; attnplug.warm(model, lengths) does so ahead"
        )


def _own(step: Step, model: Any, *arguments: Any) -> torch.Tensor | None:
    replayable = Replayable(model.device) if is_capturing() else nullcontext()
    with replayable, layer_kernels(model):
        return step(model, *arguments)


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class NotReplayable(RuntimeError):
    """An op that no graph of a device can replay."""


class Replayable(TorchDispatchMode):
    """Within it an op that no graph of a device can replay raises NotReplayable: what depends on
    data by its shape or on the host, and what is about a tensor of elsewhere. Numbers, which the
    host hands over as tensors without dimensions, are constants of a graph.

    Before CUDA refuses it: torch's random generators do not survive a capture that CUDA ended."""

    supports_higher_order_operators = True
    HOST_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
    # Of these, what the host wants depends on the arguments.
    INDEXING = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._asks_the_device(func, args):
            raise NotReplayable(f"{func} asks the device")
        self._refuse_elsewhere(func, args)
        if kwargs:
            self._refuse_elsewhere(func, kwargs.values())
        found = func(*args, **(kwargs or {}))
        self._refuse_elsewhere(func, (found,))
        return found

    def _asks_the_device(self, func: Any, args: Any) -> bool:
        if getattr(func, "overloadpacket", None) in self.INDEXING:  # by places, or where it is true
            places, *values = args[1:]
            given = [each for each in places if each is not None]
            says_where = [each.dtype in BOOLEAN for each in given]
            if says_where == [True] and values and _is_number(values[0]) and True not in values[1:]:
                return False  # fills in a number of the host's
            return any(says_where)
        return not self.HOST_TAGS.isdisjoint(getattr(func, "tags", ()))

    def _refuse_elsewhere(self, func: Any, values: Iterable[Any]) -> None:
        """Raise NotReplayable if a tensor among the values is elsewhere. A capture asks this of
        some thousand ops; torch's own walk over a tree of values would take longer than they do."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.device != self.device and value.dim() > 0:
                    message = f"{func} is about a tensor that is not on {self.device}"
                    raise NotReplayable(message)
            elif isinstance(value, (list, tuple)):
                self._refuse_elsewhere(func, value)
            elif isinstance(value, dict):
                self._refuse_elsewhere(func, value.values())


def _is_number(value: torch.Tensor) -> bool:
    """Whether torch reads a value on the host."""
    return value.numel() == 1 and value.device.type == "cpu"


def _forget_pending(layers: Iterable[Any]) -> None:
    """A capture that failed may have deferred a token, which the next step brings again."""
    for layer in layers:
        if isinstance(layer, PlugLayer):
            layer.take_pending()
