"""A step compiled layer by layer: layers that compute the same become one piece of code.

torch.compile traces a step whole and hands this backend its graph. The graph is cut where one
numbered module (a decoder layer) ends, and inductor compiles each different piece once. Layers that
differ only in their weights and caches share a piece, whose inputs these are. The step stays one
graph to dynamo (`fullgraph`), and one function of tensors to whoever captures it.
"""

import functools
import logging
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.fx.passes.split_module import split_module

from attnplug.models.captured import Around, GuardedStep, Step

NUMBERED = re.compile(r".*?\.\d+(?=\.|$)")  # the outermost numbered module, a decoder layer
LOG = logging.getLogger("attnplug")


class LayeredStep:
    """A step compiled layer by layer with the options of a CompileConfig, and captured where these
    ask for CUDA graphs. One that dynamo cannot trace whole is compiled as the config says.

    Each kind of call (rows, padding, sampling, autocast, an adapter) costs a graph, and torch keeps
    only so many of one function. Calls of further kinds run `spare`, which compiles nothing."""

    def __init__(
        self, step: Step, config: Any, device: torch.device, sums: dict[str, Any], spare: Step
    ):
        options = torch._inductor.list_mode_options(config.mode) if config.mode else {}
        options = options | sums | (config.options or {})
        graphs = options.pop("triton.cudagraphs", False) and device.type == "cuda"
        if device.type == "cuda":
            warm_pool()

        def compiled(around: Around | None = None) -> Step:
            backend = functools.partial(compile_by_layer, options=options, around=around)
            made = torch.compile(step, backend=backend, fullgraph=True, dynamic=config.dynamic)
            return functools.partial(_with_constant_floats, made)

        self.now: Step = GuardedStep(compiled) if graphs else compiled()
        self.whole = functools.partial(torch.compile, step, **config.to_dict())
        self.spare, self.is_spared, self.spared_calls = spare, False, 0

    def begin(self) -> None:
        """A call of generate begins."""
        self.is_spared = False
        for step in (self.now, self.spare):
            begin = getattr(step, "begin", None)
            if begin is not None:
                begin()

    def __call__(self, *arguments: Any) -> torch.Tensor | None:
        if self.is_spared:
            return self.spare(*arguments)
        try:
            return self.now(*arguments)
        except FailOnRecompileLimitHit:
            self.is_spared = True
            self.spared_calls += 1
            LOG.warning("%s", self)
            return self.spare(*arguments)
        except Unsupported as why:
            LOG.warning("a decode step is compiled whole, as it has graph breaks: %s", why)
            self.now = self.whole()
            return self.now(*arguments)

    def __str__(self) -> str:
        """How the last call's steps ran where they were not compiled, "" where they were."""
        if not self.is_spared:
            return ""
        kinds = torch._dynamo.config.recompile_limit
        return (
            "decode steps ran uncompiled: calls of one model may differ in rows, padding, sampling "
            f"and adapters, and torch keeps {kinds} compiled kinds "
            f"(torch._dynamo.config.recompile_limit); calls that ran so: {self.spared_calls:,}"
        )


def _with_constant_floats(step: Step, *arguments: Any) -> torch.Tensor | None:
    """Floats of the model, such as an attention's scale, are constants of a graph. Dynamo makes
    an input of a float that has changed between two calls, and torch 2.11 cannot compile a piece
    that has such an input."""
    with torch._dynamo.config.patch(specialize_float=True):
        return step(*arguments)


def warm_pool() -> None:
    """Have inductor start the processes that compile kernels, as its own backend does: while dynamo
    traces, they load. Without them it compiles one kernel after the other in this process."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


class Piece(torch.nn.Module):
    """A compiled piece in the place of the graph that it was compiled from."""

    def __init__(self, compiled: Callable[..., Any], single: bool):
        super().__init__()
        self.compiled, self.single = compiled, single

    def forward(self, *inputs: Any) -> Any:
        outputs = self.compiled(*inputs)
        return outputs[0] if self.single else outputs


def compile_by_layer(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    around: Around | None = None,
) -> Callable[..., Any]:
    """A backend of torch.compile; `options` are inductor's, `around` makes of a graph what dynamo
    is to run in its place."""
    regions = _regions(graph)
    whole = split_module(graph, graph, regions.__getitem__, keep_original_order=True)
    found: dict[Any, Callable[..., Any]] = {}
    for name, piece in list(whole.named_children()):
        assert isinstance(piece, fx.GraphModule)
        key = _key(piece)
        single = _make_flat(piece)
        if key not in found:
            found[key] = _compile(piece, options)
        setattr(whole, name, Piece(found[key], single))
    return whole if around is None else around(whole)


def _regions(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """The number of each node's region: consecutive nodes of one layer, or of none."""
    regions: dict[fx.Node, int] = {}
    now, number = "", 0
    for node in graph.graph.nodes:
        paths = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        layer = next((match[0] for match in map(NUMBERED.match, paths) if match), "")
        if node.op not in ("placeholder", "output", "get_attr") and layer != now:
            now, number = layer, number + 1
        regions[node] = number
    return regions


def _key(piece: fx.GraphModule) -> tuple[Any, ...]:
    """What makes two pieces the same: operations, constants, and the sizes of what comes in."""
    numbers: dict[fx.Node, int] = {}
    key = []
    for node in piece.graph.nodes:
        numbers[node] = len(numbers)
        arguments = fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}")
        target: Any = "" if node.op in ("placeholder", "output") else node.target
        if node.op in ("get_attr", "call_module"):  # a name tells nothing of what it names
            target = id(operator.attrgetter(node.target)(piece))
        value = _described(node.meta.get("example_value")) if node.op == "placeholder" else ""
        key.append((node.op, target, repr(arguments), value))
    return tuple(key)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    parts = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)
    return repr((*parts, value.requires_grad))


def _make_flat(piece: fx.GraphModule) -> bool:
    """Have a piece return a tuple. Says whether it returned one thing alone."""
    output = next(node for node in piece.graph.nodes if node.op == "output")
    if isinstance(output.args[0], (tuple, list)):
        return False
    output.args = ((output.args[0],),)
    piece.recompile()
    return True


def _compile(piece: fx.GraphModule, options: dict[str, Any] | None) -> Callable[..., Any]:
    inputs = [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]
    return torch._inductor.standalone_compile(
        piece,
        inputs,
        dynamic_shapes="from_tracing_context",
        options={"config_patches": options or {}},
    )
