"""The cache layer of an indexed layer: latents and rotated keys, or keys and values, and the
indexer's own keys."""

from typing import Any, ClassVar

import torch
from transformers.cache_utils import StaticLayer

from attnplug.errors import UnsupportedCallError
from attnplug.models.cache import PlugLayer, RowBuffers
from attnplug.ops.common.checks import FP8

LARGEST = torch.finfo(FP8).max


def in_eight_bits(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn as bytes `[B,S,D]`, float32 `[B,S]`) of keys `[B,S,D]`: each key is divided by
    a factor that brings its largest number to the largest of fp8."""
    wide = keys.float()
    scale = wide.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (wide / scale[..., None]).to(FP8).view(torch.uint8), scale


class IndexedLayer(PlugLayer):
    """`keys` are latents `[B,1,max_length,R]`, `values` the rotated parts of keys
    `[B,1,max_length,P]`, and `indexer_keys` `[B,max_length,D]` what an indexer scores. A layer that
    takes another's picks has none of these, and one that reads another's latents has them alone
    (`has_index_only`). Where an indexer picks blocks, `keys` and `values` are plain ones. Where it
    picks pools of tokens, `pool_keys` `[B,pools+1,D]` are made of `indexer_keys` as they come.

    Where it picks blocks by compressed keys, these are `pooled` `[B,J,D]`. `turns`
    `[B,max_length,P]` are the cosines and sines of all tokens, and `shown` `[B,max_length]` is the
    mask that `pooled` was made under, all False where it was not.

    With `in_fp8` the keys of an indexer that scores tokens are float8_e4m3fn, kept as bytes, and
    `index_scale` `[B,max_length]` is what each is multiplied by.
    (The contract of transformers' StaticIndexedLayer, and of its sparse layer of MiniMax-M3.)"""

    row_buffers: ClassVar[RowBuffers] = dict.fromkeys(
        ("indexer_keys", "index_scale", "pool_keys", "turns", "pooled", "shown")
    )
    indexer_keys: torch.Tensor | None = None
    index_scale: torch.Tensor | None = None
    pool_keys: torch.Tensor | None = None
    turns: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    pool_size = 1  # tokens of a compressed key
    has_index_only = False  # its tokens are counted by the indexer's update

    def __init__(self, *, max_cache_len: int, in_fp8: bool = False):
        super().__init__(max_cache_len=max_cache_len)
        self.in_fp8 = in_fp8

    @property
    def crops_exactly(self) -> bool:
        """Index keys behind the last token are never read."""
        return True

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """`update_indexer` as MiniMax-M3 has it, for `[B,1,S,D]`: keys of blocks, never in fp8."""
        return self._write_index(keys[:, 0], False)[:, None]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys `[B,S,D]` of the tokens that `update` has just counted, and return the
        whole buffer, float8_e4m3fn with `in_fp8`. (GLM-5.3 packs keys with gates and a flag, an odd
        number of channels in all; they stay as they are.)"""
        stored = self.in_fp8 and indexer_key_states.shape[2] % 16 == 0
        keys = self._write_index(indexer_key_states, stored)
        return keys.view(FP8) if stored else keys

    def _write_index(self, indexer_key_states: torch.Tensor, stored: bool) -> torch.Tensor:
        """Write keys, as bytes of fp8 if `stored`, and return the buffer."""
        if self.turns is not None:
            raise UnsupportedCallError(
                "the cache was filled under the policy 'trained', which is not applied any more, "
                "and lacks the position ids that the model asks for. Give a fresh cache."
            )
        rows, tokens, width = indexer_key_states.shape
        if not self.is_initialized:
            self.has_index_only = True
        if self.has_index_only:
            none = indexer_key_states.new_zeros((rows, 1, tokens, 0))
            self.update(none, none)
        new, scale = in_eight_bits(indexer_key_states) if stored else (indexer_key_states, None)
        if self.indexer_keys is None or len(self.indexer_keys) != rows:
            self.bind_rows(indexer_keys=new.new_zeros((rows, self.max_cache_len, width)))
            if scale is not None:
                self.bind_rows(index_scale=scale.new_zeros((rows, self.max_cache_len)))
        keys = self.indexer_keys
        assert keys is not None
        slots = torch.arange(tokens, device=keys.device) + (self.cumulative_length - tokens)
        keys.index_copy_(1, slots, new.to(keys.dtype))
        if scale is not None:
            assert self.index_scale is not None
            self.index_scale.index_copy_(1, slots, scale)
        return keys

    @property
    def indexer_position_ids(self) -> None:
        """None: Qwen4-Exp's model would have each call rotate all tokens that they are kept of."""
        return None

    @indexer_position_ids.setter
    def indexer_position_ids(self, ids: torch.Tensor | None) -> None:
        """Positions are kept as `turns`."""

    def update_compressed(
        self, keys: torch.Tensor, turns: torch.Tensor, ratio: int
    ) -> torch.Tensor:
        """Write the index keys `[B,S,D]` and turns `[1 or B,S,P]` of tokens that `update` is about
        to count, and return how many there are with them, `[1]`. `pooled` has room for a block of
        every `ratio` tokens."""
        self.flush()
        rows, tokens, width = keys.shape
        before = torch.zeros(1, dtype=torch.int64, device=keys.device)
        if self.is_initialized:
            self._admit_rows(rows, tokens)
            before = self.cumulative_length.reshape(1)
        if self.indexer_keys is None or len(self.indexer_keys) != rows:
            size, self.pool_size = self.max_cache_len, ratio
            kind = torch.promote_types(keys.dtype, turns.dtype)  # autocast mixes precisions
            self.bind_rows(
                indexer_keys=keys.new_zeros(rows, size, width),
                turns=turns.new_zeros(rows, size, turns.shape[2]),
                pooled=turns.new_zeros((rows, size // ratio, width), dtype=kind),
                shown=keys.new_zeros(rows, size, dtype=torch.bool),
            )
        assert self.indexer_keys is not None and self.turns is not None
        slots = torch.arange(tokens, device=keys.device) + before
        self.indexer_keys.index_copy_(1, slots, keys.to(self.indexer_keys.dtype))
        self.turns.index_copy_(1, slots, turns.to(self.turns.dtype).expand(rows, -1, -1))
        return before + tokens

    def _admit_rows(self, rows: int, tokens: int) -> None:
        """Raise UnsupportedCallError where the host knows that `tokens` of `rows` do not fit."""
        if torch.compiler.is_compiling():
            return
        self.check_room(tokens)
        held = self._buffers()[0]
        if rows != len(held) and int(self.cumulative_length) > 0:
            self._fit_rows(held[:1].expand(rows, -1, -1, -1), held)

    def compressed_made(
        self, shown: torch.Tensor | None, before: torch.Tensor, ratio: int
    ) -> torch.Tensor:
        """How many leading blocks of each row, `[B]`, are in `pooled` as they are with `shown`
        `[B,max_length]`, None for all, where the layer had `before` tokens. Takes `shown` for the
        mask that `pooled` is made under from now on."""
        assert self.shown is not None  # update_compressed was called
        old = torch.arange(self.max_cache_len, device=before.device) < before
        if shown is None:
            other, done = ~self.shown & old, before // ratio
            self.shown.fill_(True)
        else:
            other, done = (shown != self.shown) & old, (shown & old).sum(-1) // ratio
            self.shown.copy_(shown)
        return torch.where(other.any(-1), 0, done)

    def forget_compressed(self) -> None:
        """Have all compressed keys made anew, as tokens come that have none."""
        assert self.shown is not None  # update_compressed was called
        self.shown.fill_(False)

    def adopt(self, source: StaticLayer) -> None:
        super().adopt(source)
        self.has_index_only = getattr(source, "has_index_only", False)
        self.pool_size = getattr(source, "pool_size", 1)
        theirs = getattr(source, "indexer_keys", None)
        if theirs is None or not source.is_initialized:
            return
        tokens = int(source.cumulative_length)
        if getattr(source, "indexer_position_ids", None) is not None and tokens > 0:
            raise UnsupportedCallError(
                "the cache was filled without the policy 'trained' and lacks the rotary embedding "
                "of its tokens. Give a fresh cache."
            )
        kept = {"indexer_keys": theirs, "index_scale": getattr(source, "index_scale", None)}
        kept |= {name: getattr(source, name, None) for name in ("turns", "pooled", "shown")}
        if getattr(source, "in_fp8", False) != self.in_fp8:
            kept |= self._requantized(theirs, kept["index_scale"], source)
        for name, theirs in kept.items():
            if theirs is not None:
                self._adopt_rows(name, theirs, tokens)
        self.pool_keys = None  # made anew when the next tokens come

    def _requantized(
        self, keys: torch.Tensor, scale: torch.Tensor | None, source: StaticLayer
    ) -> dict[str, torch.Tensor | None]:
        """The index keys of a layer that keeps them otherwise, as this one does."""
        if scale is not None:
            assert source.keys is not None  # a layer with index keys has counted their tokens
            wide = keys.view(FP8).float() * scale[..., None]
            return {"indexer_keys": wide.to(source.keys.dtype), "index_scale": None}
        if keys.shape[2] % 16 or not hasattr(source, "update_indexer"):  # of pools, or of blocks
            return {}
        return dict(zip(("indexer_keys", "index_scale"), in_eight_bits(keys), strict=True))

    def _adopt_rows(self, name: str, theirs: torch.Tensor, tokens: int) -> None:
        """Take over a side buffer, with its entries for the first `tokens` tokens."""
        per = self.pool_size if name == "pooled" else 1  # tokens of an entry
        room = self.max_cache_len // per
        mine = theirs.new_zeros(theirs.shape[0], room, *theirs.shape[2:])
        held = min(room, tokens // per)
        mine[:, :held] = theirs[:, :held]
        self.bind_rows(**{name: mine})

    def renew(self) -> None:
        """Edited latents leave the index keys as they are: they come from hidden states."""

    def _versions(self) -> Any:
        return None  # nothing is made of latents, so that edits leave nothing stale
