"""A compiled step as one CUDA graph of our own, which replays without a look at guards.

A step that is compiled in pieces has as many launches and more work for the host than one whole
program. Captured once a call of generate, it has one launch. That is right for steps whose tensors
stay where they are and that want nothing of the host in between, as those of the decode loop do.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

Step = Callable[..., torch.Tensor | None]
Replay = Callable[[], torch.Tensor | None]


class CapturedStep:
    """Runs the first step of a call as it is, for guards and for what it does on the host; captures
    the second, and replays it from there on. `begin` starts a call."""

    def __init__(self, step: Step):
        self.step = step
        self.replay: Replay | None = None
        self.cache: Callable[[], Any] = lambda: None  # weakly: it may be most of the memory
        self.about: tuple[Any, ...] = ()
        self.first = True

    def begin(
        self, model: torch.nn.Module, cache: Any, buffers: Iterable[Any], *constants: Any
    ) -> None:
        """A call of generate begins. The graph of the last call serves again where it is about the
        same tensors in the same places, and the same constants."""
        tensors = [each for each in buffers if each is not None]
        tensors += [*model.parameters(), *model.buffers(), *_tensors(cache.layers)]
        about = [(each.data_ptr(), each.shape) for each in tensors], constants
        if cache is not self.cache() or about != self.about:
            self.replay = None
        self.cache, self.about, self.first = weakref.ref(cache), about, True

    def __call__(self, *arguments: Any) -> torch.Tensor | None:
        if self.first:
            self.first = False
            return self.step(*arguments)
        if self.replay is None:
            self.replay = capture(lambda: self.step(*arguments))
        return self.replay()


def capture(step: Replay) -> Replay:
    """Capture a step, without running it. The replay returns the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate meanwhile: a tokenizer's, a server's, a trace's writer.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step()

    def replay() -> torch.Tensor | None:
        graph.replay()
        return found

    return replay


def _tensors(layers: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that are attributes of a cache's layers, or in tuples that are."""
    values = [value for layer in layers for value in vars(layer).values()]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else [value])]
    return [part for part in parts if isinstance(part, torch.Tensor)]
