"""The policy of a server: what an engine's pages can serve, for all layers or for spans of them."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from attnplug.errors import ServeError
from attnplug.policies import Dense, Gather, Gvr, Momo, Phase, Policy, Sketch, Stream, parse

VARIABLE = "ATTNPLUG_POLICY"


class Engine(NamedTuple):
    """How errors call an engine, and what it offers in the place of what they refuse. `setting` is
    what holds the policy, `example` gives it, `offload` is the engine's own memory for pages on the
    host, `known` are the methods that it serves, and `instead` is for others by name."""

    name: str
    setting: str
    example: str
    offload: str
    known: str
    instead: Mapping[str, str]

    def error(self, text: str) -> ServeError:
        """What to raise."""
        return ServeError(f"attnplug in {self.name}: {text}")


@dataclasses.dataclass(frozen=True)
class Phases:
    """What serves one layer: momo or None for dense prefill, gather, gvr, sketch or None for dense
    decode; and what looks on at its prefill."""

    prefill: Momo | None = None
    decode: Gather | Gvr | Sketch | None = None
    trace: Stream | None = None

    @property
    def sparse(self) -> bool:
        """Whether anything but dense serves."""
        return self.prefill is not None or self.decode is not None


@dataclasses.dataclass(frozen=True)
class ServedPolicy:
    """A server's policy: that of all layers, and those of spans of layers, first to last. `text`
    is the policy of all layers."""

    engine: Engine
    whole: Phases
    spans: tuple[tuple[int, int, Phases], ...] = ()
    text: str = "dense"

    def of_layer(self, index: int) -> Phases:
        """What serves the layer of this index."""
        for first, last, phases in self.spans:
            if first <= index <= last:
                return phases
        return self.whole

    @property
    def decode(self) -> Gather | Gvr | Sketch | None:
        """The one method that decodes, on some layers at least."""
        found = [phases.decode for phases in self.all_phases if phases.decode is not None]
        return found[0] if found else None

    @property
    def trace(self) -> Stream | None:
        """The one method that traces, on some layers at least."""
        found = [phases.trace for phases in self.all_phases if phases.trace is not None]
        return found[0] if found else None

    @property
    def all_phases(self) -> list[Phases]:
        """Those of the spans, then those of the other layers."""
        return [*(phases for _, _, phases in self.spans), self.whole]

    @property
    def farthest(self) -> int:
        """The highest layer that a span begins with."""
        return max((first for first, _, _ in self.spans), default=0)

    def __post_init__(self) -> None:
        decodes = {phases.decode for phases in self.all_phases if phases.decode is not None}
        if len(decodes) > 1:
            raise self.engine.error(
                "the layers name different decode methods, "
                f"{' and '.join(sorted(map(str, decodes)))}; a step's pages and lengths are shared "
                "by all layers: keep one, and 'dense' elsewhere"
            )


def read_policy(option: Any, engine: Engine) -> ServedPolicy:
    """The policy that an option describes: a string, or a mapping with `policy` and `layers`.
    Raises ServeError or PolicyError."""
    if option is None:
        raise engine.error(f"no policy is given; {engine.example}")
    if isinstance(option, str):
        return ServedPolicy(engine, phases_of(option, engine), text=str(parse(option)))
    if not isinstance(option, Mapping) or not {"policy"} <= option.keys() <= {"policy", "layers"}:
        raise engine.error(
            f"{engine.setting} is {option!r}, needs a policy, or a mapping "
            'such as {"policy": "momo+gather", "layers": {"0-1": "dense"}}'
        )
    layers = option.get("layers") or {}
    if not isinstance(layers, Mapping):
        raise engine.error(f"layers is {layers!r}, needs a mapping such as {{'0-1': 'dense'}}")
    spans = tuple(
        (*_span(key, engine), phases_of(policy, engine)) for key, policy in layers.items()
    )
    whole, text = phases_of(option["policy"], engine), str(parse(option["policy"]))
    return ServedPolicy(engine, whole, spans, text)


def _span(key: str, engine: Engine) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(key))
    if found is None:
        raise engine.error(f"layers names {key!r}, needs an index or '4-7'")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise engine.error(f"layers names {key!r}, needs '{last}-{first}'")
    return first, last


def phases_of(policy: str, engine: Engine) -> Phases:
    """What a policy's string puts in the place of dense. Raises ServeError for a method that pages
    cannot serve, with what to use instead."""
    parsed: Policy = parse(policy)
    prefill, decode, trace = parsed.prefill, parsed.decode, parsed.trace
    for phase, known in ((prefill, (Dense, Momo)), (decode, (Dense, Gather, Gvr, Sketch))):
        assert phase is not None  # filled by Policy
        if type(phase) not in known:
            raise unserved(phase, engine)
    if trace is not None and type(trace) is not Stream:
        raise unserved(trace, engine)
    if parsed.trained is not None:
        raise unserved(parsed.trained, engine)
    if isinstance(decode, Gather) and decode.kv == "host":
        raise engine.error(
            f"gather(kv='host') is not served, since {engine.name} owns the pages; use "
            f"{engine.name}'s {engine.offload}, with dense decode"
        )
    if isinstance(decode, Sketch):
        _check_sketch(decode, engine)
    return Phases(
        prefill if isinstance(prefill, Momo) else None,
        decode if isinstance(decode, Gather | Gvr | Sketch) else None,
        trace if isinstance(trace, Stream) else None,
    )


def _check_sketch(sketch: Sketch, engine: Engine) -> None:
    """Raise ServeError for options that pages leave no room for."""
    fixed = {
        "kv": f"{engine.name} owns the pages; use its {engine.offload}, with dense decode",
        "bytes": "codes of pages have 32 bytes, or 24 where a head has fewer than 96 channels",
        "tail": "the rest is always estimated over pages",
        "audit": "audits look at a cache of transformers",
    }
    for option, why in fixed.items():
        value = getattr(sketch, option)
        if value != getattr(Sketch, option):
            raise engine.error(f"sketch({option}={value!r}) is not served: {why}; drop {option}")


def fp8_refusal(policy: ServedPolicy) -> str:
    """Why a policy cannot be served over pages in fp8, and what to use; "" where it can."""
    decode = policy.decode
    if policy.trace is not None:
        return "stream looks on at keys in 16 bits; drop the trace, or use a cache in 16 bits"
    if isinstance(decode, Gvr | Sketch):
        return (
            f"{decode.name} makes its codes of keys in 16 bits; use gather, or a cache in 16 bits"
        )
    if decode is not None and decode.bounds == "exact":
        return "gather's summaries are INT8 codes over fp8 keys; drop bounds='exact'"
    return ""


def unserved(phase: Phase, engine: Engine) -> ServeError:
    """What to raise for a method that pages cannot serve."""
    return engine.error(
        f"{phase.name} is not served; use {engine.instead.get(phase.name, engine.known)}"
    )
