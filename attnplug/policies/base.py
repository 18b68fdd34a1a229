"""What a method is: the phase protocol, and the check of its options."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnplug.call import (
    AttentionCall,
    Edges,
    LayerShape,
    Reads,
    StepReads,
)
from attnplug.errors import PolicyError
from attnplug.ops.common.checks import HEAD_DIMS, why_not_width

if TYPE_CHECKING:
    from attnplug.models.cache import PlugLayer

SLOTS = frozenset({"prefill", "decode", "trace", "trained"})
MOST = 1 << 23  # of an option: blocks of 128 tokens, and 32 bits


class Phase:
    """One method: a frozen dataclass of options with `attend`. Subclass it and register it with
    `attnplug.policies.register`.

    `phases` names what it can serve, of "prefill" (T > 1), "decode" (T = 1), "trace" (look on
    while another serves) and "trained" (layers whose model picks what they read). `on_request`
    names what it serves only where a policy says so by the phase's name. A phase holds no tensors:
    what it must remember lives in the cache layer that `cache_layer` makes.
    """

    name: ClassVar[str]
    phases: ClassVar[frozenset[str]]
    takes_pending: ClassVar[bool] = False  # writes the cache layer's pending token, or flushes it
    takes_trained: ClassVar[bool] = False  # layers with an indexer are `trained`'s, unasked
    keeps_queries: ClassVar[bool] = False  # its cache layer keeps a prefill's last queries
    on_request: ClassVar[frozenset[str]] = frozenset()
    head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS  # that its ops have kernels for

    @property
    def kept(self) -> int:
        """The most keys that a decode step reads of a row, as `attnplug eval` shows beside a score;
        0 where the method does not say. A shorter row is read whole in any case."""
        return 0

    def step_reads(self, tokens: int, head_dim: int, room: int = 0) -> StepReads | None:
        """What a decode step reads of a row of `tokens`, as `attnplug eval` shows beside a score,
        in a cache with room for `room` of them, by default for no more; None where the method does
        not say."""
        return StepReads(min(self.kept, tokens)) if self.kept else None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output `[B,Hq,T,D]` of one call."""
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def serves_few(self, call: AttentionCall) -> bool:
        """Whether this method serves a call of a few queries over a cache, in the place of the
        method of the prefill."""
        return False

    def note_queries(self, call: AttentionCall) -> None:
        """Called on the method that decodes after each call of several queries, which the prefill
        method has served: for a method that keeps a prompt's queries, or makes something of its
        keys, which are in the cache."""

    def reads(self, call: AttentionCall) -> Reads | None:
        """The key blocks that serving this call reads; None where it reads all of them."""
        return None

    def query_grid(self) -> int | None:
        """A prefill that is cut at multiples of so many queries comes out as it does uncut; None
        where it may not be cut."""
        return None

    def resolve(self, slot: str, shape: LayerShape, layers: int) -> tuple["Phase", str]:
        """The method that is to serve a layer's `slot`, "prefill" or "decode", in this one's place,
        and why: for a method that only chooses. `layers` like it are on the layer's device."""
        return self, ""

    def on_this_machine(self, shape: LayerShape) -> "Phase":
        """This method with what `attnplug tune` has measured of it for such a layer."""
        return self

    def refusal(self, shape: LayerShape) -> str | None:
        """Why this method cannot serve such a layer (which then stays dense), or None."""
        unserved = why_not_width(shape.head_dim, self.head_dims)
        return f"{self.name}: {unserved}" if unserved else None

    def note(self, shape: LayerShape) -> str:
        """What `report` says of this method on such a layer, such as where it runs dense."""
        return ""

    def cache_layer(self, max_length: int) -> "PlugLayer | None":
        """The cache layer with this method's state, or None where it needs none."""
        return None

    def why_dense_steps(self, state: Any) -> str:
        """Why dense serves steps over a cache layer in this method's place; "" where it does not.
        Known from shapes, as compiled and captured steps run no code of the host."""
        return ""

    def check(self, option: str, valid: bool, needed: str) -> None:
        """Raise PolicyError unless the option's value is `valid`; `needed` says what is."""
        check_option(self.name, option, getattr(self, option), valid, needed)

    def check_integers(self, *options: str) -> None:
        """Raise PolicyError unless each of these options is an integer (a bool is none) that
        kernels can multiply by a block's tokens."""
        for option in options:
            value = getattr(self, option)
            self.check(option, type(value) is int, "an integer")
            self.check(option, abs(value) <= MOST, f"at most {MOST}")

    def __str__(self) -> str:
        options = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(options)})" if options else self.name


class DraftingPhase(Phase):
    """A decode method whose steps only draft: a dense pass verifies them, a round at a time."""

    @property
    def varies_rounds(self) -> bool:
        """Whether a round makes as many drafts as were of use lately, and `rounds` at the most."""
        return False

    @property
    def asks_for_rounds(self) -> bool:
        """Whether a call is decoded in rounds even where they turn out not to pay."""
        return False

    def rounds(self) -> int:
        """Drafts a round; 0 where each token is a step."""
        raise NotImplementedError(f"{type(self).__name__} has no rounds")


class TracingPhase(Phase):
    """A method that looks on while another serves."""

    def observe(self, call: AttentionCall, served: "Phase") -> Edges | None:
        """The edges of a call that the phase `served` has served; None where there are none to
        tell. Must leave the call's tensors as they are."""
        raise NotImplementedError(f"{type(self).__name__} has no observe")


def check_option(method: str, option: str, value: object, valid: bool, needed: str) -> None:
    """Raise PolicyError naming the method, the option, the value that came and what is needed."""
    if not valid:
        raise PolicyError(f"{method}: {option}={value!r}, needs {needed}")
