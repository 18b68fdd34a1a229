"""A model's own attention in an evaluation: sdpa, but for sliding windows band by band.

sdpa reads a window through a mask of all tokens by all tokens, which takes most of the time of a
long prompt. A band attends to the same keys through its part of the same mask."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from attnplug.models.bands import sdpa_in_bands
from attnplug.models.hf import rowwise_mask
from attnplug.models.names import OWN_NAME


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Within it a model that has no policy, and whose attention is sdpa, reads windows in bands."""
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    if own != "sdpa":
        yield
        return
    AttentionInterface.register(OWN_NAME, sdpa_in_bands)
    AttentionMaskInterface.register(OWN_NAME, rowwise_mask)
    config._attn_implementation = OWN_NAME
    try:
        yield
    finally:
        config._attn_implementation = own
