"""Rounds of a call whose steps only draft: some sparse steps, then one dense pass over the tokens
that they chose, which says what dense attention would have chosen after each of them.

Drafts that equal dense's tokens are accepted, the first that does not is replaced by dense's own,
and the caches take back what was fed for the others. So each token is the argmax, or the sample, of
a dense pass over the same tokens. A sample is `argmax(p / e)` as everywhere in this loop, with the
same `e` for a draft and for its verification: what comes out is dense's own sample for that seed,
and the random state ends where dense's would.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attnplug.call import Served
from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.models.captured import Step
from attnplug.models.decode_step import StepBuffers, argmax, due_layers, prepare_layers
from attnplug.models.hook import state_of
from attnplug.models.loop_calls import OF_LENGTH
from attnplug.models.names import CACHE
from attnplug.models.patience import PatientStep, is_capturable


@dataclass
class Tally:
    """What the rounds of a call came to."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        if not self.rounds:
            return ""
        each = self.drafted // self.rounds
        return (
            f"{self.rounds:,} rounds of {each} drafts, of which dense accepted "
            f"{self.accepted / self.rounds:.2f} a round"
        )


@dataclass
class Feed:
    """What a verification is given and leaves, at fixed addresses: the last token and the drafts
    behind it `[1,m+1]`, and how many drafts dense accepts, then its own tokens `[m+2]`."""

    tokens: torch.Tensor
    found: torch.Tensor

    @property
    def place(self) -> tuple[int, torch.device]:
        """How many drafts there are, and where."""
        return self.tokens.shape[1] - 1, self.tokens.device

    @classmethod
    @torch.inference_mode(False)  # it serves calls outside of it, too
    def empty(cls, drafts: int, device: torch.device) -> "Feed":
        zeros = torch.zeros
        return cls(
            zeros((1, drafts + 1), dtype=torch.int64, device=device),
            zeros(drafts + 2, dtype=torch.int64, device=device),
        )


def drafts_of(call: Any, mask: torch.Tensor | None) -> int:
    """Drafts a round of a call of `Decoding`; 0 where each of its tokens is a step, and where that
    is so although its policy makes drafts, each layer notes why. `mask` is None where no row is
    padded."""
    served = {module: x for module, x in call.bound.items() if x.policy is not None}
    counts = {binding.policy.rounds() for binding in served.values()}
    if counts <= {0}:
        return 0
    why = "layers of several policies" if len(counts) > 1 else _why_not(call, mask, max(counts))
    for module, binding in served.items():
        state = state_of(call.cache, module.layer_idx)
        why = why or binding.policy.serves_steps(state).why
        why = why or ("its trace is recorded" if binding.trace_to is not None else "")
    for layer in call.cache.layers:
        if isinstance(layer, PlugLayer):
            layer.no_rounds = why
    for binding in served.values() if why else ():
        if binding.policy.rounds():
            binding.served["decode"] = Served("dense", why)
    return 0 if why else max(counts)


def _why_not(call: Any, mask: torch.Tensor | None, drafts: int) -> str:
    """Why a call is not decoded in rounds, whatever its policy."""
    layers = call.cache.layers
    if call.rows > 1:
        return f"{call.rows} rows, and drafts are made for one"
    if mask is not None:
        return "a padded row"
    if not all(isinstance(layer, PlugLayer) for layer in layers):
        return "a sliding window takes no token back"
    strange = [type(each).__name__ for each in call.processors if type(each) not in OF_LENGTH]
    if strange:
        return f"{strange[0]} looks at the tokens before"
    # The last pass feeds at most the last token but one, and drafts behind it.
    room = min(layer.max_cache_len for layer in layers)
    if room < call.last - 1 + drafts:
        return f"room for {room:,} tokens, and a round wants {drafts} behind the last"
    return ""


def verify_step(
    model: Any,
    cache: PlugCache,
    tokens: torch.Tensor,
    found: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    greedy: bool,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """Take back what the drafts have fed, and feed the last token with all drafts. Where `greedy`,
    settle the round; else return the logits `[m+1,V]` in float32."""
    drafts = tokens.shape[1] - 1
    _take_back(cache.layers, drafts)
    position.sub_(drafts)
    places = torch.arange(drafts + 1, device=tokens.device, dtype=position.dtype)
    outputs = model(
        input_ids=tokens,
        position_ids=position + places,
        use_cache=True,
        return_dict=True,
        **{CACHE: cache},
        **options,
    )
    logits = outputs.logits[0].to(dtype=torch.float32, copy=True)
    if not greedy:
        return logits
    settle(cache, tokens, found, token, position, argmax(logits))
    return None


def settle(
    cache: PlugCache,
    tokens: torch.Tensor,
    found: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Accept the drafts that equal what dense has `chosen` `[m+1]` before the first that does not,
    and have the caches hold these alone. Nothing is read on the host."""
    drafts = tokens.shape[1] - 1
    accepted = (chosen[:-1] == tokens[0, 1:]).int().cumprod(0).sum(dtype=torch.int64)
    _take_back(cache.layers, drafts - accepted)
    position.add_(accepted + 1)
    token.copy_(chosen.gather(0, accepted.reshape(1))[:, None])
    found[0].copy_(accepted)
    found[1:].copy_(chosen)


@dataclass
class Noise:
    """The `e` of `argmax(p / e)` for each token of a sampled call, drawn once and in their order,
    and the random state behind each."""

    state: Callable[[], torch.Tensor]
    drawn: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def of(self, place: int, shares: torch.Tensor) -> torch.Tensor:
        if place not in self.drawn:
            noise = torch.empty_like(shares).exponential_(1)
            self.drawn[place] = noise, self.state()
        return self.drawn[place][0]

    def forget_before(self, place: int) -> None:
        for old in [each for each in self.drawn if each < place]:
            del self.drawn[old]


@dataclass
class RoundSteps:
    """What a model keeps of its rounds from one call to the next."""

    tally: Tally = field(default_factory=Tally)  # of the last call
    feed: Feed | None = None
    verify: PatientStep | None = None

    def begin(self) -> None:
        """A call begins, in rounds or not."""
        self.tally = Tally()

    def of(self, call: Any, drafts: int, compiles: bool) -> Callable[..., int]:
        """What decodes a call of `Decoding` in rounds, given a step, its buffers and the prompt's
        logits."""
        device = call.device
        if self.feed is None or self.feed.place != (drafts, device):
            self.feed = Feed.empty(drafts, device)
        verify: Step = verify_step
        if compiles and device.type == "cuda" and is_capturable(call.model):
            if self.verify is None:
                self.verify = PatientStep(verify_step, lambda: verify_step, math.inf)
            self.verify.begin()
            verify = self.verify

        def decode(step: Step, buffers: StepBuffers, logits: torch.Tensor) -> int:
            assert self.feed is not None  # made above
            return Rounds(call, buffers, self.feed, step, verify, self.tally).run(logits)

        return decode


class Rounds:
    """The rounds of one call: `draft` is a step of one token, `verify` one of `verify_step`."""

    def __init__(
        self,
        call: Any,
        buffers: StepBuffers,
        feed: Feed,
        draft: Step,
        verify: Step,
        tally: Tally,
    ):
        self.call, self.buffers, self.feed = call, buffers, feed
        self.draft, self.verify = draft, verify
        self.drafts = feed.tokens.shape[1] - 1
        self.noise = Noise(call.random_state)
        self.tally = tally
        begin = getattr(draft, "begin", None)
        if begin is not None:
            begin()
        self.ends = set() if call.ends is None else set(call.ends.tolist())
        self.layers: list[PlugLayer] = list(call.cache.layers)
        # Processors are told how many tokens there are by this one's width.
        self.prefix = call.ids.new_zeros((1, call.last + self.drafts + 1))

    def run(self, logits: torch.Tensor) -> int:
        """Decode until the row ends; returns the final length. The cache then holds all tokens but
        the last."""
        call, tokens, options = self.call, self.feed.tokens, self.call.step_options
        self.buffers.token.copy_(self._choose(logits, call.length)[:, None])
        ended = self._note([int(self.buffers.token)], self.buffers.token[0])
        try:
            while not ended:
                prepare_layers(due_layers(call.wanting, call.length - 1), call.length - 1, None)
                tokens[:, :1].copy_(self.buffers.token)
                self._draft(options)
                ended = self._note(self._verify(dict.fromkeys(options, 0)), self.feed.found[1:])
        finally:
            _set_part(self.layers, "")
        if call.config.do_sample:
            call.set_random(self.noise.drawn[call.length - 1][1])
        return call.length

    def _draft(self, options: dict[str, Any]) -> None:
        call = self.call
        _set_part(self.layers, "draft")
        for place in range(self.drafts):
            found = self.draft(
                call.model, call.cache, *vars(self.buffers).values(), call.greedy, options
            )
            call.notice.cancel()  # from here on tokens come
            if found is not None:
                self.buffers.token.copy_(self._choose(found, call.length + place)[:, None])
            self.feed.tokens[:, place + 1].copy_(self.buffers.token[:, 0])

    def _verify(self, options: dict[str, Any]) -> list[int]:
        """The round's tokens; the cache holds all of them but the last."""
        call, feed = self.call, self.feed
        state = feed.tokens, feed.found, self.buffers.token, self.buffers.position
        _set_part(self.layers, "verify")
        logits = self.verify(call.model, call.cache, *state, call.greedy, options)
        if logits is not None:
            chosen = [
                self._choose(row[None], call.length + place) for place, row in enumerate(logits)
            ]
            settle(call.cache, *state, torch.cat(chosen))
        accepted, *own = feed.found.tolist()
        self.tally.rounds += 1
        self.tally.drafted += self.drafts
        self.tally.accepted += accepted
        return own[: accepted + 1]

    def _note(self, chosen: list[int], held: torch.Tensor) -> bool:
        """Append tokens, which the device has in `held`, up to the first that ends the row; whether
        any does. The caches take back what was fed for those behind it."""
        call, ends = self.call, self.ends
        count = next((i + 1 for i, x in enumerate(chosen) if x in ends), len(chosen))
        count = min(count, call.last - call.length)
        if -1 in chosen[:count]:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        call.ids[:, call.length : call.length + count].copy_(held[:count])
        for _ in range(count):
            call.count_token()
        if count < len(chosen):
            _take_back(self.layers, len(chosen) - count)
        self.noise.forget_before(call.length - 1)
        return call.length >= call.last or chosen[count - 1] in ends

    def _choose(self, logits: torch.Tensor, place: int) -> torch.Tensor:
        """The token `[1]` at a place of the row from its logits `[1,V]`; -1 where torch.multinomial
        would refuse them."""
        scores = self.call.processors(self.prefix[:, :place], logits)
        if not self.call.config.do_sample:
            return scores.argmax(-1)
        shares = scores.softmax(-1)
        chosen = (shares / self.noise.of(place, shares)).argmax(-1)
        return torch.where(shares.max() < torch.inf, chosen, -1)


def _take_back(layers: Sequence[Any], tokens: int | torch.Tensor) -> None:
    """Of layers that hold the same tokens."""
    for kind in {type(layer) for layer in layers}:
        kind.take_back_all([layer for layer in layers if type(layer) is kind], tokens)


def _set_part(layers: Iterable[PlugLayer], part: str) -> None:
    for layer in layers:
        layer.round_part = part
