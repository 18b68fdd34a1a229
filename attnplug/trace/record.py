"""Records a running model's trace: takes the edges of every layer's call to the file, through a
bounded queue, while the model goes on."""

import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import attnplug
from attnplug import api
from attnplug.errors import ArgumentError, PolicyError, UnsupportedCallError
from attnplug.models.hf import Binding, binding_of, tracing
from attnplug.models.layers import AttentionLayer, find_attention_layers, unwrap
from attnplug.models.sync import may_sync
from attnplug.ops.common.triton import triton
from attnplug.policies import AttentionCall, Edges, Phase, Policy
from attnplug.trace.arrow import pa
from attnplug.trace.layout import Layout
from attnplug.trace.tokens import token_bytes
from attnplug.trace.writer import Writer, check_path

WAITING = 2  # layers whose edges may wait for the writer


@contextmanager
def record(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    name: str = "",
    progress: Callable[[int], None] | None = None,
) -> "Iterator[Recording]":
    """`with record(model, path):` writes what the model's tracing method finds in every forward
    pass to one file, read it with `attnplug.trace.read`. What the model computes does not change.

    The model must have a policy with a tracing method (`attnplug.apply(model, "momo+stream")`).
    Prefills, chunks and decode steps follow each other as steps of the file. Inside, compiled
    functions run eagerly: a trace is taken on the host, and a CUDA graph's replay never passes
    there. `tokenizer` gives the file its texts, `name` says which model it was, `progress` is
    called with the layer's index after each layer. An exception leaves no file.

    Raises TraceFileError where no file can be at `path`, PolicyError where nothing is traced, and
    UnsupportedCallError where no forward pass came or one is being captured.
    """
    target = unwrap(model)
    what = api.report(target).policy
    layers = [
        layer for layer in find_attention_layers(target) if _tracing_method(layer) is not None
    ]
    if not layers:
        raise PolicyError(
            f"the policy {what!r} traces no layer of this model; apply one that does, such as "
            '"momo+stream", and see attnplug.report(model)'
        )
    recording = Recording(path, _about(target, what, layers, tokenizer, name), progress)
    writers = {layer.module: LayerEdges(recording, layer.index) for layer in layers}
    embeddings: Any = target.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(recording.see_tokens)
    try:
        with tracing(writers), torch.compiler.set_stance("force_eager"):
            yield recording
        recording.finish(tokenizer)
    except BaseException:
        recording.discard()
        raise
    finally:
        hook.remove()


def _tracing_method(layer: AttentionLayer) -> Phase | None:
    binding: Binding[Policy] | None = binding_of(layer.module)
    return None if binding is None or binding.policy is None else binding.policy.trace


def _about(
    target: Any, what: str, layers: list[AttentionLayer], tokenizer: Any, name: str
) -> dict[str, Any]:
    """What the file says of its origin; no folder of this machine, so that bytes agree."""
    method: Any = _tracing_method(layers[0])
    return {
        "model": name or Path(getattr(target.config, "_name_or_path", "") or "").name,
        "tokenizer": "" if tokenizer is None else type(tokenizer).__name__,
        "policy": what,
        "method": method.name,
        "options": dataclasses.asdict(method),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """The packages that a trace depends on."""
    return {
        "attnplug": attnplug.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "pyarrow": pa.__version__,
    }


@dataclasses.dataclass(frozen=True)
class LayerEdges:
    """One layer's place in a recording (an `EdgeWriter`)."""

    recording: "Recording"
    layer: int

    def emit(self, call: AttentionCall, edges: Edges | None) -> None:
        """Take the edges of a call, None where there are none."""
        self.recording.emit(self.layer, call, edges)


class Recording:
    """A recording that goes on. `edges` counts what came so far, `steps` the forward passes.

    `tokens` are the ids of each sequence, where they are known before the model runs; else a hook
    of the embeddings tells them (`see_tokens`).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        about: dict[str, Any],
        progress: Callable[[int], None] | None = None,
        tokens: list[np.ndarray] | None = None,
    ):
        self.path = check_path(path)  # before the model runs
        self.edges = 0
        self.steps = 0
        self._about = about
        self._progress = progress
        self._layer: int | None = None
        self._ids: np.ndarray | None = None
        self._known = tokens is not None
        self._tokens: list[np.ndarray] | None = tokens or []
        self._captured: dict[int, np.ndarray] = {}
        self._writer: Writer | None = None
        self._begun: list[tuple[list[int], list[int]]] = []
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="attnplug-trace", daemon=True)

    @property
    def empty(self) -> bool:
        """Whether no edge has come, so that there is nothing to finish."""
        return self._writer is None

    @property
    def nbytes(self) -> int:
        """About the bytes of the file so far, those included that wait to be written."""
        return 0 if self._writer is None else self._writer.nbytes

    def see_tokens(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook of the embeddings: which tokens a step is about."""
        ids = args[0] if args else None
        self._ids = None
        if isinstance(ids, torch.Tensor) and ids.dim() == 2 and may_sync(ids.is_cuda):
            self._ids = ids.cpu().numpy()

    def emit(self, layer: int, call: AttentionCall, edges: Edges | None) -> None:
        """Take the edges of one layer's call, None where there are none."""
        if not may_sync(call.q.is_cuda):
            raise UnsupportedCallError(
                "this forward pass is being captured into a CUDA graph, whose replays no trace can "
                "see; call the model eagerly while you record"
            )
        if self._layer is None or layer <= self._layer:
            self._begin(call)
        self._layer = layer
        if edges is not None:
            self._take(layer, call, edges)
        if self._progress is not None:
            self._progress(layer)

    def _take(self, layer: int, call: AttentionCall, edges: Edges) -> None:
        layout = Layout(edges.query_block, edges.block, edges.weights)
        if (
            self._writer is None
        ):  # the call knows the heads: a rank holds fewer than the config says
            self._writer = Writer(self.path, layout, kv_heads=call.k.shape[1], **self._about)
            self._thread.start()
        if call.q.shape[2] == 1:  # one query is a block of any size
            layout = dataclasses.replace(layout, query_block=self._writer.layout.query_block)
        if layout != self._writer.layout:
            raise ArgumentError(
                f"trace: layer {layer} has {layout} and the file {self._writer.layout}; give the "
                "methods the same blocks, or record them one by one"
            )
        while self._begun:  # they waited for the layout
            self._put(partial(self._writer.begin, *self._begun.pop(0)))
        index, weight = edges.index.cpu().numpy(), edges.weight.cpu().numpy()
        self.edges += int((index >= 0).sum())
        if edges.captured is not None:
            found = edges.captured.double().sum(0).cpu().numpy()
            self._captured[layer] = self._captured.get(layer, 0.0) + found
        self._put(partial(self._writer.append, layer, index, weight))

    def finish(self, tokenizer: Any) -> None:
        """Wait for the writer and close the file."""
        if self._writer is None:
            raise UnsupportedCallError(
                "no forward pass went through a traced layer while recording; call the model (or "
                "generate) inside the with block"
                if self._layer is None
                else "the method that is traced read every block of this text, so that its choice "
                "is no trace: methods run dense in short caches. Give it a longer text or "
                "min_tokens=0, or trace the model's attention (of='model')"
            )
        while self._begun:
            self._put(partial(self._writer.begin, *self._begun.pop(0)))
        self._jobs.put(None)
        self._thread.join()
        self._raise()
        if self._tokens is not None:
            known = [row[row >= 0] for row in self._tokens]
            named = {} if tokenizer is None else token_bytes(tokenizer, np.concatenate(known))
            self._writer.name_tokens(self._tokens, named)
        self._writer.captured = {
            str(layer): [float(share) for share in found[:, 0] / np.maximum(found[:, 1], 1)]
            for layer, found in sorted(self._captured.items())
        }
        self._writer.close()

    def discard(self) -> None:
        """Stop and leave no file."""
        if self._writer is not None:
            if self._thread.is_alive():
                self._error = self._error or UnsupportedCallError("the recording was given up")
                self._jobs.put(None)
                self._thread.join()
            self._writer.discard()

    def _begin(self, call: AttentionCall) -> None:
        """A forward pass begins: where its queries stand in each sequence."""
        batch, _, queries, _ = call.q.shape
        size = call.k.shape[2]
        start, length = call.first_key, call.lengths
        starts = [0] * batch if start is None else start.expand(batch).tolist()
        lengths = [size] * batch if length is None else length.expand(batch).tolist()
        first, real = [], []
        for low, end in zip(starts, lengths, strict=True):
            skipped = min(max(0, low - (end - queries)), queries)
            first.append(max(0, end - queries + skipped - low))
            real.append(queries - skipped)
        self.steps += 1
        if not self._known:
            self._note_tokens(first, real, queries)
        self._begun.append((first, real))

    def _note_tokens(self, first: list[int], real: list[int], queries: int) -> None:
        """Put the step's token ids into each sequence."""
        ids, self._ids = self._ids, None
        if self._tokens is None or ids is None or ids.shape != (len(first), queries):
            self._tokens = None
            return
        if not self._tokens:
            self._tokens = [np.zeros(0, np.int32) for _ in first]
        if len(self._tokens) != len(first):
            return  # the writer refuses the step
        for b, (begin, count) in enumerate(zip(first, real, strict=True)):
            row = np.full(max(len(self._tokens[b]), begin + count), -1, np.int32)
            row[: len(self._tokens[b])] = self._tokens[b]
            row[begin : begin + count] = ids[b, queries - count :]
            self._tokens[b] = row

    def _put(self, job: Callable[[], None]) -> None:
        self._raise()
        self._jobs.put(job)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """The thread: every job in order; after an error the rest is dropped."""
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # raised where the model runs, at the next layer
                    self._error = error
