"""The cache layer of an indexed layer: latents and rotated keys, or keys and values, and the
indexer's own keys."""

from typing import Any, ClassVar

import torch
from transformers.cache_utils import StaticLayer

from attnplug.models.cache import PlugLayer, RowBuffers


class IndexedLayer(PlugLayer):
    """`keys` are latents `[B,1,max_length,R]`, `values` the rotated parts of keys
    `[B,1,max_length,P]`, and `indexer_keys` `[B,max_length,D]` what an indexer scores. A layer that
    takes another's picks has none of these, and one that reads another's latents has them alone
    (`has_index_only`). Where an indexer picks blocks, `keys` and `values` are plain ones. Where it
    picks pools of tokens, `pool_keys` `[B,pools+1,D]` are made of `indexer_keys` as they come.
    (The contract of transformers' StaticIndexedLayer, and of its sparse layer of MiniMax-M3.)"""

    row_buffers: ClassVar[RowBuffers] = {"indexer_keys": None, "pool_keys": None}
    indexer_keys: torch.Tensor | None = None
    pool_keys: torch.Tensor | None = None
    has_index_only = False  # its tokens are counted by the indexer's update

    @property
    def crops_exactly(self) -> bool:
        """Index keys behind the last token are never read."""
        return True

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """`update_indexer` as MiniMax-M3 has it, for `[B,1,S,D]`."""
        return self.update_indexer(keys[:, 0])[:, None]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys `[B,S,D]` of the tokens that `update` has just counted, and return the
        whole buffer."""
        rows, tokens, width = indexer_key_states.shape
        if not self.is_initialized:
            self.has_index_only = True
        if self.has_index_only:
            none = indexer_key_states.new_zeros((rows, 1, tokens, 0))
            self.update(none, none)
        if self.indexer_keys is None or len(self.indexer_keys) != rows:
            self.bind_rows(
                indexer_keys=indexer_key_states.new_zeros((rows, self.max_cache_len, width))
            )
        keys = self.indexer_keys
        assert keys is not None
        slots = torch.arange(tokens, device=keys.device) + (self.cumulative_length - tokens)
        keys.index_copy_(1, slots, indexer_key_states.to(keys.dtype))
        return keys

    def adopt(self, source: StaticLayer) -> None:
        super().adopt(source)
        self.has_index_only = getattr(source, "has_index_only", False)
        theirs = getattr(source, "indexer_keys", None)
        if theirs is None or not source.is_initialized:
            return
        tokens = int(source.cumulative_length)
        shape = (theirs.shape[0], self.max_cache_len, theirs.shape[2])
        self.bind_rows(indexer_keys=theirs.new_zeros(shape))
        assert self.indexer_keys is not None
        self.indexer_keys[:, :tokens] = theirs[:, :tokens]
        self.pool_keys = None  # made anew when the next tokens come

    def renew(self) -> None:
        """Edited latents leave the index keys as they are: they come from hidden states."""

    def _versions(self) -> Any:
        return None  # nothing is made of latents, so that edits leave nothing stale
