"""A sliding-window layer of a static cache whose steps count on the device.

transformers' own counts its tokens on the host, which a captured step leaves behind: its replays
run no code of the host. While `stepping`, this one does the same with a count on the device. While
generate decodes in rounds, a round's tokens stay beside the windows until it is known which of them
are accepted (`Round`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers.cache_utils import StaticSlidingWindowLayer

from attnplug.errors import UnsupportedCallError
from attnplug.models.buffers import count_on
from attnplug.models.edits import check_count, first_filled
from attnplug.models.inference_mode import is_foreign, own


@dataclass
class Round:
    """What the full windows of a model, of W tokens each, are told of a round of M tokens: which of
    their keys are `real` `[B,1,1,W]` (bool), how many tokens the round has fed, `place` `[]`, and
    which of a window's keys and then of the round's its tokens see, `seen` `[M,W+M]` (bool)."""

    real: torch.Tensor
    place: torch.Tensor
    seen: torch.Tensor

    @classmethod
    @torch.inference_mode(False)  # captured steps and later calls outside of it read it
    def of(cls, real: torch.Tensor, tokens: int) -> "Round":
        window, device = real.shape[-1], real.device
        key = torch.arange(window + tokens, device=device)
        token = torch.arange(tokens, device=device)[:, None]
        seen = (key > token) & (key <= token + window)
        return cls(real.clone(), torch.zeros((), dtype=torch.int64, device=device), seen)

    def mask(self, tokens: int) -> torch.Tensor:
        """Which keys the next token, or all of a round's, may see, `[B,1,tokens,W+M]`."""
        own = self.real.new_ones(*self.real.shape[:3], len(self.seen))
        seen = self.seen if tokens > 1 else self.seen.index_select(0, self.place.reshape(1))
        return torch.cat([self.real, own], -1) & seen

    def moved(self, held: torch.Tensor, new: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """What a window holds along its last dimension but one, once it has moved on `by` tokens
        `[B,1]` of the round."""
        places = torch.arange(held.shape[-2], device=held.device) + by
        index = places[:, None, :, None].expand(*held.shape)
        return torch.cat([held, new], -2).gather(-2, index)

    def settle(self, layers: Iterable["SlidingLayer"], by: torch.Tensor) -> None:
        """Have all windows take in the round's first `by` tokens `[B,1]`, and begin another."""
        for layer in layers:
            assert layer.keys is not None and layer.values is not None and layer.fed is not None
            for held, new in zip((layer.keys, layer.values), layer.fed, strict=True):
                held.copy_(self.moved(held, new, by))
        real = self.real.mT
        own = real.new_ones(*real.shape[:2], len(self.seen), 1)
        self.real.copy_(self.moved(real, own, by).mT)
        self.place.zero_()


class SlidingLayer(StaticSlidingWindowLayer):
    """The last `max_cache_len` tokens, oldest first: keys and values `[B,Hkv,max_cache_len,D]`.

    While `counts_on_device`, tokens come one at a time, `cumulative_length` is how many the window
    holds, and `cumulative_length_int` stands still. While there is a `round`, the window does, too,
    and the tokens of the round are in `fed`, keys and values `[B,Hkv,M,D]`."""

    counts_on_device = False
    round: Round | None = None
    fed: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def taking_over(cls, layer: StaticSlidingWindowLayer) -> Self:
        """With the state of transformers' own."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        return made

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        count_on(self, key_states.device)
        super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base: write tokens, and return what their queries may see."""
        self._leave_inference_mode()
        if not torch.compiler.is_compiling():
            self._fit_rows(key_states, value_states)
        if self.round is not None:
            return self._feed(self.round, key_states, value_states)
        if not self.counts_on_device:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None  # a prefill came first
        roll_in(self.keys, key_states, self.cumulative_length, 2)
        roll_in(self.values, value_states, self.cumulative_length, 2)
        self.cumulative_length.add_(1).clamp_(max=self.max_cache_len)
        return self.keys, self.values

    def _feed(
        self, round: Round, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep tokens of a round, one or all; returns the window's keys and values and its own."""
        assert self.keys is not None and self.values is not None and self.fed is not None
        for fed, new in zip(self.fed, (key_states, value_states), strict=True):
            if new.shape[2] == 1:
                fed.index_copy_(2, round.place.reshape(1), new)
            else:
                fed.copy_(new)
        return torch.cat([self.keys, self.fed[0]], 2), torch.cat([self.values, self.fed[1]], 2)

    def _leave_inference_mode(self) -> None:
        """Have tensors that the caller may write: copies, in the first turn outside of it."""
        held = [self.cumulative_length]
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            held += self.keys, self.values
        if is_foreign(held):
            self.cumulative_length, *buffers = map(own, held)
            if buffers:
                self.keys, self.values = buffers
            for tensor in (self.cumulative_length, *buffers):
                torch._dynamo.mark_static_address(tensor)

    def _fit_rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Give an empty window, as `reset` leaves it, the batch size of new tokens."""
        if self.is_initialized and not self.cumulative_length_int:
            assert self.keys is not None
            if key_states.shape[0] != self.keys.shape[0]:
                self.is_initialized = False
                self.lazy_initialization(key_states, value_states)

    @torch.inference_mode(False)
    def empty_round(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the keys and values of a round."""
        assert self.keys is not None and self.values is not None
        shapes = [(*held.shape[:2], tokens, held.shape[3]) for held in (self.keys, self.values)]
        keys, values = map(self.keys.new_zeros, shapes)
        return keys, values

    def reset(self) -> None:
        self._leave_inference_mode()
        self.counts_on_device = False
        super().reset()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` raises, and change nothing."""
        check_count(tokens_to_remove)
        tokens = self.cumulative_length_int
        if tokens_to_remove and tokens > self.max_cache_len:
            raise UnsupportedCallError(
                f"a sliding window of {self.max_cache_len} tokens has rolled on to {tokens}, and "
                f"has forgotten what it held {-tokens_to_remove} tokens ago. Crop before that, or "
                "keep a copy of the cache (copy.deepcopy) to go back to."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; 0 forgets none. Positive: ValueError. Raises
        UnsupportedCallError where the window has rolled."""
        self.check_crop(tokens_to_remove)
        if self.is_initialized and tokens_to_remove:
            self._leave_inference_mode()
            self.cumulative_length_int = max(0, self.cumulative_length_int + int(tokens_to_remove))
            self.cumulative_length.fill_(self.cumulative_length_int)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give each row the content of row `beam_idx[row]`, in place where that changes no size."""
        self._leave_inference_mode()
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            if len(beam_idx) != len(self.keys):
                return self.batch_select_indices(beam_idx)
            for buffer in (self.keys, self.values):
                buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; allocates, as the batch grows."""
        self._rebind(lambda buffer: buffer.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`; allocates, as the batch changes."""
        self._rebind(lambda buffer: buffer[indices])

    def _rebind(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._leave_inference_mode()
        if not self.is_initialized:
            return
        assert self.keys is not None and self.values is not None
        self.keys, self.values = move(self.keys), move(self.values)
        self.batch_size = self.keys.shape[0]
        for buffer in (self.keys, self.values):
            torch._dynamo.mark_static_address(buffer)


def roll_in(
    window: torch.Tensor, new: torch.Tensor | bool, held: torch.Tensor, dimension: int
) -> None:
    """Put one more into a window that holds `held` `[]` along `dimension`, behind the others: a
    full one forgets its first."""
    size = window.shape[dimension]
    window.copy_(torch.where(held < size, window, window.roll(-1, dimension)))
    slot = held.clamp(max=size - 1).reshape(1)
    if isinstance(new, torch.Tensor):
        window.index_copy_(dimension, slot, new)
    else:
        window.index_fill_(dimension, slot, new)


def sliding_layers(layers: Iterable[Any]) -> list[SlidingLayer]:
    return [layer for layer in layers if isinstance(layer, SlidingLayer)]


def count_on_device(layers: Iterable[Any]) -> None:
    """From here on these layers' windows take single tokens and count them on the device."""
    for layer in sliding_layers(layers):
        layer.cumulative_length.fill_(min(layer.cumulative_length_int, layer.max_cache_len))
        layer.counts_on_device = True


@contextmanager
def stepping(layers: Iterable[Any]) -> Iterator[None]:
    """Within it these layers' windows count on the device. Whoever knows how many tokens came says
    so by `note_steps` afterwards."""
    count_on_device(layers)
    try:
        yield
    finally:
        for layer in sliding_layers(layers):
            layer.counts_on_device = False


@contextmanager
def in_rounds(layers: Iterable[Any], real: torch.Tensor | None, tokens: int) -> Iterator[None]:
    """Within it these layers' windows, which are full, take `tokens` a round. `real` `[B,1,1,W]`
    says which keys of a window are real; None where the model has no windows."""
    windows = sliding_layers(layers)
    if real is None:
        yield
        return
    shared = Round.of(real, tokens)
    try:
        for layer in windows:
            layer.round, layer.fed = shared, layer.empty_round(tokens)
        yield
    finally:
        for layer in windows:
            layer.round = layer.fed = None


def round_of(layers: Iterable[Any]) -> Round | None:
    """The round that the windows among these layers share; None outside of rounds."""
    return next((layer.round for layer in layers if isinstance(layer, SlidingLayer)), None)


def note_steps(layers: Iterable[Any], steps: int) -> None:
    """Tell these layers' windows how many tokens they have taken while `stepping`."""
    for layer in sliding_layers(layers):
        layer.cumulative_length_int += steps


def catch_up(layers: Sequence[Any]) -> None:
    """Tell windows of the steps of a call that was interrupted while `stepping`, by the tokens of a
    full-attention layer."""
    windows = sliding_layers(layers)
    if windows:
        full = first_filled(layer for layer in layers if layer not in windows)
        note_steps(windows, int(full.cumulative_length) - _tokens_of(windows))


def _tokens_of(windows: Iterable[SlidingLayer]) -> int:
    """How many tokens windows have taken; some may be filled by no layer of the model."""
    return max(layer.cumulative_length_int for layer in windows)


def held_by_windows(layers: Iterable[Any]) -> torch.Tensor:
    """How many tokens windows have taken while `stepping`, counted on the device `[]`: by the first
    of them that a layer of the model fills."""
    windows = sliding_layers(layers)
    filled = next((layer for layer in windows if layer.is_initialized), windows[0])
    return filled.cumulative_length


def window_mask(layers: Sequence[Any], real: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """Which keys of a window are real `[B,1,1,W]` (bool), of all these layers' windows, which are
    of one size; `real` `[B,T]` are those of all tokens so far, None: all. None without a window."""
    windows = sliding_layers(layers)
    if not windows:
        return None
    size, tokens = windows[0].max_cache_len, _tokens_of(windows)
    device = next(layer.device for layer in layers if layer.is_initialized)
    mask = torch.zeros((rows, 1, 1, size), dtype=torch.bool, device=device)
    held = min(size, tokens)
    mask[:, 0, 0, :held] = True if real is None else real[:, tokens - held : tokens]
    return mask


def crops_exactly(layer: Any) -> bool:
    """Whether `crop` leaves a layer as if the steps had not been. A window forgets what it would
    have to bring back."""
    return not isinstance(layer, SlidingLayer) and layer.crops_exactly
