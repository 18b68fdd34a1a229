"""The cache layer of a model that reads a window of tokens and compressed entries of all."""

from typing import Any, ClassVar, NamedTuple

import torch
from transformers.cache_utils import StaticLayer

from attnplug.call import EntrySizes
from attnplug.errors import UnsupportedCallError
from attnplug.models.buffers import count_on, mark_buffer
from attnplug.models.cache import PlugLayer, RowBuffers
from attnplug.models.edits import check_count


class Weighted(NamedTuple):
    """Values `[B,r,D]` of r tokens and the gates that weight them, the newest last."""

    kv: torch.Tensor
    gate: torch.Tensor


class EntriesLayer(PlugLayer):
    """`keys` `[B,1,J+1+W,D]` are entries, room for those that are not complete, and the last W
    tokens, the newest last; `values` have no channels. `index_entries` `[B,J+1,D']` is what an
    indexer scores, `compressor` and `indexer` the last r tokens, which entries to come are made
    of, and `compressor_before` and `indexer_before` the part of the last complete window's tokens
    that the next entry has.

    A compressor calls it as it calls transformers' own layers (`DeepseekV4CSACache`), and gets
    windows of which the first and the last may be incomplete: as many as new tokens can belong to.
    Their entries are written, and nobody reads one before it is complete."""

    row_buffers: ClassVar[RowBuffers] = dict.fromkeys(
        ("compressor", "indexer", "compressor_before", "indexer_before", "index_entries")
    )
    compressor: Weighted | None = None
    indexer: Weighted | None = None
    compressor_before: Weighted | None = None
    indexer_before: Weighted | None = None
    index_entries: torch.Tensor | None = None
    tokens = 0  # of the update before
    is_croppable = False

    def __init__(self, max_cache_len: int, sizes: EntrySizes):
        super().__init__(max_cache_len=max_cache_len)
        self.sizes = sizes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        count_on(self, key_states.device)
        self.device = key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], 0
        room = self._entries() + self.sizes.window
        shape = self.batch_size, self.num_heads, room
        self.keys = key_states.new_zeros(*shape, self.k_head_dim)
        self.values = key_states.new_zeros(*shape, 0)
        self.cumulative_length = self.cumulative_length.to(self.device)
        for tensor in (self.keys, self.values, self.cumulative_length):
            mark_buffer(tensor, self.any_length)
        self.is_initialized = True

    def _entries(self) -> int:
        """Places for entries: one more than complete entries at most."""
        return self.max_cache_len // self.sizes.rate + 1 if self.sizes.rate else 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count tokens `[B,1,S,D]`. Returns the window that a single one sees, and `keys`, in which
        it is last; or the window before several ones and themselves, twice."""
        if kwargs:  # which the model's own code hands on, and attnplug's does not
            raise UnsupportedCallError(
                "the cache was made under the policy 'trained', which is not applied any more, and "
                "its entries are not as the model asks for them. Give a fresh cache."
            )
        self.flush()
        key_states, _ = self._admit(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        self.tokens = key_states.shape[2]
        window = self.keys[:, :, -self.sizes.window :]
        every = torch.cat((window, key_states), 2)
        window.copy_(every[:, :, self.tokens :])
        self.cumulative_length.add_(self.tokens)
        return (window, self.keys) if self.tokens == 1 else (every, every)

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The values and gates `[B,N r,D]` of the N windows that new tokens `[B,S,D]` may belong
        to, and the slot of their first token, `[]`."""
        rows, tokens, width = kv.shape
        rate = self.sizes.rate
        held = getattr(self, name)
        if held is None or len(held.kv) != rows:
            empty = (x.new_zeros(rows, rate, width) for x in (kv, gate))
            self.bind_rows(**{name: Weighted(*empty)})
            held = getattr(self, name)
        before = self.cumulative_length - tokens
        first = before // rate * rate
        windows = (tokens + rate - 2) // rate + 1
        places = torch.arange(windows * rate, device=kv.device) + (first - before + rate)
        places = places.clamp(max=rate + tokens - 1)
        found = []
        for mine, new in zip(held, (kv, gate), strict=True):
            every = torch.cat((mine, new.to(mine.dtype)), 1)
            mine.copy_(every[:, tokens:])
            found.append(every.index_select(1, places))
        return found[0], found[1], first

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first of windows `[B,N,r,2 D]` has of the window before it, `[B,r,D]`, of weight
        0 where there is none; keeps what the first window of the next tokens will have."""
        name, rate = f"{name}_before", self.sizes.rate
        parts = chunk_kv[..., :head_dim], chunk_gate[..., :head_dim]
        held = getattr(self, name)
        if held is None or len(held.kv) != len(chunk_kv):
            self.bind_rows(**{name: Weighted(*(torch.zeros_like(x[:, 0]) for x in parts))})
            held = getattr(self, name)
        first = (self.cumulative_length - self.tokens) // rate
        moved = (self.cumulative_length // rate - first).reshape(1)
        found = []
        for mine, new, none in zip(held, parts, (0.0, float("-inf")), strict=True):
            found.append(torch.where(first > 0, mine, none))
            every = torch.cat((mine[:, None], new.to(mine.dtype)), 1)
            mine.copy_(every.index_select(1, moved)[:, 0])
        return found[0], found[1]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Write the entries `[B,N,D]` of the windows that new tokens belong to, and return all
        `[B,J+1,D]`."""
        assert self.keys is not None  # update came first
        rows, count, width = compressed.shape
        if name == "compressor":
            entries = self.keys[:, 0, : -self.sizes.window]
        else:
            if self.index_entries is None or len(self.index_entries) != rows:
                size = self.keys.shape[2] - self.sizes.window
                self.bind_rows(index_entries=compressed.new_zeros(rows, size, width))
            entries = self.index_entries
            assert entries is not None
        first = (self.cumulative_length - self.tokens) // self.sizes.rate
        places = torch.arange(count, device=entries.device) + first
        places = places.clamp(max=entries.shape[1] - 1)  # the last is complete for nobody
        entries.index_copy_(1, places, compressed.to(entries.dtype))
        return entries

    def adopt(self, source: StaticLayer) -> None:
        if not source.is_initialized:
            return
        if not isinstance(source, EntriesLayer):
            raise UnsupportedCallError(
                "the cache was filled without the policy 'trained' and has no entries of its "
                "tokens. Give a fresh cache."
            )
        assert source.keys is not None
        tokens, window = int(source.cumulative_length), self.sizes.window
        self.check_room(tokens)
        self.lazy_initialization(source.keys, source.keys)
        assert self.keys is not None
        kept = min(self._entries(), source.keys.shape[2] - window)
        self.keys[:, :, :kept] = source.keys[:, :, :kept]
        self.keys[:, :, -window:] = source.keys[:, :, -window:]
        for name in self.row_buffers:
            theirs = getattr(source, name)
            if isinstance(theirs, Weighted):
                self.bind_rows(**{name: Weighted(*(x.clone() for x in theirs))})
        if source.index_entries is not None:
            rows, _, width = source.index_entries.shape
            mine = source.index_entries.new_zeros(rows, self._entries(), width)
            mine[:, :kept] = source.index_entries[:, :kept]
            self.bind_rows(index_entries=mine)
        self.cumulative_length.fill_(tokens)
        self.counted = tokens

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` raises, and change nothing."""
        check_count(tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            raise UnsupportedCallError(
                "crop: a window has moved on with its tokens, and an EntriesLayer does not keep "
                "what they have pushed out. Keep a copy of the cache (copy.deepcopy) to go back to."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Raises UnsupportedCallError for any token; 0 forgets none."""
        self.check_crop(tokens_to_remove)

    @property
    def crops_exactly(self) -> bool:
        """It does not crop."""
        return False

    def renew(self) -> None:
        """Edited keys leave entries as they are: they come from hidden states."""

    def _versions(self) -> Any:
        return None  # nothing is made of keys, so that edits leave nothing stale
