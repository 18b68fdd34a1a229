"""transformers' static cache of a config, of which attnplug's are made."""

import copy

from transformers import PreTrainedConfig, StaticCache

# Of layers that read compressed entries, for which transformers has no static layer.
ENTRY_TYPES = frozenset({"heavily_compressed_attention", "compressed_sparse_attention"})


def has_no_static_layers(config: PreTrainedConfig) -> bool:
    """Whether transformers cannot make the static cache of a config, and `static_cache` can."""
    return not ENTRY_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())


def static_cache(config: PreTrainedConfig, max_length: int) -> StaticCache:
    """An empty one of `max_length` tokens. All layers of a model that reads compressed entries, its
    windows too, are full ones here, in whose place attnplug puts its own."""
    if has_no_static_layers(config):
        config = copy.copy(config)
        vars(config)["layer_types"] = ["full_attention"] * len(config.layer_types)
    return StaticCache(config, max_cache_len=max_length)
