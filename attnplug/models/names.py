"""The names that attnplug and transformers share: of the attention function, and of the keyword
arguments that reach it."""

ATTENTION_NAME = "attnplug"
# The same attention for a config whose own is eager: its model may do sums with the masks.
ADDITIVE_NAME = "attnplug_additive"
ATTENTION_NAMES = (ATTENTION_NAME, ADDITIVE_NAME)
PIECES_NAME = "attnplug_pieces"  # while a prompt runs in pieces; it has no mask function
CACHE_ARGUMENTS = ("past_key_values", "layer_past")  # the latter in GPT-NeoX and GPTBigCode
STATE_ARGUMENT = "attnplug_state"
FRESH_ARGUMENT = "attnplug_fresh"
