"""What runs where on a model with a policy, as `attnplug.report` tells it."""

from dataclasses import dataclass

from rich.table import Table


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
class Report:
    """What runs where. `layers` has one LayerReport a layer. `cache` says why generate keeps
    transformers' own cache ("" where it prepares attnplug's). `loop` says why it decodes with
    transformers' own loop, always or in the last call ("" where it is attnplug's). `parallel` says
    which heads a rank holds under tensor parallelism. `batching` says what continuous batching
    serves otherwise than generate does. `fused` says which projections the last call's steps
    multiplied at once, and why not others. `steps` says when the steps of generate will be compiled
    ("" where they are, or are not to be). `length` says which methods serve only prompts or caches
    that are longer than what the model can read. `str()` gives text, `table()` a rich table."""

    policy: str
    layers: tuple[LayerReport, ...]
    cache: str = ""
    loop: str = ""
    parallel: str = ""
    batching: str = ""
    fused: str = ""
    steps: str = ""
    length: str = ""

    def table(self) -> Table:
        """The report as a rich table; runs of layers alike but for their index share a row."""
        table = Table(title=f"attnplug: {self.policy}", caption="\n".join(self._notes()) or None)
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
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        notes = (
            self.length,
            self.parallel,
            self.cache,
            self.loop,
            self.batching,
            self.fused,
            self.steps,
        )
        return [note for note in notes if note]

    def _spans(self) -> list[tuple[str, LayerReport]]:
        spans: list[list[LayerReport]] = []
        for layer in self.layers:
            if spans and _looks(spans[-1][-1]) == _looks(layer):
                spans[-1].append(layer)
            else:
                spans.append([layer])
        ends = [(span[0].index, span[-1].index, span[0]) for span in spans]
        return [(f"{a}-{b}" if a < b else str(a), layer) for a, b, layer in ends]


def _looks(layer: LayerReport) -> tuple[str, ...]:
    return (layer.kind, layer.prefill, layer.decode, layer.reason)
