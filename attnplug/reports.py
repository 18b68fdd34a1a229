"""What runs where on a model with a policy, as `attnplug.report` tells it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.table import Table

from attnplug.call import Served


@dataclass(frozen=True)
class LayerReport:
    """One attention layer: what serves its prefill and its decode, and why not the policy."""

    index: int
    name: str
    kind: str
    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True)
class LastCall:
    """What has served one attention layer in the last call, and why dense did in its method's
    place; "" for a prefill or a decode that did not come."""

    index: int
    prefill: str
    decode: str


LayerT = TypeVar("LayerT", LayerReport, LastCall)


@dataclass(frozen=True)
class Report:
    """What runs where. `layers` has one LayerReport a layer. `cache` says why generate keeps
    transformers' own cache ("" where it prepares attnplug's). `loop` says why it decodes with
    transformers' own loop, always or in the last call ("" where it is attnplug's). `parallel` says
    which heads a rank holds under tensor parallelism. `batching` says what continuous batching
    serves otherwise than generate does. `fused` says which projections the last call's steps
    multiplied at once, and why not others. `kernels` counts the norms, rotary embeddings and
    activations that had a kernel each, after the first call on a GPU. `steps` says when the steps
    of generate will be compiled ("" where they are, or are not to be). `length` says which methods
    serve only prompts or caches that are longer than what the model can read. `last` says for each
    layer what has really served the last call: of generate, of a forward pass (compiled code of
    your own aside), or of continuous batching. `str()` gives text, `table()` a rich table."""

    policy: str
    layers: tuple[LayerReport, ...]
    cache: str = ""
    loop: str = ""
    parallel: str = ""
    batching: str = ""
    fused: str = ""
    kernels: str = ""
    steps: str = ""
    length: str = ""
    last: tuple[LastCall, ...] = ()

    def table(self) -> Table:
        """The report as a rich table; runs of layers alike but for their index share a row."""
        caption = "\n".join([*self._notes(), *self._last_calls()])
        table = Table(title=f"attnplug: {self.policy}", caption=caption or None)
        for column in ("layers", "kind", "prefill", "decode", "why / note"):
            table.add_column(column)
        for span, layer in self._spans():
            table.add_row(span, layer.kind, layer.prefill, layer.decode, layer.reason)
        return table

    def __str__(self) -> str:
        lines = [f"policy {self.policy}"]
        for span, layer in self._spans():
            line = f"layers {span} ({layer.kind}): prefill {layer.prefill}, decode {layer.decode}"
            lines.append(f"{line}; {layer.reason}" if layer.reason else line)
        return "\n".join([*lines, *self._notes(), *self._last_calls()])

    def _notes(self) -> list[str]:
        notes = (
            self.length,
            self.parallel,
            self.cache,
            self.loop,
            self.batching,
            self.fused,
            self.kernels,
            self.steps,
        )
        return [note for note in notes if note]

    def _last_calls(self) -> list[str]:
        """A line for each run of layers that were served alike."""
        lines = []
        for span, layer in _spans(self.last, lambda each: (each.prefill, each.decode)):
            slots = {"prefill": layer.prefill, "decode": layer.decode}
            named = ", ".join(f"{slot} by {served}" for slot, served in slots.items() if served)
            lines.append(f"last call, layers {span}: {named}")
        return lines

    def _spans(self) -> list[tuple[str, LayerReport]]:
        return _spans(self.layers, lambda x: (x.kind, x.prefill, x.decode, x.reason))


def last_calls(served: Mapping[int, Mapping[str, Served]]) -> tuple[LastCall, ...]:
    """By what each layer of these indices was served, in their order."""
    slots = "prefill", "decode"
    return tuple(
        LastCall(index, *(str(by.get(slot, "")) for slot in slots))
        for index, by in sorted(served.items())
    )


def _spans(
    layers: Sequence[LayerT], looks: Callable[[LayerT], tuple[str, ...]]
) -> list[tuple[str, LayerT]]:
    """Runs of layers that look alike: their indices, such as "0-3", and the first of each."""
    runs = [list(run) for _, run in itertools.groupby(layers, looks)]
    ends = [(run[0].index, run[-1].index, run[0]) for run in runs]
    return [(f"{a}-{b}" if a < b else str(a), layer) for a, b, layer in ends]
