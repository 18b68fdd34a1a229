"""A policy: which method serves the prefill, which the decode steps, which one traces, and which
serves layers whose model picks what they read."""

import dataclasses
from typing import Any

import torch

from attnplug.call import AttentionCall, Edges, LatentCall, LayerShape, Served, check_output
from attnplug.errors import PolicyError
from attnplug.policies._promised import check_class, choose, refuse, rounds_of
from attnplug.policies.base import DraftingPhase, Phase, TracingPhase
from attnplug.policies.dense import Dense
from attnplug.policies.paged import PagedPhase, why_no_pages
from attnplug.policies.trained import Trained

OPTIONAL = frozenset({"trace", "trained"})


@dataclasses.dataclass(frozen=True)
class Policy:
    """A composition of methods: one for prefill, one for decode, optionally one that traces, and
    one for layers whose model picks the tokens that they read.

    >>> str(Policy(prefill=Momo(gamma=32)))
    'momo(gamma=32)'
    """

    prefill: Phase | None = None
    decode: Phase | None = None
    trace: Phase | None = None
    trained: Phase | None = None

    def __post_init__(self) -> None:
        for slot in ("prefill", "decode", "trace", "trained"):
            phase = getattr(self, slot)
            if phase is None:
                object.__setattr__(self, slot, None if slot in OPTIONAL else Dense())
            elif not isinstance(phase, Phase):
                raise PolicyError(
                    f"Policy: {slot} is {phase!r}, needs a method such as attnplug.Dense()"
                )
            else:
                check_class(type(phase))
                served = phase.phases | phase.on_request
                if slot not in served:
                    raise PolicyError(
                        f"Policy: {phase.name} cannot be the {slot} method, it serves "
                        f"{' and '.join(sorted(served))}"
                    )

    def resolve(self, shape: LayerShape, layers: int) -> tuple["Policy", str]:
        """The policy with the methods that serve such a layer in the place of those that only
        choose, and why. `layers` like it are on its device."""
        assert self.prefill is not None and self.decode is not None  # filled by __post_init__
        if shape.indexed:
            return self._resolve_indexed()
        if shape.reads_latents and self.trace is not None:
            policy, why = dataclasses.replace(self, trace=None).resolve(shape, layers)
            return policy, "; ".join(filter(None, (why, "not traced: the layer keeps latents")))
        prefill, why = choose(self.prefill, "prefill", shape, layers)
        decode, more = choose(self.decode, "decode", shape, layers)
        reasons = "; ".join(filter(None, (why, more)))
        return dataclasses.replace(self, prefill=prefill, decode=decode), reasons

    def _resolve_indexed(self) -> tuple["Policy", str]:
        """The policy of a layer whose model picks what it reads."""
        served, why = self.trained, ""
        if served is None and (self.prefill.takes_trained or self.decode.takes_trained):  # pyright: ignore[reportOptionalMemberAccess]
            served, why = Trained(), "auto: the model picks what the layer reads"
        if served is None:
            return self, ""
        if self.trace is not None:
            why = "; ".join(filter(None, (why, "not traced: the model picks what the layer reads")))
        return Policy(prefill=served, decode=served), why

    @property
    def attends_latents(self) -> bool:
        """Whether both methods serve a layer whose model picks what it reads."""
        return isinstance(self.prefill, Trained) and isinstance(self.decode, Trained)

    @property
    def attends_all_latents(self) -> bool:
        """Whether both methods serve a layer whose cache keeps latents, and read all of them."""
        return isinstance(self.prefill, Dense) and isinstance(self.decode, Dense)

    def attend_all_latents(self, call: LatentCall) -> torch.Tensor:
        """Run the method that the static shape of the queries asks for."""
        phase = self.decode if call.q.shape[2] == 1 else self.prefill
        assert isinstance(phase, Dense)  # as attends_all_latents says
        return phase.attend_all_latents(call)

    def attend_latents(self, call: LatentCall) -> torch.Tensor:
        """Run the method of a layer whose model picks what it reads."""
        assert isinstance(self.prefill, Trained)  # as attends_latents says
        return self.prefill.attend_latents(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Run the phase that the static shape of the queries asks for, and let the tracing method
        look on where someone records."""
        assert self.prefill is not None and self.decode is not None  # filled by __post_init__
        verifies = getattr(call.state, "round_part", "") == "verify"  # of a PlugLayer
        few = not verifies and self.decode.serves_few(call)
        call.is_step = call.q.shape[2] == 1 or verifies or few
        phase = self.decode if call.is_step else self.prefill
        if not phase.takes_pending:
            call.flush()
        call.served_by = phase.name
        out = phase.attend(call)
        check_output(phase.name, call.q, out)
        if call.q.shape[2] > 1 and not few:
            self.decode.note_queries(call)
        if self.trace is not None and call.trace_to is not None:
            assert isinstance(self.trace, TracingPhase)  # checked by __post_init__
            edges = self.trace.observe(call, phase)
            if edges is not None and not isinstance(edges, Edges):
                refuse(self.trace, "observe", edges, "Edges or None")
            call.trace_to.emit(call, edges)
        return out

    def serves_steps(self, state: Any) -> Served:
        """What serves decode steps over a cache layer that holds tokens, known from its shapes."""
        assert self.decode is not None  # filled by __post_init__
        why = self.decode.why_dense_steps(state)
        return Served("dense", why) if why else Served(self.decode.name)

    def rounds(self) -> int:
        """Drafts a round, where steps only draft and a dense pass verifies them; else 0."""
        return rounds_of(self.decode) if isinstance(self.decode, DraftingPhase) else 0

    @property
    def varies_rounds(self) -> bool:
        """Whether rounds make fewer drafts where few were accepted."""
        return isinstance(self.decode, DraftingPhase) and self.decode.varies_rounds

    @property
    def asks_for_rounds(self) -> bool:
        """Whether a call is decoded in rounds even where they turn out not to pay."""
        return isinstance(self.decode, DraftingPhase) and self.decode.asks_for_rounds

    @property
    def page_phase(self) -> PagedPhase:
        """The method that decodes from a paged cache."""
        decode = self.decode
        return decode if isinstance(decode, PagedPhase) and not decode.pages_refusal() else Dense()

    def attend_prompt(self, call: AttentionCall) -> torch.Tensor:
        """Serve a prompt of continuous batching, or a piece of one. Its other requests decide how
        it is cut, so that a method which is not exact serves prompts that come whole."""
        assert self.prefill is not None  # filled by __post_init__
        call.served_by = self.prefill.name if call.whole else "dense"
        if not call.whole and self.prefill != Dense():
            call.why_dense = "a piece of a prompt, which other requests have cut"
        served = self.prefill if call.whole else Dense()
        out = served.attend(call)
        check_output(served.name, call.q, out)
        return out

    @property
    def shares_pages(self) -> bool:
        """Whether a prompt's keys are the same however the prompt is cut, so that requests may
        share its pages."""
        return self.prefill == Dense()

    @property
    def batching_notes(self) -> list[str]:
        """What continuous batching serves otherwise than `generate` does."""
        assert self.prefill is not None and self.decode is not None  # filled by __post_init__
        notes, why = [], why_no_pages(self.decode)
        if not self.shares_pages:
            notes.append(f"{self.prefill.name} serves prompts that come whole, dense serves pieces")
        if why:
            notes.append(f"{self.decode.name} {why}: dense decodes")
        return notes

    def __str__(self) -> str:
        prefill, decode = self.prefill, self.decode
        assert prefill is not None and decode is not None  # filled by __post_init__
        slots = {"prefill": prefill, "decode": decode}
        slots |= {s: getattr(self, s) for s in OPTIONAL if getattr(self, s) is not None}
        served = [prefill] if prefill == decode else [prefill, decode]
        named = [phase for phase in served if phase.name != "dense"]
        asked = any(slot in phase.on_request for slot, phase in slots.items())
        if asked or (len(served) > 1 and any(len(phase.phases) > 1 for phase in named)):
            return ", ".join(f"{slot}={phase}" for slot, phase in slots.items())
        besides = [phase for phase in (self.trace, self.trained) if phase is not None]
        return "+".join(map(str, [*named, *besides] or served[:1]))
