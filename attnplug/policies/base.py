"""What a method is: the phase protocol, and the check of its options."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnplug.call import (
    AttentionCall,
    Edges,
    LatentCall,
    LayerShape,
    PagedCall,
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
    notes_in_step: ClassVar[bool] = False  # `begin_far` notes the keys at a call's slots
    # Served steps of up to so many rows run `attend_rows`, and no other method for near rows.
    rows_whole: ClassVar[int] = 0
    has_model_basis: ClassVar[bool] = False  # over pages it codes keys in a basis of the model
    on_request: ClassVar[frozenset[str]] = frozenset()
    head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS  # that its ops have kernels for

    @property
    def kept(self) -> int:
        """The most keys that a decode step reads of a row, as `attnplug eval` shows beside a score;
        0 where the method does not say. A shorter row is read whole in any case."""
        return 0

    @property
    def varies_rounds(self) -> bool:
        """Whether a round makes as many drafts as were of use lately, and `rounds` at the most."""
        return False

    @property
    def asks_for_rounds(self) -> bool:
        """Whether a call is decoded in rounds even where they turn out not to pay."""
        return False

    def step_reads(self, tokens: int, head_dim: int, room: int = 0) -> StepReads | None:
        """What a decode step reads of a row of `tokens`, as `attnplug eval` shows beside a score,
        in a cache with room for `room` of them, by default for no more; None where the method does
        not say."""
        return StepReads(min(self.kept, tokens)) if self.kept else None

    def rounds(self) -> int:
        """Drafts a round, where this method decodes in rounds of drafts and a verification; 0 where
        each token is a step."""
        return 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output `[B,Hq,T,D]` of one call."""
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def serves_few(self, call: AttentionCall) -> bool:
        """Whether this method serves a call of a few queries over a cache, in the place of the
        method of the prefill."""
        return False

    def attend_latents(self, call: LatentCall) -> torch.Tensor:
        """The attention output `[B,S,Hq,Dv]` of a layer whose model picks what it reads."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_latents")

    def attend_all_latents(self, call: LatentCall) -> torch.Tensor:
        """The attention output `[B,S,Hq,Dv]` of a layer whose cache keeps latents, over all that a
        query sees."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_all_latents")

    def observe(self, call: AttentionCall, served: "Phase") -> Edges | None:
        """The edges of a call that the phase `served` has served; None where there are none to
        tell. Must leave the call's tensors as they are."""
        raise NotImplementedError(f"{type(self).__name__} has no observe")

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

    def pages_refusal(self) -> str | None:
        """Why this method cannot decode from a paged cache, as continuous batching has it (`dense`
        then does), or None."""
        return "needs rows of a cache of its own"

    def for_requests(self, longest: int) -> "Phase":
        """This method over an engine's pages, whose requests have up to `longest` tokens."""
        return self

    def page_state(self, k: torch.Tensor, basis: Any = None) -> Any:
        """What this method keeps beside one layer's pages `k [pages,Hkv,page,D]`, or None. `basis`
        is the layer's, where the method has one of the model (`has_model_basis`)."""
        return None

    def pages_note(self, device: torch.device) -> str:
        """For `report`: which rows of steps over pages dense serves, decided on the device."""
        return ""

    def page_share(self, itemsize: int) -> float:
        """The bytes of `page_state`, as a share of the bytes of keys and values."""
        return 0.0

    def note_pages(self, k: torch.Tensor, state: Any, slots: torch.Tensor) -> None:
        """Called after keys were written or copied to the `slots` `[N]` of one layer's pages: page
        times its size, plus the place in it. Not of a method that has a basis of the model."""

    def code_pages(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        state: Any,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """`note_pages` of a method that has a basis of the model: it is also told the values, and
        which `positions` `[N]` the tokens have in their sequences."""
        raise NotImplementedError(f"{type(self).__name__} has no code_pages")

    def attend_pages(self, call: PagedCall) -> torch.Tensor:
        """The attention output `[R,Hq,1,D]` of a decode step over pages."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_pages")

    def attend_far(self, call: PagedCall) -> torch.Tensor:
        """The same by the method itself for rows of any length, where another decides which rows
        are far: the others come with a length of 0, and what they give is not looked at."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_far")

    def begin_far(self, call: PagedCall) -> Any:
        """The first half of `attend_far`, for what another method may run beside: what `end_far`
        needs."""
        return self.attend_far(call)

    def end_far(
        self,
        found: Any,
        call: PagedCall,
        far: torch.Tensor,
        out: torch.Tensor,
        *,
        chained: bool = True,
    ) -> None:
        """The second half: write the output of the rows that are `far`, bool `[R]`, into `out`
        `[R,Hq,1,D]`, in which another method has written the others'. `chained` says that the
        kernel in front is the last one of `begin_far`."""
        torch.where(far[:, None, None, None], found, out, out=out)

    def attend_rows(self, call: PagedCall, near: torch.Tensor, out: torch.Tensor) -> None:
        """The step of all rows, into `out` `[R,Hq,1,D]`. This method serves far rows. Those with a
        length of 0 in the call are read whole, over their `near` keys, `[R]`."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_rows")

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


def check_option(method: str, option: str, value: object, valid: bool, needed: str) -> None:
    """Raise PolicyError naming the method, the option, the value that came and what is needed."""
    if not valid:
        raise PolicyError(f"{method}: {option}={value!r}, needs {needed}")
