"""The loop that decodes for generate: what transformers does on the host between two tokens, done
on the device.

A step is one function of tensors that never move: token, position, key mask and the rows that go
on. It writes the next of each in place, so that compiled steps need nothing from the host, and
the host never waits for a step that it has just queued. It looks at the rows that go on `LAG`
steps late, and takes back what the steps since have made: tokens, cache and random state.

Prompts, caches, logits processors and their order are transformers' own; a sampled token is
`argmax(p / e)` with `e` exponential, as torch.multinomial draws it, without its look at the
device.
"""

import copy
import functools
import gc
import math
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from attnplug.models.ahead import capture_ahead
from attnplug.models.all_reduce import one_shot_options
from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.models.captured import CapturedStep, Step
from attnplug.models.decode_step import (
    REFUSED,
    StepBuffers,
    accept,
    decode_step,
    due_layers,
    layers_to_prepare,
    prepare_layers,
)
from attnplug.models.fuse import Fusion
from attnplug.models.hf import bindings_of
from attnplug.models.layer_kernels import has_quick_steps
from attnplug.models.look import Look
from attnplug.models.names import CACHE
from attnplug.models.patience import PATIENCE, PatientStep, is_capturable, is_on_one_device
from attnplug.models.regional import LayeredStep
from attnplug.models.rounds import RoundSteps, drafts_of
from attnplug.models.sliding import (
    catch_up,
    crops_exactly,
    in_rounds,
    note_steps,
    sliding_layers,
    stepping,
    window_mask,
)
from attnplug.models.turn import Turn
from attnplug.ops.common.first_call import remark

# Steps that a compiled run is ahead of what the host knows. Zero where a step is not compiled: the
# host is then the slower of the two.
LAG = {"cuda": 2, "cpu": 0}
# Where steps compile layer by layer: bench/step_7b.py has found such steps fast.
BY_LAYER = frozenset({"cpu", "cuda"})
CAPTURE = "cudagraphs"  # torch's name of the backend that captures and compiles nothing
STOPPED, INVALID = 1, 2  # what a step says of itself; 0: rows go on


@dataclass
class DecodeLoop:
    """What a model keeps from one call of generate to the next: its compiled step, the buffers of
    the last call, why the last call was left to transformers ("" where it was not), and which
    projections steps fuse (None: they were not asked to)."""

    why_not: str = ""
    fusion: Fusion | None = None
    step: Callable[..., torch.Tensor | None] | None = None
    compiled_with: Any = None
    patience: float = PATIENCE  # steps before they are compiled, where nobody asks for it
    buffers: dict[tuple[Any, ...], StepBuffers] = field(default_factory=dict)
    is_new: bool = True  # no call has decoded yet
    hooked: str = ""  # why the last call's steps were not compiled: a user's hook
    rounds: RoundSteps = field(default_factory=RoundSteps)
    # One call at a time: steps, buffers and fused weights are the model's, whoever calls.
    turn: Turn = field(default_factory=Turn, repr=False, compare=False)

    def notice(self, family: str) -> Callable[[], None]:
        """Under way: a word on the log if the first call takes long, unless what is returned is
        called before."""
        if not self.is_new:
            return lambda: None
        self.is_new = False
        ahead = "attnplug.warm(model, lengths) does it ahead"
        timer = remark("the first call of this %s is compiling, once; %s", family, ahead)
        timer.start()
        return timer.cancel

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model begins anew: a compiled step is of one model."""
        return DecodeLoop, (self.why_not, self.fusion)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodeLoop":
        return DecodeLoop(self.why_not, copy.deepcopy(self.fusion, memo))

    def fused(self, model: Any) -> AbstractContextManager[None]:
        """Within it a step fuses what can be, wherever the weights have been moved to."""
        if self.fusion is None:
            return nullcontext()
        self.fusion.pack(model)
        return self.fusion.on()

    def compiled(self, model: Any, config: Any) -> Callable[..., torch.Tensor | None]:
        """The step compiled as transformers would compile the forward pass: with a `config` that
        was asked for at once, else once that pays."""
        wanted = config, () if self.fusion is None else self.fusion.key()
        if self.step is None or self.compiled_with != wanted:
            how = config or model._default_compile_config()
            alone, sums = is_on_one_device(model), one_shot_options(model)
            captures = is_capturable(model)
            own = PatientStep(decode_step, lambda: decode_step, math.inf)
            spare = own if captures else decode_step
            make = functools.partial(_compile, how, model.device, alone, sums, spare)
            if captures and config is None and self.patience > 0:
                left = math.inf if has_quick_steps(model) else self.patience
                self.step = PatientStep(decode_step, make, left)
            else:
                self.step = make()
            self.compiled_with = wanted
        return self.step

    def steps(self) -> str:
        """What the last call's steps are, "" where they are as they stay."""
        if self.rounds.tally.rounds:
            return str(self.rounds.tally)
        if self.hooked:
            return f"decode steps are not compiled: {self.hooked}, which runs at every step"
        return str(self.step) if isinstance(self.step, (PatientStep, LayeredStep)) else ""

    def compile_soon(self) -> None:
        """Have the next call compile its steps, and not once that pays."""
        self.patience = 0
        if isinstance(self.step, PatientStep):
            self.step.left = 0

    def take(self, *shape: Any) -> StepBuffers:
        """Buffers as `StepBuffers.empty` makes them, that nobody else uses: those of the last call
        where they fit, as compiled steps would be captured again for others."""
        found = self.buffers.pop(shape, None)
        return StepBuffers.empty(*shape) if found is None else found

    def give_back(self, made: StepBuffers, *shape: Any) -> None:
        self.buffers = {shape: made}


def _compile(
    config: Any, device: torch.device, is_alone: bool, sums: dict[str, Any], spare: Step
) -> Callable[..., torch.Tensor | None]:
    if config.backend == CAPTURE and device.type == "cuda":
        return CapturedStep(decode_step)  # the model's own code: nothing is left to compile
    # torch counts recompilations by code object: other models' are not this one's.
    code = decode_step.__code__.replace()
    own = types.FunctionType(code, decode_step.__globals__, "decode_step")
    if config.backend == "inductor" and device.type in BY_LAYER and is_alone:
        return LayeredStep(own, config, device, sums, spare)
    return torch.compile(own, **config.to_dict())


@dataclass
class _Look:
    """A step's verdict on its way to the host, the length that it is about, and the random state
    after it."""

    length: int
    verdict: Look
    random: torch.Tensor | None


class Decoding:
    """One call: `run` prefills, decodes and returns what transformers' loop returns."""

    def __init__(
        self,
        model: Any,
        ids: torch.Tensor,
        processors: Any,
        criteria: Any,
        config: Any,
        inputs: Any,
    ):
        self.model, self.processors, self.config, self.inputs = model, processors, config, inputs
        self.rows, self.length = ids.shape
        self.device = ids.device
        self.limits: list[Any] = [x for x in criteria if isinstance(x, MaxLengthCriteria)]
        self.last = min(limit.max_length for limit in self.limits)
        ends = [x.eos_token_id for x in criteria if not isinstance(x, MaxLengthCriteria)]
        self.ends = torch.cat([x.to(self.device).reshape(-1) for x in ends]) if ends else None
        self.pad = config._pad_token_tensor
        if self.pad is not None:
            self.pad = self.pad.to(self.device).reshape(())
        # One token at least, as transformers has it.
        # Chosen tokens are int64, so that int32 prompts come back as these.
        size, dtype = (self.rows, max(self.last, self.length + 1)), torch.int64
        self.prompt, self.ids = ids, ids.new_zeros(size, dtype=dtype)
        self.ids[:, : self.length] = ids
        self.greedy = not config.do_sample and len(processors) == 0
        self.looks: deque[_Look] = deque()
        self.lag = 0

    def run(self, loop: DecodeLoop) -> Any:
        with loop.turn.taken():
            self.hush = loop.notice(type(self.model).__name__)
            traced = counters["stats"]["unique_graphs"]
            try:
                return self._run(loop)
            finally:
                self.hush()
                if counters["stats"]["unique_graphs"] != traced:
                    # What dynamo traced with stays behind in cycles, and holds the cache, which may
                    # be most of a GPU's memory.
                    gc.collect()

    def _run(self, loop: DecodeLoop) -> Any:
        mask = self._real_keys()
        outputs = self.model._prefill(self.prompt, self.config, self.inputs)
        self.cache: PlugCache = outputs[CACHE]
        logits = outputs.logits[:, -1].to(self.device, torch.float32, copy=True)
        del outputs  # the logits of a whole prompt may be large
        loop.rounds.begin()
        if self.last <= self.length + 1:  # the prompt gives the only token
            return self._result(self._only_token(logits))
        self.wanting = layers_to_prepare(self.cache)
        self.bound = bindings_of(self.model)
        compiles = self.model._valid_auto_compile_criteria(self.inputs, self.config)
        drafts = drafts_of(self, mask is not None)
        if drafts and self.rows > 1 and mask is None:
            mask = torch.ones_like(self.prompt, dtype=torch.bool)  # rounds leave holes
        self.lag = LAG.get(self.device.type, 0) if compiles and self._may_overrun() else 0
        shape = self._shape(mask, drafts)
        buffers, end = loop.take(*shape), -1
        try:
            self._begin(buffers, mask)
            with self._steps(loop, buffers, mask, drafts):
                step = decode_step
                if compiles:
                    step = loop.compiled(self.model, self.config.compile_config)
                decode = self._decode if not drafts else loop.rounds.of(self, drafts, compiles)
                end = decode(step, buffers, logits)
        finally:
            loop.give_back(buffers, *shape)
            if end < 0:  # interrupted, such as by Ctrl-C; the caller may go on with the cache
                catch_up(self.cache.layers)
        return self._result(end)

    @contextmanager
    def _steps(
        self, loop: DecodeLoop, buffers: StepBuffers, mask: torch.Tensor | None, drafts: int
    ) -> Iterator[None]:
        """Within it model and cache are as steps want them."""
        layers = self.cache.layers
        real = window_mask(layers, mask, self.rows) if drafts else None
        with (
            loop.fused(self.model),
            self.model._optimize_model_for_decode(),
            stepping(layers),
            buffers.told_to(layers),
            in_rounds(layers, real, drafts + 1),
        ):
            yield

    def _shape(self, mask: torch.Tensor | None, drafts: int) -> tuple[Any, ...]:
        """What `StepBuffers.empty` takes. Steps that only draft look for no token that ends a row,
        and rows go on from places of their own."""
        room = None if mask is None else self.cache.room
        windows = sliding_layers(self.cache.layers)
        window = windows[0].max_cache_len if windows and not drafts else 0
        count = len(self.ends) if not drafts and self.ends is not None else 0
        positions = self.rows if drafts else len(self.inputs["position_ids"])
        return self.rows, positions, room, window, count, self.device

    def _may_overrun(self) -> bool:
        """Whether steps past the end leave no trace: a cache that nobody sees again, or layers that
        `crop` brings back to what they were, and no trace file."""
        if self.is_kept() and not all(crops_exactly(layer) for layer in self.cache.layers):
            return False
        return all(each.trace_to is None for each in self.bound.values())

    def is_kept(self) -> bool:
        """Whether anybody sees the cache again."""
        given = getattr(self.cache, "_is_user_defined", False)
        return bool(self.config.return_dict_in_generate or given)

    def _real_keys(self) -> torch.Tensor | None:
        """Which keys of the prompt are real `[B,T]`; None where all are, which costs a look: behind
        the prefill it would keep the host from going ahead."""
        mask = self.inputs.get("attention_mask")
        return None if mask is None or bool(mask.all()) else mask.to(torch.bool)

    def _begin(self, buffers: StepBuffers, mask: torch.Tensor | None) -> None:
        """Set the buffers to what the first step is about."""
        buffers.begin_behind(self.cache.layers)
        buffers.position.copy_(self.inputs["position_ids"][:, -1:] + 1)
        buffers.unfinished.fill_(True)
        buffers.verdict.zero_()
        for buffer, value in ((buffers.ends, self.ends), (buffers.pad, self.pad)):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        if buffers.window is not None:
            window = window_mask(self.cache.layers, mask, self.rows)
            assert window is not None  # the buffer is of these windows
            buffers.window.copy_(window)
        if mask is not None and buffers.mask is not None:
            buffers.show(mask)
            self.masked = mask.shape[1]

    def _decode(
        self, step: Callable[..., torch.Tensor | None], buffers: StepBuffers, logits: torch.Tensor
    ) -> int:
        """Decode until all rows have ended. Returns the final length; what later steps have made is
        still there."""
        options = self.step_options
        if isinstance(step, (LayeredStep, CapturedStep, PatientStep)):
            step.begin()
        self._choose(logits, buffers)
        while True:
            self._note_token(buffers.token[:, 0])
            due = due_layers(self.wanting, self.length - 1)
            # What a layer does on the host cannot be taken back.
            end = self._ended(buffers, lag=0 if due else self.lag)
            if end is not None:
                return end
            fed = self.model, self.cache, *buffers.stepped(), self.greedy, options
            capture_ahead(self, step, due, fed)
            self._prepare_layers(due, buffers)
            found = step(*fed)
            self.hush()  # from here on tokens come
            if found is not None:
                self._choose(found, buffers)

    @property
    def step_options(self) -> dict[str, Any]:
        """What a step hands to the model beside its tensors."""
        return {name: self.inputs[name] for name in ("logits_to_keep",) if name in self.inputs}

    def _only_token(self, logits: torch.Tensor) -> int:
        """Choose the call's only token; returns the final length."""
        chosen, valid = self._chosen(logits)
        if valid is not None and not valid:
            raise RuntimeError(REFUSED)
        self._note_token(chosen)
        return self.length

    def _choose(self, logits: torch.Tensor, buffers: StepBuffers) -> None:
        """The next tokens from logits `[B,V]`, into the buffers."""
        chosen, valid = self._chosen(logits)
        state = (buffers.unfinished, buffers.verdict, buffers.ends, buffers.pad)
        accept(chosen, buffers.token, *state)
        if valid is not None:
            buffers.verdict.copy_(torch.where(valid, buffers.verdict, INVALID))

    def _chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next tokens `[B]` from logits `[B,V]`; of a sample also whether torch.multinomial
        would take its shares, as a tensor."""
        scores = self.processors(self.ids[:, : self.length], logits)
        if not self.config.do_sample:
            return scores.argmax(-1), None
        shares = scores.softmax(-1)
        chosen = (shares / torch.empty_like(shares).exponential_(1)).argmax(-1)
        return chosen, shares.max() < torch.inf  # softmax gives nothing negative

    def _note_token(self, chosen: torch.Tensor) -> None:
        self.ids[:, self.length].copy_(chosen)
        self.count_token()

    def count_token(self) -> None:
        """The row has a token more; a limit may have something to say."""
        self.length += 1
        for limit in self.limits:
            known = limit.max_position_embeddings
            if known is not None and self.length == max(known, self.prompt.shape[1]) + 1:
                limit(self.ids[:, : self.length], None)  # for its warning

    def _prepare_layers(self, due: Sequence[Sequence[PlugLayer]], buffers: StepBuffers) -> None:
        """What layers want of the host before a step."""
        mask = None
        if buffers.mask is not None:
            self.masked += 1
            if due:
                mask = buffers.mask[:, 0, 0, : self.masked].long()
                mask[:, -1] = 1  # the step's own token
        prepare_layers(due, self.length - 1, mask)

    def _ended(self, buffers: StepBuffers, lag: int) -> int | None:
        """The length at which all rows had ended, if the host knows of one. It waits for steps that
        are more than `lag` back, and before the last token for all."""
        if self.ends is not None or self.config.do_sample:
            self.looks.append(self._look(buffers))
        done = self.length >= self.last
        while self.looks and (done or len(self.looks) > lag):
            look = self.looks.popleft()
            verdict = look.verdict.read()
            if verdict == INVALID:
                raise RuntimeError(REFUSED)
            if verdict == STOPPED:
                self._restore_random(look)
                return look.length
        return self.length if done else None

    def _look(self, buffers: StepBuffers) -> _Look:
        verdict = Look.at(buffers.verdict)
        sampled = self.config.do_sample and self.lag > 0
        return _Look(self.length, verdict, _random_state(self.device) if sampled else None)

    def _restore_random(self, look: _Look) -> None:
        if look.random is not None and look.length < self.length:
            self.set_random(look.random)

    def random_state(self) -> torch.Tensor:
        return _random_state(self.device)

    def set_random(self, state: torch.Tensor) -> None:
        """Have the generator that samples be in a state that it had."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def _result(self, end: int) -> Any:
        fed = self.length - self.prompt.shape[1] - 1  # the last token chosen is not
        if end < self.length and self.is_kept():
            self.cache.crop(end - self.length)
        note_steps(self.cache.layers, fed)
        for layer in self.cache.layers:
            if isinstance(layer, PlugLayer):
                layer.note_writes()  # compiled steps have written, and do not say so
        tokens: Any = self.ids[:, :end].clone(memory_format=torch.contiguous_format)
        if not self.config.return_dict_in_generate:
            return tokens
        named: dict[str, Any] = {CACHE: self.cache}
        return GenerateDecoderOnlyOutput(sequences=tokens, **named)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
