"""transformers' static cache of a config, of which attnplug's are made."""

import copy

from transformers import PreTrainedConfig, StaticCache


def has_no_static_layers(config: PreTrainedConfig) -> bool:
    """Whether a config is of layers that read compressed entries, for which transformers has no
    static layers."""
    return hasattr(config, "compress_rates")


def static_cache(config: PreTrainedConfig, max_length: int) -> StaticCache:
    """An empty one of `max_length` tokens. All layers of a model that reads compressed entries, its
    windows too, are full ones here, in whose place attnplug puts its own."""
    if has_no_static_layers(config):
        config = copy.copy(config)
        vars(config)["layer_types"] = ["full_attention"] * len(config.layer_types)
    return StaticCache(config, max_cache_len=max_length)
