"""The names that attnplug and transformers share: of the attention function, and of the keyword
arguments that reach it."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.masking_utils import create_causal_mask

ATTENTION_NAME = "attnplug"
# The same attention for a config whose own is eager: its model may do sums with the masks.
ADDITIVE_NAME = "attnplug_additive"
INDEXED_NAME = "attnplug_indexed"  # of a model whose layers pick their tokens by an indexer
LATENT_NAME = "attnplug_latent"  # of a model whose layers attend to latents, all of them
ENTRIES_NAME = "attnplug_entries"  # of a model whose layers read windows and compressed entries
ATTENTION_NAMES = (ATTENTION_NAME, ADDITIVE_NAME, INDEXED_NAME, LATENT_NAME, ENTRIES_NAME)
OWN_NAME = "attnplug_own"  # of a model without a policy, in an evaluation: windows in bands
PIECES_NAME = "attnplug_pieces"  # while a prompt runs in pieces; it has no mask function
# That of continuous batching. transformers leaves the masks out where a name has "flash" in it; the
# second is how 5.17 and 5.18 write it.
PAGED_NAMES = ("attnplug_flash", "paged|attnplug_flash")
# What transformers calls the cache among a model's arguments and outputs: "past_key_values" before
# 5.24, which takes that name too, but warns.
CACHE = (
    "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
)
CACHE_ARGUMENTS = (CACHE, "past_key_values", "layer_past")  # the last in GPT-NeoX and GPTBigCode
ENCODER_ARGUMENTS = ("key_value_states", "encoder_hidden_states")  # of cross-attention
STATE_ARGUMENT = "attnplug_state"
FRESH_ARGUMENT = "attnplug_fresh"


def reads_an_encoder(arguments: Mapping[str, Any]) -> bool:
    """Whether a call hands over what cross-attention reads."""
    return any(arguments.get(name) is not None for name in ENCODER_ARGUMENTS)
