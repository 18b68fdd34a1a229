"""Rounds of a call whose steps only draft: some sparse steps, then one dense pass over the tokens
that they chose, which says what dense attention would have chosen after each of them.

Drafts that equal dense's tokens are accepted, the first that does not is replaced by dense's own,
and the caches take back what was fed for the others. So each token is the argmax, or the sample, of
a dense pass over the same tokens. A sample is `argmax(p / e)` as everywhere in this loop, with the
same `e` for a draft and for its verification: what comes out is dense's own sample for that seed,
and the random state ends where dense's would.

Where nothing of the host is wanted between two rounds, the first draft of the next one runs while
the host reads what the last one has come to.

Where a policy has chosen rounds itself, a call of too few tokens to make up for their second step
has none. If dense accepts too few drafts for rounds to pay, they end: dense steps decode the rest
of the call.

Rows of a batch accept different numbers of drafts. All of them then keep the slots of the whole
round, and a key mask hides what a row did not accept: a row's tokens stay in order, with holes
between them, at their own positions. When the slots run out, each row's tokens are moved together.
One row without padding has no mask, and its layers take back what was not accepted.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from attnplug.call import Served
from attnplug.models.ahead import capture_ahead
from attnplug.models.cache import PlugLayer
from attnplug.models.captured import Step
from attnplug.models.decode_step import REFUSED, StepBuffers, due_layers, prepare_layers
from attnplug.models.hook import state_of
from attnplug.models.look import Look
from attnplug.models.loop_calls import OF_LENGTH
from attnplug.models.noise import Noise
from attnplug.models.pace import Pace, Tally, costs_of
from attnplug.models.patience import PatientStep, is_capturable
from attnplug.models.round_steps import Feed, dense_step, settle, verify_step
from attnplug.models.sliding import round_of, sliding_layers
from attnplug.models.slots import close_holes, full_layers, take_back
from attnplug.models.walk import all_modules, has_moving_rope


def drafts_of(call: Any, masked: bool) -> int:
    """The most drafts a round of a call of `Decoding`; 0 where each of its tokens is a step, and
    where that is so although its policy makes drafts, each layer notes why. `masked`: a row is
    padded."""
    served = {module: x for module, x in call.bound.items() if x.policy is not None}
    counts = {binding.policy.rounds() for binding in served.values()}
    if counts <= {0}:
        return 0
    why = "layers of several policies" if len(counts) > 1 else _why_not(call, masked, max(counts))
    for module, binding in served.items():
        state = state_of(call.cache, module.layer_idx)
        why = why or binding.policy.serves_steps(state).why
        why = why or ("its trace is recorded" if binding.trace_to is not None else "")
    why = why or _too_short(call, max(counts))
    for layer in full_layers(call.cache):
        layer.no_rounds = why
    for binding in served.values() if why else ():
        if binding.policy.rounds():
            binding.served["decode"] = Served("dense", why)
    return 0 if why else max(counts)


def _why_not(call: Any, masked: bool, drafts: int) -> str:
    """Why a call is not decoded in rounds, whatever its policy."""
    layers = call.cache.layers
    windows = sliding_layers(layers)
    if (call.rows > 1 or masked) and call.is_kept():
        what = f"{call.rows} rows" if call.rows > 1 else "a padded row"
        return f"the cache of {what} is seen again, and rounds leave holes in it"
    if windows and call.is_kept():
        return "the cache is seen again, and a sliding window takes no token back"
    if any(each.cumulative_length_int < each.max_cache_len for each in windows):
        return "the prompt does not fill a sliding window"
    modules = all_modules(call.model)
    if any(map(has_moving_rope, modules)):
        return "its rotary embeddings depend on the longest position"
    # Drafts are fed behind the last token, twice a round's behind that of a row that has ended.
    known = getattr(call.model.config.get_text_config(), "max_position_embeddings", None)
    learned = not any(hasattr(module, "rope_type") for module in modules)
    if learned and known is not None and known < call.last + 2 * drafts:
        return f"its {known:,} learned positions end with the call's"
    if call.rows > 1 and call.device.type != "cpu" and _copies_experts(call.model):
        return f"its experts' weights would be copied for {drafts + 1} tokens of each row"
    strange = [type(each).__name__ for each in call.processors if type(each) not in OF_LENGTH]
    if strange:
        return f"{strange[0]} looks at the tokens before"
    # The last pass feeds at most the last token but one, and drafts behind it.
    room = min(layer.max_cache_len for layer in full_layers(call.cache))
    if room < call.last - 1 + drafts:
        return f"room for {room:,} tokens, and a round wants {drafts} behind the last"
    return ""


def pace_of(call: Any, drafts: int) -> Pace:
    """The pace of a call of `Decoding`; `drafts` is the most that a round makes."""
    policies = [each.policy for each in call.bound.values() if each.policy]
    varies = any(policy.varies_rounds for policy in policies)
    asked = any(policy.asks_for_rounds for policy in policies)
    middle = (call.length + call.last) // 2  # of a call that comes to its end
    return Pace(drafts, costs_of(call.model, full_layers(call.cache), middle), varies, not asked)


def _too_short(call: Any, drafts: int) -> str:
    """Why rounds would not make up for their second step, "" where they are asked for or do."""
    pace, new = pace_of(call, drafts), call.last - call.length
    least = pace.least()
    if not pace.ends or new >= least:
        return ""
    if math.isinf(least):
        return "rounds would not pay over so light a cache"
    return f"{new:,} new tokens, and rounds pay from {math.ceil(least):,} on"


def _copies_experts(model: Any) -> bool:
    """Whether transformers runs a decode step's experts by `batched_mm`, which copies the weights
    of each token's."""
    return "grouped_mm" in model.get_experts_implementation().values()


@dataclass
class RoundSteps:
    """What a model keeps of its rounds from one call to the next."""

    tally: Tally = field(default_factory=Tally)  # of the last call
    feed: Feed | None = None
    verify: PatientStep | None = None
    dense: PatientStep | None = None

    def begin(self) -> None:
        """A call begins, in rounds or not."""
        self.tally = Tally()

    def of(self, call: Any, drafts: int, compiles: bool) -> Callable[..., int]:
        """What decodes a call of `Decoding` in rounds, given a step, its buffers and the prompt's
        logits."""
        place = call.rows, drafts, call.device
        if self.feed is None or self.feed.place != place:
            self.feed = Feed.empty(*place)
        verify: Step = verify_step
        dense: Step = dense_step
        if compiles and is_capturable(call.model):
            if self.verify is None or self.dense is None:
                self.verify = PatientStep(verify_step, lambda: verify_step, math.inf)
                self.dense = PatientStep(dense_step, lambda: dense_step, math.inf)
            verify, dense = self.verify, self.dense

        def decode(step: Step, buffers: StepBuffers, logits: torch.Tensor) -> int:
            assert self.feed is not None  # made above
            steps = step, verify, dense
            return Rounds(call, buffers, self.feed, steps, self.tally).run(logits)

        return decode


class Rounds:
    """The rounds of one call, by three steps: one that drafts a token, `verify_step` and
    `dense_step`."""

    def __init__(
        self,
        call: Any,
        buffers: StepBuffers,
        feed: Feed,
        steps: tuple[Step, Step, Step],
        tally: Tally,
    ):
        self.call, self.buffers, self.feed = call, buffers, feed
        self.draft, self.verify, self.dense = steps
        self.most = feed.tokens.shape[1] - 1
        self.layers = full_layers(call.cache)
        self.pace = pace_of(call, self.most)
        self.tally = tally
        for step in steps:
            begin = getattr(step, "begin", None)
            if begin is not None:
                begin()
        self.ends = set() if call.ends is None else set(call.ends.tolist())
        self.room = min(layer.max_cache_len for layer in self.layers)
        self.lengths = [call.length] * call.rows
        self.going = set(range(call.rows))
        self.held = call.length  # slots of the cache, where a mask tells which of them count
        states = {call.length: call.random_state()} if call.config.do_sample else {}
        self.noise = Noise(call, states)
        self.unread: tuple[int, Look] | None = None  # drafts of a round, and what came of them
        # Processors are told how many tokens there are by this one's width.
        self.prefix = call.ids.new_zeros((call.rows, call.last + self.most + 1))

    def run(self, logits: torch.Tensor) -> int:
        """Decode until all rows have ended; returns the final length. The cache of one row without
        padding then holds all tokens but the last."""
        call, tokens, options = self.call, self.feed.tokens, self.call.step_options
        self.buffers.token.copy_(self._choose(logits, 0)[:, None])
        self._note([[token] for token in self.buffers.token[:, 0].tolist()], self.buffers.token)
        try:
            while self.going:
                if self.unread is None and not self.pace.pays(self._left()):
                    self._step_on(options)
                    break
                self._make_room(self.most + 1)
                self._prepare_layers()
                tokens[:, :1].copy_(self.buffers.token)
                _set_part(self.layers, "draft")
                drafted = 0
                if self.unread is not None:
                    self._draft(0, options)
                    drafted = 1
                    self._read()
                    if not self.going:
                        take_back(self.layers, drafted)
                        break
                    if not self.pace.pays(self._left()):
                        self._forget_draft()
                        self._step_on(options)
                        break
                drafts = self.pace.next()
                for place in range(drafted, drafts):
                    self._draft(place, options)
                self._verify(drafts, dict.fromkeys(options, 0))
                if not self._goes_ahead():
                    self._read()
        finally:
            _set_part(self.layers, "")
        if call.config.do_sample:
            call.set_random(self.noise.states[call.length])
        return call.length

    def _left(self) -> int:
        """Tokens that the call may still come to."""
        return self.call.last - min(self.lengths[row] for row in self.going)

    def _prepare_layers(self) -> None:
        """What layers want of the host, between rounds."""
        mask = self.buffers.mask
        held = self.call.length - 1 if mask is None else self.held
        due = due_layers(self.call.wanting, held)
        if due and mask is not None:
            mask = mask[:, 0, 0, :held].long()
        prepare_layers(due, held, mask)

    def _run_step(self, step: Step, *fed: Any) -> torch.Tensor | None:
        """Run one of the three steps."""
        fed = self.call.model, self.call.cache, *fed
        capture_ahead(self.call, step, (), fed)
        return step(*fed)

    def _step_on(self, options: dict[str, Any]) -> None:
        """Decode the rest of the call by dense steps."""
        call, buffers = self.call, self.buffers
        self.tally.ended = True
        _set_part(self.layers, "dense")
        while self.going:
            self._make_room(1)
            found = self._run_step(self.dense, *buffers.stepped(), call.greedy, options)
            call.hush()  # from here on tokens come
            chosen = buffers.token if found is None else self._choose(found, 0)[:, None]
            self.held += 1
            self._note(chosen.tolist(), chosen)
            if found is not None:
                buffers.token.copy_(chosen)

    def _forget_draft(self) -> None:
        """Be as if the draft behind a round that has been read had not been made."""
        buffers, beside = self.buffers, round_of(self.call.cache.layers)
        take_back(self.layers, 1)
        buffers.position.sub_(1)
        buffers.slot.sub_(1)
        buffers.token.copy_(self.feed.tokens[:, :1])
        if beside is not None:
            beside.place.sub_(1)

    def _make_room(self, slots: int) -> None:
        """Close the holes if the cache has fewer slots left than `slots`."""
        mask, begin = self.buffers.mask, self.call.prompt.shape[1]
        if mask is None or self.held + slots <= self.room:
            return
        keep = max(self.lengths[row] for row in self.going) - 1 - begin
        close_holes(self.layers, mask[:, 0, 0], begin, self.held, keep)
        self.held = begin + keep
        self.buffers.slot.fill_(self.held)

    def _goes_ahead(self) -> bool:
        """Whether the next round begins before the host knows what this one has come to: no row can
        end by its length, no holes are to be closed, and no layer and no sample wants the host. So
        sketch never goes ahead, whose ring could not take back a draft more than a round's."""
        call, fed = self.call, self.most + 1
        longest = max(self.lengths[row] for row in self.going)
        roomy = self.buffers.mask is None or self.held + fed <= self.room
        return call.greedy and not call.wanting and roomy and longest + fed < call.last

    def _draft(self, place: int, options: dict[str, Any]) -> None:
        call = self.call
        found = self._run_step(self.draft, *self.buffers.stepped(), call.greedy, options)
        call.hush()  # from here on tokens come
        if found is not None:
            self.buffers.token.copy_(self._choose(found, place).clamp(min=0)[:, None])
        self.feed.tokens[:, place + 1].copy_(self.buffers.token[:, 0])

    def _verify(self, drafts: int, options: dict[str, Any]) -> None:
        """Have dense judge the round's drafts. `_read` notes what has come of it."""
        call, feed, buffers = self.call, self.feed, self.buffers
        state = feed.tokens, feed.drafted, feed.found, *buffers.verified()
        _set_part(self.layers, "verify")
        feed.drafted.fill_(drafts)
        logits = self._run_step(self.verify, *state, call.greedy, options)
        if logits is not None:
            chosen = [self._choose(logits[:, place], place) for place in range(drafts + 1)]
            settle(call.cache, *state, torch.stack(chosen, 1))
        self.held += drafts + 1
        self.unread = drafts, Look.at(feed.found)

    def _read(self) -> None:
        """Note the last round's tokens of each row that goes on. The cache holds all of them but
        the last."""
        assert self.unread is not None  # a round has been verified
        drafts, look = self.unread
        self.unread = None
        rounds = [own[: accepted + 1] for accepted, *own in look.read()]
        self.tally.rounds += 1
        self.tally.verified += len(self.going)
        self.tally.drafted += drafts * len(self.going)
        accepted = [len(rounds[row]) - 1 for row in sorted(self.going)]
        self.tally.accepted += sum(accepted)
        self.pace.note(accepted, drafts)
        self._note(rounds, self.feed.found[:, 1:])

    def _note(self, chosen: list[list[int]], held: torch.Tensor) -> None:
        """Append tokens of the rows that go on, which the device has in `held`, up to the first
        that ends a row. The cache of one row takes back what was fed for the others."""
        call, ends = self.call, self.ends
        for row in sorted(self.going):
            new, length = chosen[row], self.lengths[row]
            count = next((i + 1 for i, x in enumerate(new) if x in ends), len(new))
            count = min(count, call.last - length)
            if -1 in new[:count]:
                raise RuntimeError(REFUSED)
            call.ids[row, length : length + count].copy_(held[row, :count])
            self.lengths[row] += count
            if self.lengths[row] >= call.last or new[count - 1] in ends:
                self.going.discard(row)
                self.buffers.unfinished[row] = False
                if call.pad is not None:
                    call.ids[row, self.lengths[row] :] = call.pad
            if self.buffers.mask is None and count < len(new):
                take_back(self.layers, len(new) - count)
        for _ in range(max(self.lengths) - call.length):
            call.count_token()
        self.noise.forget_before(
            min((self.lengths[row] for row in self.going), default=call.length)
        )

    def _choose(self, logits: torch.Tensor, ahead: int) -> torch.Tensor:
        """The tokens `[B]` that come `ahead` places behind the end of each row, from its logits
        `[B,V]`; -1 where torch.multinomial would refuse them. Rows that have ended choose for
        another row's place, and their tokens are not used."""
        rows = range(len(logits))
        any_place = min(self.lengths[row] for row in self.going)
        places = [ahead + (self.lengths[row] if row in self.going else any_place) for row in rows]
        # Of all rows each time: kernels that round by the number of rows give what dense's give.
        of = {place: self.call.processors(self.prefix[:, :place], logits) for place in set(places)}
        (scores, *others) = of.values()
        if others:
            scores = torch.stack([of[place][row] for row, place in enumerate(places)])
        if not self.call.config.do_sample:
            return scores.argmax(-1)
        shares = scores.softmax(-1)
        chosen = (shares / self.noise.of(places, shares)).argmax(-1)
        return torch.where(shares.amax(-1) < torch.inf, chosen, -1)


def _set_part(layers: Iterable[PlugLayer], part: str) -> None:
    for layer in layers:
        layer.round_part = part
