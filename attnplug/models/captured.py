"""A compiled step as one CUDA graph of our own, which replays without a look at guards.

A step that is compiled in pieces has as many launches and more work for the host than one whole
program. Captured, it has one launch. That is right for steps whose tensors stay where they are and
that want nothing of the host in between, as those of the decode loop do. Where dynamo guards a
step, a graph serves later calls of generate, too, which are about the same memory.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[..., torch.Tensor | None]
Replay = Callable[[], torch.Tensor | None]
Around = Callable[[Callable[..., Any]], Callable[..., Any]]  # what is to run in a graph's place


class CapturedStep:
    """Runs the first step of a call as it is, for what it does on the host, unless `ahead` has
    captured it; captures the second, and replays it from there on. `begin` starts a call: nobody
    knows what has changed on the host since the last one, such as a hook, or what autocast has cast
    before."""

    def __init__(self, step: Step):
        self.step = step
        self.replay: Replay | None = None
        self.first = True
        self.stream: torch.cuda.Stream | None = None
        self.kind: int | None = None  # of the call, where it was told
        self.known: set[int] = set()  # kinds of calls that were captured behind a first step

    def begin(self) -> None:
        """A call of generate begins."""
        self.replay, self.first, self.kind = None, True, None

    def ahead(self, kind: int, *arguments: Any) -> None:
        """Capture the first step of a call before its time, where one of its kind has run before:
        what such a step does on the host is done then."""
        self.kind = kind
        if self.first and kind in self.known:
            self.replay, self.first = capture(lambda: self.step(*arguments), self._stream), False

    def __call__(self, *arguments: Any) -> torch.Tensor | None:
        if self.first:
            self.first = False
            return self.step(*arguments)
        if self.replay is None:
            self.replay = capture(lambda: self.step(*arguments), self._stream)
            if self.kind is not None:
                self.known.add(self.kind)
        return self.replay()

    def _stream(self) -> torch.cuda.Stream:
        """One for all captures of a device: cuBLAS keeps 32 MiB for each that it has seen."""
        if self.stream is None or self.stream.device_index != torch.cuda.current_device():
            self.stream = torch.cuda.Stream()
        return self.stream


class GuardedStep(CapturedStep):
    """A step that dynamo compiles. `compiled` compiles it, with its argument around each graph that
    dynamo finds.

    Each call's first step asks dynamo's guards, which choose a graph. Where that is the graph whose
    run has been captured, and its inputs are the same (all that it reads or writes: where tensors
    are, and what numbers are), the CUDA graph is replayed in its place, also for another cache that
    has come to the same memory. Later steps replay and ask nobody."""

    def __init__(self, compiled: Callable[[Around], Step]):
        super().__init__(compiled(functools.partial(_around, weakref.ref(self))))
        self.about: tuple[Any, ...] = ()  # what the captured run is about
        self.seen: tuple[Any, ...] = ()  # and the last one
        self.outputs: Any = None  # of the run that has been captured

    def run(self, graph: Callable[..., Any], inputs: tuple[Any, ...], key: Any) -> Any:
        """In the place of a graph, which `key` names, that dynamo's guards have chosen."""
        self.seen = key, *map(_place, inputs)
        if self.replay is not None and self.seen == self.about:
            self.replay()
            return self.outputs
        found = graph(*inputs)
        if self.replay is None:  # the last such run is the one that is captured
            self.about, self.outputs = self.seen, found
        return found

    def begin(self) -> None:
        self.first = True

    def __call__(self, *arguments: Any) -> torch.Tensor | None:
        if not self.first and self.seen != self.about:
            self.replay = self.outputs = None
        return super().__call__(*arguments)


def _around(owner: Callable[[], GuardedStep | None], graph: Callable[..., Any]) -> Any:
    """What dynamo is to run in the place of a graph. torch keeps it for good, and so it must not
    keep the step, whose CUDA graph has memory."""

    def run(*inputs: Any) -> Any:
        step = owner()
        assert step is not None  # which alone runs what is compiled
        return step.run(graph, inputs, run)

    return run


def _place(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.data_ptr(), value.shape, value.stride(), value.dtype


@contextmanager
def without_collection() -> Iterator[None]:
    """Within it Python looks for no cycles: a CUDA graph that it finds in one, of another model or
    another step, is destroyed, and that ends a capture that is under way."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


ROOM = 1 << 30  # bytes, more than a step's activations and logits


class OnStream(TorchDispatchMode):
    """Within it ops run on a stream, whichever is the current one."""

    def __init__(self, stream: torch.cuda.Stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.cuda.stream(self.stream):
            return func(*args, **(kwargs or {}))


def capture(step: Replay, on: Callable[[], torch.cuda.Stream]) -> Replay:
    """Capture a step on a stream that `on` returns, without running it. The replay returns the same
    tensor each time.

    Not `torch.cuda.graph`, which first gives all memory that nobody uses back to the driver: the
    next prompt would have to ask for it again, for milliseconds of each call. Here only where there
    is little left, as an allocator cannot free its own while a graph is captured.

    torch fills its generator's two numbers as a capture begins, and would do so on that stream. No
    kernel may run there: once six have run beside the current stream, an H200 waits 0.2 to 0.7 us
    more between any two kernels of any graph of the process (docs/log/house.md)."""
    graph, stream, current = torch.cuda.CUDAGraph(), on(), torch.cuda.current_stream()
    if torch.cuda.mem_get_info()[0] < ROOM:
        torch.cuda.empty_cache()
    stream.wait_stream(current)
    with torch.cuda.stream(stream), without_collection():
        # Other threads may allocate meanwhile: a tokenizer's, a server's, a trace's writer.
        with OnStream(current):
            graph.capture_begin(capture_error_mode="thread_local")
        try:
            found = step()
        finally:
            graph.capture_end()
    current.wait_stream(stream)

    def replay() -> torch.Tensor | None:
        graph.replay()
        return found

    return replay
