"""What a policy is: the call it gets, the phase protocol, the composition of phases, and the
grammar of policy strings ("momo(gamma=16)+gather(k=32)")."""

import ast
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from attnplug.errors import PolicyError

if TYPE_CHECKING:
    from transformers.cache_utils import StaticLayer

    from attnplug.models.cache import PlugLayer


SLOTS = frozenset({"prefill", "decode", "trace"})


@dataclasses.dataclass
class AttentionCall:
    """One attention layer's work in one forward pass, as a policy sees it.

    q is `[B,Hq,T,D]`; k, v are `[B,Hkv,S,D]`, not repeated, and may be longer than what is valid:
    `lengths` (`[1]`, int64, or None for S) counts the valid keys, the T queries being the last of
    them. `key_mask` `[B,S]` is False where a key must not be seen (padding); `start` `[B]` is the
    first key it lets through, given for T > 1 only. `state` is the layer's static cache, a method's
    own layer where generate or `make_cache` made it, or None. `sink` takes the edges that a tracing
    method finds, while `attnplug.trace.record` is on. The attention is causal; a policy returns
    `[B,Hq,T,D]`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    start: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    state: "StaticLayer | None" = None
    sink: "Sink | None" = None

    def settle(self) -> None:
        """Write the token that the cache layer still holds (see `PlugLayer`): whoever reads k, v or
        `lengths` and does not take it himself must call this first."""
        settle = getattr(self.state, "settle", None)
        if settle is not None:
            settle()

    @property
    def whole(self) -> bool:
        """Whether the queries are the whole sequence (a first prefill), known from shapes."""
        return self.lengths is None and self.q.shape[2] == self.k.shape[2]

    @property
    def first_key(self) -> torch.Tensor | None:
        """The first real key of each row, int32 `[B]`, or None for 0: blocks count from there. A
        decode step is told the mask and not where it begins."""
        if self.start is not None or self.key_mask is None:
            return self.start
        return self.key_mask.to(torch.uint8).argmax(-1).to(torch.int32)

    @property
    def options(self) -> dict[str, Any]:
        """What every attention op takes of the call: scale, softcap, lengths and key mask."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "lengths": self.lengths,
            "key_mask": self.key_mask,
        }


@dataclasses.dataclass(frozen=True)
class Edges:
    """What a tracing method found in one call: the key blocks `index` (int32 `[B,Hq,NQ,K]`, -1 =
    none) that each query block attends to and what they weigh (float32, like index), in blocks of
    `query_block` queries and `block` keys; what a weight means; and, where it was measured, how
    much of the attention they hold: the sum over some queries and their number, `[B,Hq,2]`."""

    index: torch.Tensor
    weight: torch.Tensor
    query_block: int
    block: int
    weights: str
    captured: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Reads:
    """The key blocks that a method reads for each query block: int32 `[B,Hq,NQ,K]`, no block
    twice, -1 = none, in blocks of `query_block` queries and `block` keys."""

    index: torch.Tensor
    query_block: int
    block: int


class Sink(Protocol):
    """Where one layer's edges go, on the host."""

    def emit(self, call: AttentionCall, edges: Edges | None) -> None:
        """Take the edges of a call, None where there are none to tell."""
        ...


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What is known of an attention layer before it runs."""

    heads_q: int
    heads_kv: int
    head_dim: int
    softcap: float
    sinks: bool
    device: torch.device


class Phase:
    """One method: a frozen dataclass of options with `attend`. Subclass it and register it with
    `attnplug.policies.register`.

    `phases` names what it can serve, of "prefill" (T > 1), "decode" (T = 1) and "trace" (look on
    while another serves); `on_request` what it serves only where a policy says so by the phase's
    name. A phase holds no tensors: what it must remember lives in the cache layer that
    `cache_layer` makes.
    """

    name: ClassVar[str]
    phases: ClassVar[frozenset[str]]
    takes_held: ClassVar[bool] = False  # writes the token that a cache layer holds, or settles it
    on_request: ClassVar[frozenset[str]] = frozenset()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output `[B,Hq,T,D]` of one call."""
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def observe(self, call: AttentionCall, served: "Phase") -> Edges | None:
        """The edges of a call that the phase `served` has served; None where there are none to
        tell. Must leave the call's tensors as they are."""
        raise NotImplementedError(f"{type(self).__name__} has no observe")

    def reads(self, call: AttentionCall) -> Reads | None:
        """The key blocks that serving this call reads; None where it reads all of them."""
        return None

    def refusal(self, shape: LayerShape) -> str | None:
        """Why this method cannot serve such a layer (which then stays dense), or None."""
        return None

    def note(self, shape: LayerShape) -> str:
        """What `report` says of this method on such a layer, such as where it runs dense."""
        return ""

    def cache_layer(self, max_length: int) -> "PlugLayer | None":
        """The cache layer with this method's state, or None where it needs none."""
        return None

    def __str__(self) -> str:
        options = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(options)})" if options else self.name


def check_option(method: str, option: str, value: object, valid: bool, needed: str) -> None:
    """Raise PolicyError naming the method, the option, the value that came and what is needed."""
    if not valid:
        raise PolicyError(f"{method}: {option}={value!r}, needs {needed}")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A composition of methods: one for prefill, one for decode, optionally one that traces.

    >>> str(Policy(prefill=Momo(gamma=32)))
    'momo(gamma=32)'
    """

    prefill: Phase | None = None
    decode: Phase | None = None
    trace: Phase | None = None

    def __post_init__(self) -> None:
        from attnplug.policies.dense import Dense  # dense is a policy itself: it imports this file

        for slot in ("prefill", "decode", "trace"):
            phase = getattr(self, slot)
            if phase is None:
                object.__setattr__(self, slot, None if slot == "trace" else Dense())
            elif not isinstance(phase, Phase):
                raise PolicyError(
                    f"Policy: {slot} is {phase!r}, needs a method such as attnplug.Dense()"
                )
            elif slot not in phase.phases | phase.on_request:
                raise PolicyError(
                    f"Policy: {phase.name} cannot be the {slot} method, it serves "
                    f"{' and '.join(sorted(phase.phases | phase.on_request))}"
                )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Run the phase that the static shape of the queries asks for, and let the tracing method
        look on where someone records."""
        phase = self.decode if call.q.shape[2] == 1 else self.prefill
        assert phase is not None  # filled by __post_init__
        if not phase.takes_held:
            call.settle()
        out = phase.attend(call)
        if self.trace is not None and call.sink is not None:
            call.sink.emit(call, self.trace.observe(call, phase))
        return out

    def __str__(self) -> str:
        prefill, decode = self.prefill, self.decode
        assert prefill is not None and decode is not None  # filled by __post_init__
        slots = {"prefill": prefill, "decode": decode}
        if self.trace is not None:
            slots["trace"] = self.trace
        served = [prefill] if prefill == decode else [prefill, decode]
        named = [phase for phase in served if phase.name != "dense"]
        asked = any(slot in phase.on_request for slot, phase in slots.items())
        if asked or (len(served) > 1 and any(len(phase.phases) > 1 for phase in named)):
            return ", ".join(f"{slot}={phase}" for slot, phase in slots.items())
        traced = [] if self.trace is None else [self.trace]
        return "+".join(map(str, [*named, *traced] or served[:1]))


def parse_policy(text: str, methods: Mapping[str, type[Phase]]) -> Policy:
    """The Policy that a string such as "momo(gamma=16)+gather(k=32)" describes.

    Terms are joined with "+"; each is a method's name, with options as Python keywords. A method
    takes the phases that it serves and no other term claims; the rest is dense. Phases can also be
    named: "prefill=momo, decode=dense, trace=stream".
    """
    if not text.strip():
        raise PolicyError(f"the policy is empty; there are {', '.join(sorted(methods))}")
    whole = _parse_call(text)
    if whole.keywords and not whole.args:
        named = _keywords(whole, text)
        if not named.keys() <= SLOTS:
            raise PolicyError(
                f"policy {text!r}: a phase is prefill, decode or trace, not "
                f"{', '.join(sorted(named.keys() - SLOTS))}"
            )
        return Policy(**{slot: _parse_term(node, text, methods) for slot, node in named.items()})
    if len(whole.args) != 1 or whole.keywords:
        raise PolicyError(f"policy {text!r}: join methods with '+', as in momo+dense")
    terms = [_parse_term(node, text, methods) for node in _terms(whole.args[0])]
    slots: dict[str, Phase] = {}
    for phase in sorted(terms, key=lambda term: len(term.phases)):
        free = [slot for slot in sorted(phase.phases) if slot not in slots]
        if not free:
            taken = slots[min(phase.phases)]
            raise PolicyError(
                f"policy {text!r}: {taken.name} and {phase.name} both want to be the "
                f"{'/'.join(sorted(phase.phases))} method; keep one"
            )
        slots.update(dict.fromkeys(free, phase))
    return Policy(**slots)


def _parse_call(text: str) -> ast.Call:
    """The text as the arguments of a call."""
    try:
        node = ast.parse(f"_({text.strip()})", mode="eval").body
    except SyntaxError as error:
        raise PolicyError(
            f"policy {text!r} cannot be read ({error.msg}); write for example "
            '"momo(gamma=16)" or "momo+dense"'
        ) from error
    if not isinstance(node, ast.Call):
        raise PolicyError(f"policy {text!r} cannot be read; write for example 'momo+dense'")
    return node


def _keywords(call: ast.Call, text: str) -> dict[str, ast.expr]:
    """Each keyword's value. Python's parser takes a name twice, and `**` without a name."""
    named: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise PolicyError(f"policy {text!r}: write the options out, as in momo(gamma=16)")
        if keyword.arg in named:
            raise PolicyError(f"policy {text!r}: {keyword.arg} is given twice")
        named[keyword.arg] = keyword.value
    return named


def _terms(node: ast.expr) -> list[ast.expr]:
    terms: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.insert(0, node.right)
        node = node.left
    return [node, *terms]


def _parse_term(node: ast.expr, text: str, methods: Mapping[str, type[Phase]]) -> Phase:
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise PolicyError(f"policy {text!r}: {ast.unparse(node)!r} is not a method's name")
    if call.func.id not in methods:
        raise PolicyError(
            f"policy {text!r}: there is no method {call.func.id!r}; there are "
            f"{', '.join(sorted(methods))}"
        )
    if call.args:
        raise PolicyError(f"policy {text!r}: options need their names, as in momo(gamma=16)")
    cls = methods[call.func.id]
    known = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {}
    for name, value in _keywords(call, text).items():
        if name not in known:
            raise PolicyError(
                f"policy {text!r}: {cls.name} has no option {name!r}; it has "
                f"{', '.join(known) or 'none'}"
            )
        try:
            options[name] = ast.literal_eval(value)
        except ValueError as error:
            raise PolicyError(
                f"policy {text!r}: {name}={ast.unparse(value)} is not a literal"
            ) from error
    return cls(**options)
