"""Refuses a forward pass that a cache cannot take, where possible before any layer has taken a
token of it: a pass that ends early leaves some layers with its tokens and others without.

transformers' dynamic cache fails on such a torn cache by the sizes of masks and keys. attnplug's
attention takes its mask from each layer itself, and would compute over the keys that are left.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from attnplug.errors import UnsupportedCallError
from attnplug.models.autocast import autocast_dtype
from attnplug.models.cache import PlugLayer
from attnplug.models.sliding import SlidingLayer
from attnplug.models.sync import may_read

INDEXES = ("update_indexer", "update_index")  # of layers, some of which keep nothing else


@dataclass
class Pass:
    """A forward pass: how many tokens it brings, in which dtype, the layer of the cache that took
    them `first` and how many it `held` before (None: the host does not know), how many of the
    tokens go into an empty cache (`fresh`: all or 0), and the layers that have been told so."""

    tokens: int
    dtype: torch.dtype
    first: int
    held: int | None
    fresh: int = 0
    told: set[int] = field(default_factory=set)


def layer_of(cache: Cache, index: int) -> Any:
    """A layer of a cache, None where it has no such layer, or none yet."""
    return cache.layers[index] if index < len(cache.layers) else None


def tokens_in(layer: Any, *, exactly: bool = False) -> int | None:
    """How many tokens a layer of a cache holds; None where the host does not know. It knows of a
    GPU's layer what it has counted, which may be too much, and reads it to know `exactly`."""
    if isinstance(layer, SlidingLayer) and (layer.counts_on_device or layer.round is not None):
        return None
    if isinstance(layer, StaticSlidingWindowLayer):
        return layer.cumulative_length_int
    if isinstance(layer, DynamicLayer):
        return layer.get_seq_length()
    if not isinstance(layer, StaticLayer):
        return 0 if layer is None else None
    if not layer.is_initialized:
        return 0
    count = layer.cumulative_length
    if not may_read(count):
        return None
    if not isinstance(layer, PlugLayer):
        return int(count) if count.is_cpu or exactly else None
    if count.is_cpu or exactly:
        return int(count) + (layer.pending is not None)
    return None if layer.uncounted or layer.captured else layer.counted


def refuse_torn(cache: Cache, index: int, now: Pass) -> None:
    """Raise UnsupportedCallError where a layer does not hold the tokens that the first one held as
    the pass began."""
    layer = layer_of(cache, index)
    held = tokens_in(layer)
    if held is None or held == now.held or now.held is None or index == now.first:
        return
    if layer is None and cache.layer_class_to_replicate is None:
        return
    if held == 0 and any(hasattr(layer, name) for name in INDEXES):
        return
    first = tokens_in(layer_of(cache, now.first), exactly=True)
    held = tokens_in(layer, exactly=True)
    if first is not None and held is not None and first - now.tokens != held:
        # A dynamic layer's reset() forgets its tokens since transformers 5.18.
        empties = not isinstance(layer, DynamicLayer | None)
        raise UnsupportedCallError(
            f"a forward pass that ended early has left this cache torn: its layer {now.first} held "
            f"{first - now.tokens} tokens and layer {index} holds {held}. "
            f"{'Call its reset() or make' if empties else 'Make'} another cache, and give it all "
            "tokens again."
        )


def refuse_other_dtype(before: Pass | None, now: Pass, device: torch.device) -> None:
    """Raise UnsupportedCallError where a cache holds tokens of a model in another precision."""
    if before is None or not now.held or before.dtype == now.dtype:
        return
    if autocast_dtype(device) is None:
        raise UnsupportedCallError(
            f"the cache holds tokens of a model that computed in {before.dtype}, and it computes "
            f"in {now.dtype} now. Use a cache in the precision that it began with."
        )


def refuse_rows(layer: Any, rows: int) -> None:
    """Raise UnsupportedCallError where a layer holds tokens of another number of rows."""
    keys = getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor) and keys.dim() == 4 and len(keys) != rows:
        if tokens_in(layer):
            raise UnsupportedCallError(
                f"the cache holds tokens of {len(keys)} rows and got {rows}. Call its reset() "
                "first, or make another with attnplug.make_cache."
            )


def refuse_mask(mask: Any, layer: Any, hidden: torch.Tensor, fresh: bool) -> None:
    """Raise UnsupportedCallError where a mask `[B,H,T,S]` is not of the layer's rows, queries and
    keys. That of a `fresh` prompt may have room for later keys. Of layers whose masks are made by
    `plug_mask`: others may have masks of more than keys, such as of entries."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return
    rows, queries = hidden.shape[:2]
    if mask.shape[0] not in (1, rows) or mask.shape[2] not in (1, queries):
        raise UnsupportedCallError(
            f"an attention mask of {mask.shape[0]} rows and {mask.shape[2]} queries came with "
            f"{rows} rows of {queries} tokens. Give the model a mask of its tokens' rows."
        )
    in_rounds = isinstance(layer, SlidingLayer) and tokens_in(layer) is None
    if in_rounds or getattr(layer, "round_part", ""):
        return
    keys, found = layer.get_mask_sizes(queries)[0], mask.shape[3]
    compact = mask.dtype == torch.uint8  # of all keys, from which each layer takes its own
    if found in (1, keys) or (found > keys and (compact or fresh)) or (found >= queries and fresh):
        return
    raise UnsupportedCallError(
        f"an attention mask for {found} keys came to a layer that has {keys}. Give the model a "
        "mask of two dimensions, or one for each type of its layers."
    )
