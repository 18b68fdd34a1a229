"""What a user does to a whole cache: take tokens back, repeat rows, keep some of them. A cache that
cannot do it for one of its layers says so before any layer has changed."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache

from attnplug.errors import UnsupportedCallError


class EditableCache(Cache):
    """A cache whose edits change all layers or, where they raise, none."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; 0 forgets none. Positive: ValueError. Raises
        UnsupportedCallError where a layer has not kept what it would go back to."""
        check_count(tokens_to_remove)
        for layer in self.layers if tokens_to_remove else ():
            check = getattr(layer, "check_crop", None)
            if check is not None:
                check(tokens_to_remove)
            elif not layer.is_croppable or not getattr(layer, "record_past", True):
                raise UnsupportedCallError(
                    f"crop: a {type(layer).__name__} does not keep the states that its tokens have "
                    "left behind. Keep a copy of the cache (copy.deepcopy) to go back to."
                )
        layers: list[Any] = self.layers
        for layer in layers:
            # crop(0) is for layers that record their past, which now keep what a pass needs.
            if tokens_to_remove or getattr(layer, "record_past", False):
                layer.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times. Raises UnsupportedCallError where a layer cannot."""
        self._check_has("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`. Raises UnsupportedCallError where a layer cannot."""
        self._check_has("batch_select_indices")
        super().batch_select_indices(indices)

    def _check_has(self, method: str) -> None:
        without: Any = next((layer for layer in self.layers if not hasattr(layer, method)), None)
        if without is not None:
            raise UnsupportedCallError(
                f"{method}: a {type(without).__name__} of transformers has no such method. Feed "
                "the prompt again, with the rows that you want."
            )


def first_filled(layers: Iterable[Any]) -> Any:
    """The first of these PlugLayers that has counted a token, else the first of all; None where
    there are none. The first layer of a cache may hold nothing, because the model's own first layer
    was dropped, or because the user's forward pass skips it."""
    first = None
    for layer in layers:
        if layer.counted:
            return layer
        first = layer if first is None else first
    return first


def check_count(tokens_to_remove: int) -> None:
    """Raise ValueError for a count that no `crop` takes."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop({tokens_to_remove}): pass a negative number, the count of tokens to forget"
        )


def check_room(length: int, tokens: int, size: int) -> None:
    """Raise UnsupportedCallError unless `tokens` more fit behind `length` of `size`."""
    if length + tokens > size:
        raise UnsupportedCallError(
            f"the static cache holds {length} of at most {size} tokens and {tokens} more do not "
            "fit. Make a larger one with attnplug.make_cache(model, max_length), or pass "
            "cache_implementation='dynamic' to generate."
        )
