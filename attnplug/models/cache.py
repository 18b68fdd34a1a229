"""The KV cache that attnplug gives to generate: transformers' static layers, which torch.compile
and CUDA graphs want, made to crop and to reorder in place.

`PlugLayer` is one full-attention layer's keys, values and length. A method with state of its own
subclasses it. Sliding windows are `SlidingLayer`s; other layers stay what transformers makes them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from attnplug.errors import UnsupportedCallError
from attnplug.models.autocast import autocast_dtype
from attnplug.models.buffers import count_down, count_on, mark_buffer
from attnplug.models.edits import EditableCache, check_count, check_room, first_filled
from attnplug.models.inference_mode import is_foreign, own
from attnplug.models.sliding import SlidingLayer
from attnplug.models.static import static_cache
from attnplug.models.sync import may_read
from attnplug.models.watched import WatchedLayer

RowBuffers = Mapping[str, float | None]  # name of a side buffer: what `reset` fills it with
Shape = tuple[int, ...]
MakeBuffers = Callable[[list[Shape], torch.dtype, torch.device], list[torch.Tensor]]


class PlugLayer(WatchedLayer):
    """Keys and values `[B,Hkv,max_length,D]`, allocated once, and the number of tokens in them.

    Unlike its base it can be cropped (speculative decoding), serves batch repetition and selection,
    and reorders beams in place (a CUDA graph keeps reading the base's old tensors).

    A subclass that sets `defers_write` may leave the writing of a step's token to the op that
    attends: where `defer_next` was set, `update` keeps the token in `pending` and returns the
    buffers without it. The attention that follows takes it (`take_pending`) or writes it (`flush`),
    and whatever else touches the layer writes it first. No token is pending between two passes.

    A subclass that keeps more than keys and values names it in `row_buffers`: attributes, each a
    tensor or a NamedTuple of tensors whose first dimension is the rows, and what `reset` fills them
    with (None: nothing). `lazy_initialization` makes them by `bind_rows`, the base moves them with
    their rows, and `update` and `crop` keep true what they say of tokens.
    """

    row_buffers: ClassVar[RowBuffers] = {}
    is_croppable = True
    defers_write = False
    steps_are_alike = False  # a call's first step does nothing on the host that later ones do not
    defer_next = False  # for one update: PolicyHook sets it where plug_attention will follow
    exposes_buffers = False  # a prefill's attention got the buffers themselves, not copies
    pending: tuple[torch.Tensor, torch.Tensor] | None = None
    counted = 0  # at least the tokens in the buffers, while no step has come uncounted
    uncounted = False  # a compiled step has come, which counts on the device alone
    captured = False  # a CUDA graph has steps of this layer, and whoever replays it does not say
    query_heads: int | None = None  # of the attention layer that it was made for, where known
    any_length: bool = False  # code compiled for this cache is to serve others of other lengths
    prefill_tokens: int = 0  # of the prefill that generate feeds in chunks now, all of them
    steps_are_prepared: bool = False  # generate is at its prompt: prepare_steps comes before a step
    layers_behind: int = 0  # full-attention layers of its device that come after it
    first_key: torch.Tensor | None = None  # of each row [B], while generate steps a padded batch
    round_part: str = ""  # "draft", "verify" or "dense" while generate decodes in rounds
    no_rounds: str = ""  # why it does not
    is_expected: bool | None = None  # a step is captured before `prepare_steps` (None: never)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        count_on(self, key_states.device)
        super().lazy_initialization(key_states, value_states)
        for buffer in self._buffers():
            mark_buffer(buffer, self.any_length)
        self.note_writes()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.flush()
        key_states, value_states = self._admit(key_states, value_states)
        defer, self.defer_next = self.defer_next, False
        if defer and self.is_initialized and key_states.shape[2] == 1:
            self.pending = key_states, value_states
            return self._buffers()
        return self._write(key_states, value_states, *args, **kwargs)

    def _admit(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens as the buffers take them, under autocast cast as sdpa casts them. Raises
        UnsupportedCallError for another dtype, and where the host knows that they do not fit."""
        if torch.compiler.is_compiling():
            self.uncounted = True
        else:
            self._fit_rows(key_states, value_states)
            self.check_room(key_states.shape[2])
        cast = autocast_dtype(key_states.device)
        held = self._buffers()[0].dtype if self.is_initialized else cast or key_states.dtype
        if cast is not None:
            key_states, value_states = key_states.to(held), value_states.to(held)
        if key_states.dtype != held:
            raise UnsupportedCallError(
                f"the cache holds {held} and got keys of {key_states.dtype}. Use a cache in the "
                "precision that it began with: all of it inside torch.autocast, or none."
            )
        if not torch.compiler.is_compiling():
            self.counted += key_states.shape[2]
        return key_states, value_states

    def known_length(self, tokens: int) -> int | None:
        """The number of tokens in the buffers; None where the host may not read it, or has no need
        to: what it has counted says that `tokens` more fit. A GPU is asked once the count says
        otherwise, and after steps that were not counted."""
        count = self.cumulative_length
        if not may_read(count):
            self.captured |= not count.is_meta
            return None
        fits = self.counted + tokens <= self.max_cache_len
        if count.is_cuda and fits and not (self.uncounted or self.captured):
            return None
        self.uncounted = False
        self.counted = int(count) + (self.pending is not None)
        return self.counted

    def check_room(self, tokens: int) -> None:
        """Raise UnsupportedCallError where the host knows that `tokens` more do not fit."""
        length = self.known_length(tokens)
        if length is not None:
            check_room(length, tokens, self.max_cache_len)

    def _fit_rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Give an empty cache, as `reset` leaves it, the batch size of new tokens. Raises
        UnsupportedCallError where it holds tokens of another one."""
        rows = key_states.shape[0]
        if not self.is_initialized or rows == self._buffers()[0].shape[0]:
            return
        if int(self.cumulative_length) > 0:
            raise UnsupportedCallError(
                f"the cache holds tokens of {self._buffers()[0].shape[0]} rows and got {rows}. "
                "Call its reset() first, or make another with attnplug.make_cache."
            )
        self.is_initialized = False
        self.lazy_initialization(key_states, value_states)

    def _write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put tokens into the buffers and count them; whatever writes tokens comes through here."""
        tokens = key_states.shape[2]
        if self._knows_only(tokens):
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            buffers = self._buffers()  # of which a copy is faster than index_copy_
            buffers[0][:, :, :tokens].copy_(key_states)
            buffers[1][:, :, :tokens].copy_(value_states)
            self.cumulative_length.fill_(tokens)
        else:
            buffers = super().update(key_states, value_states, *args, **kwargs)
        self.note_writes()
        return buffers

    def _knows_only(self, tokens: int) -> bool:
        """Whether all that the layer counts are the `tokens` that it is about to write."""
        steps = self.uncounted or self.captured
        return not (torch.compiler.is_compiling() or steps) and self.counted == tokens

    def note_buffers(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Called with what a prefill's attention got, after the `update` that returned it."""
        self.exposes_buffers = key is self.keys and value is self.values

    def mask_of_buffer(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """A mask `[B,S]` of the first keys of the buffer, for all of it."""
        if mask is None:
            return None
        return torch.nn.functional.pad(mask, (0, self.max_cache_len - mask.shape[1]), value=True)

    def take_pending(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The token that `update` has deferred, for an op that will write and count it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.versions = None  # who takes it writes it, and calls `note_writes` if at all
        return pending

    def _leave_inference_mode(self) -> None:
        """Have tensors that the caller may write: copies, in the first turn outside of it."""
        if is_foreign([self.cumulative_length]):
            self.cumulative_length = own(self.cumulative_length)
            mark_buffer(self.cumulative_length, self.any_length)
        if not self.is_initialized:
            return
        if is_foreign(self._buffers()):
            self._rebind(*map(own, self._buffers()))
        if is_foreign(self._row_tensors(self.row_buffers)):
            self._rebind_rows(own)

    def flush(self) -> None:
        """Write the token that `update` has deferred, if there is one. All that writes to a layer
        comes through here first, but `reset`, which wants no such token."""
        self.notice_edits()
        self._leave_inference_mode()
        if (pending := self.take_pending()) is not None:
            self._write(*pending)

    @property
    def crops_exactly(self) -> bool:
        """Whether `crop` leaves side buffers as if the steps had not been: generate's steps then
        run ahead of what the host knows, also in a cache that somebody sees again."""
        return next(self._row_tensors(self.row_buffers), None) is None

    def prepare_step(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Called by generate on the host, outside of compiled code, before a step, for what a
        compiled step cannot do. `tokens` are in the cache, as far as generate knows, maybe more;
        `mask` `[B,T]` is the attention mask."""

    @classmethod
    def due_layers(cls, layers: Sequence["PlugLayer"], tokens: int) -> Sequence["PlugLayer"]:
        """Those of layers of this class whose `prepare_step` has work before a step. Where there
        are any, generate waits for the steps before: a class that has work now and then overrides
        it."""
        return layers

    @classmethod
    def prepare_steps(
        cls, layers: Sequence["PlugLayer"], tokens: int, mask: torch.Tensor | None
    ) -> None:
        """`prepare_step` of layers of this class; one that does more for them together overrides
        it."""
        for layer in layers:
            layer.prepare_step(tokens, mask)

    def bind_rows(self, **buffers: Any) -> None:
        """Keep new side buffers under their names in `row_buffers`, at a fixed address."""
        for name, buffer in buffers.items():
            setattr(self, name, buffer)
        for tensor in self._row_tensors(buffers):
            mark_buffer(tensor, self.any_length)

    def tensors(self) -> list[torch.Tensor]:
        """Keys, values and the side buffers that are there."""
        return [*self._buffers(), *self._row_tensors(self.row_buffers)]

    def _row_tensors(self, names: Iterable[str]) -> Iterator[torch.Tensor]:
        """The tensors of the side buffers of these names; a buffer that is None has none."""
        for name in names:
            buffer = getattr(self, name, None)
            if buffer is not None:
                yield from (buffer,) if isinstance(buffer, torch.Tensor) else buffer

    def _rebind_rows(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every side buffer by what `move` makes of it."""
        moved: dict[str, Any] = {}
        for name in self.row_buffers:
            buffer = getattr(self, name, None)
            if isinstance(buffer, torch.Tensor):
                moved[name] = move(buffer)
            elif buffer is not None:
                moved[name] = type(buffer)(*map(move, buffer))
        self.bind_rows(**moved)

    def reset(self) -> None:
        """Forget all tokens."""
        self.take_pending()
        self._leave_inference_mode()
        self.counted, self.uncounted = 0, False
        super().reset()
        for name, empty in self.row_buffers.items():
            if empty is not None:
                for tensor in self._row_tensors([name]):
                    tensor.fill_(empty)
        self.note_writes()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; 0 forgets none. Positive: ValueError."""
        check_count(tokens_to_remove)
        self.flush()
        self.counted = max(0, self.counted + int(tokens_to_remove))
        if self.is_initialized:
            self.take_back(-int(tokens_to_remove))

    def take_back(self, tokens: int | torch.Tensor) -> None:
        """`crop` by a count `[]` that may be the device's own, also in captured code: nothing is
        pending, and the host's count stays at least that of the tokens."""
        self.take_back_all([self], tokens)

    @classmethod
    def take_back_all(cls, layers: Sequence["PlugLayer"], tokens: int | torch.Tensor) -> None:
        """`take_back` of layers of this class that hold the same tokens, in few launches: a
        subclass that counts more than tokens overrides this."""
        count_down([layer.cumulative_length for layer in layers], tokens)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give each row the content of row `beam_idx[row]`, in place where that changes no size."""
        self.flush()
        if self.is_initialized and len(beam_idx) != len(self._buffers()[0]):
            self.batch_select_indices(beam_idx)
        elif self.is_initialized:
            for buffer in (*self._buffers(), *self._row_tensors(self.row_buffers)):
                buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))
        self.note_writes()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; allocates, as the batch grows."""
        self.flush()
        if self.is_initialized:
            self._rebind(*(buffer.repeat_interleave(repeats, 0) for buffer in self._buffers()))
            self._rebind_rows(lambda buffer: buffer.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`; allocates, as the batch changes."""
        self.flush()
        if self.is_initialized:
            self._rebind(*(buffer[indices] for buffer in self._buffers()))
            self._rebind_rows(lambda buffer: buffer[indices])

    def adopt(self, source: StaticLayer) -> None:
        """Append the tokens of another layer. Reads their number on the host."""
        if isinstance(source, PlugLayer):
            source.flush()
        if source.is_initialized:
            assert source.keys is not None and source.values is not None
            tokens = int(source.cumulative_length)
            new = source.keys[:, :, :tokens], source.values[:, :, :tokens]
            if tokens > 0:
                self.note_buffers(*self.update(*new))
            elif not self.is_initialized:
                self.lazy_initialization(*new)
        self.exposes_buffers = isinstance(source, PlugLayer) and source.exposes_buffers

    def continue_from(self, source: "PlugLayer") -> None:
        """Take from a layer whose tokens were adopted what its steps have left beside them, such as
        counts and hints. A side buffer that follows from the tokens is made again."""

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None  # is_initialized was checked
        return self.keys, self.values

    def _initialize(
        self, key_states: torch.Tensor, value_states: torch.Tensor, zeros: MakeBuffers
    ) -> None:
        """`lazy_initialization` with buffers of `zeros`, as it would allocate on the device."""
        self.device = key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        tokens = (self.batch_size, self.num_heads, self.max_cache_len)
        shapes = [(*tokens, width) for width in (self.k_head_dim, self.v_head_dim)]
        self.keys, self.values = zeros(shapes, key_states.dtype, self.device)
        count_on(self, self.device)
        self.cumulative_length = self.cumulative_length.to(self.device)
        for tensor in (self.keys, self.values, self.cumulative_length):
            mark_buffer(tensor, self.any_length)
        self.is_initialized = True
        self.note_writes()

    def _rebind(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values, self.batch_size = keys, values, len(keys)
        for buffer in self._buffers():
            mark_buffer(buffer, self.any_length)
        self.note_writes()


MakeLayer = Callable[[int, int], PlugLayer]  # of the layer's index and max_length


class PlugCache(EditableCache):
    """A static cache whose full-attention layers are PlugLayers (or a method's subclass).

    `layers` come from transformers' own StaticCache, so that every other kind of layer is what the
    model expects. Its length is fixed; that of a `GrowingCache` is not.
    """

    @property
    def room(self) -> int | None:
        """How many tokens the full-attention layers hold at most; None where there are none."""
        lengths = [layer.max_cache_len for layer in self.layers if isinstance(layer, PlugLayer)]
        return min(lengths, default=None)

    def reserve(self, length: int) -> None:
        """Make sure that `length` tokens fit in all. Raises UnsupportedCallError where they do
        not."""
        room = self.room
        if room is not None and length > room:
            raise UnsupportedCallError(
                f"this call may come to {length} tokens, and the cache that it was given holds at "
                f"most {room}. Make a larger one with attnplug.make_cache(model, {length}), pass a "
                "smaller max_new_tokens, or leave the cache to generate."
            )

    def prepare(self, tokens: int) -> None:
        """Called before a forward pass of `tokens` tokens. Raises UnsupportedCallError where the
        host knows that they do not fit: no layer has taken any of them yet."""
        layer = first_filled(layer for layer in self.layers if isinstance(layer, PlugLayer))
        if layer is not None:
            layer.check_room(tokens)

    def refresh(self) -> None:
        """Look at all tokens again, after keys or values were edited in place: a method chooses by
        summaries or codes that it keeps of them. A pass notices most edits by itself, but none
        between compiled or captured steps of a loop of your own, or under `torch.inference_mode`.
        Reads the number of tokens on the host."""
        for layer in self.layers:
            if isinstance(layer, PlugLayer):
                layer.refresh()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As transformers asks for the sizes that a forward pass will find, before the pass."""
        if not torch.compiler.is_compiling():
            self.prepare(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    @classmethod
    def from_static(cls, cache: StaticCache, make_layer: MakeLayer) -> Self:
        """Replace the full-attention layers of a fresh static cache by what `make_layer(index,
        max_length)` makes, and its sliding windows by ours."""
        return cls(layers=[_ours(layer, i, make_layer) for i, layer in enumerate(cache.layers)])

    @classmethod
    def for_config(cls, config: PreTrainedConfig, max_length: int, make_layer: MakeLayer) -> Self:
        """An empty cache of `max_length` tokens for a model's config."""
        return cls.from_static(static_cache(config, max_length), make_layer)

    def adopt(self, source: "PlugCache") -> None:
        """Take over what a cache of the same model holds, so that one prefill serves the decodes of
        several policies. Raises ValueError where this cache is not empty."""
        if any(isinstance(layer, PlugLayer) and layer.is_initialized for layer in self.layers):
            raise ValueError("adopt needs an empty cache; make one with attnplug.make_cache")
        for index, layer in enumerate(source.layers):
            mine = self.layers[index]
            if isinstance(mine, PlugLayer):
                assert isinstance(layer, StaticLayer)  # both caches come from one config
                mine.adopt(layer)
            else:
                self.layers[index] = copy.deepcopy(layer)


def _ours(layer: Any, index: int, make_layer: MakeLayer) -> Any:
    """What stands in a PlugCache for a layer of transformers' static cache."""
    if type(layer) is StaticSlidingWindowLayer:
        return SlidingLayer.taking_over(layer)
    indexed = hasattr(layer, "update_indexer") or hasattr(layer, "update_index")
    if type(layer) is StaticLayer or indexed:
        made = make_layer(index, layer.max_cache_len)
        if not indexed or hasattr(made, "update_indexer"):  # an IndexedLayer has both
            return _adopt(layer, made)
    return layer


def _adopt(old: StaticLayer, new: PlugLayer) -> PlugLayer:
    """Initialise the new layer where the old one was: nothing is allocated in a compiled region."""
    if old.keys is not None and old.values is not None:
        new.lazy_initialization(old.keys[:, :, :0], old.values[:, :, :0])
    return new
