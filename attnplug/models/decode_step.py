"""One decode step as a function of tensors that never move, so that a compiled or captured one
needs nothing of the host."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.models.edits import first_filled
from attnplug.models.names import CACHE
from attnplug.models.sliding import held_by_windows, roll_in, round_of

PIECES, FEWEST = 512, 16  # of a row of logits, for a program each
# Where no token can be drawn, as torch.multinomial says it.
REFUSED = "probability tensor contains either `inf`, `nan` or element < 0"


@dataclass
class StepBuffers:
    """What a step reads and writes, at fixed addresses: last token `[B,1]`, its position `[1|B,1]`,
    its slot in the cache `[1]`, which keys are real `[B,1,1,S]` (bool) or None, which of those in a
    sliding window `[B,1,1,W]` (bool) or None, which rows go on `[B]` (bool), its verdict `[]`
    (int8), and where rows end the tokens that end them `[E]` and the one that follows `[]`. Layers
    read the first real key of each row `[B]` (int32), or None without a mask, while steps run."""

    token: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    mask: torch.Tensor | None
    window: torch.Tensor | None
    unfinished: torch.Tensor
    verdict: torch.Tensor
    ends: torch.Tensor | None
    pad: torch.Tensor | None
    first_key: torch.Tensor | None

    @classmethod
    @torch.inference_mode(False)  # they serve calls outside of it, too
    def empty(
        cls,
        rows: int,
        positions: int,
        room: int | None,
        window: int,
        ends: int,
        device: torch.device,
    ) -> "StepBuffers":
        """Buffers for so many rows; `room` is the cache's length where keys are masked, `window`
        that of its sliding windows or 0, `ends` how many tokens end a row."""
        mask = sliding = None
        if room is not None:
            mask = torch.zeros((rows, 1, 1, room), dtype=torch.bool, device=device)
            torch._dynamo.maybe_mark_dynamic(mask, 3)
        if window:
            sliding = torch.zeros((rows, 1, 1, window), dtype=torch.bool, device=device)
        made = cls(
            token=torch.zeros((rows, 1), dtype=torch.long, device=device),
            position=torch.zeros((positions, 1), dtype=torch.long, device=device),
            slot=torch.zeros(1, dtype=torch.long, device=device),
            mask=mask,
            window=sliding,
            unfinished=torch.ones(rows, dtype=torch.bool, device=device),
            verdict=torch.zeros((), dtype=torch.int8, device=device),
            ends=torch.zeros(ends, dtype=torch.long, device=device) if ends else None,
            pad=torch.zeros((), dtype=torch.long, device=device) if ends else None,
            first_key=None if mask is None else torch.zeros(rows, dtype=torch.int32, device=device),
        )
        for tensor in vars(made).values():
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        return made

    def stepped(self) -> tuple[torch.Tensor | None, ...]:
        """Those that `decode_step` takes, in its order."""
        return tuple(value for name, value in vars(self).items() if name != "first_key")

    def begin_behind(self, layers: Iterable[Any]) -> None:
        """Put the first step's token behind the tokens that a cache's layers hold."""
        filled = first_filled(layer for layer in layers if isinstance(layer, PlugLayer))
        self.slot.copy_(filled.cumulative_length.reshape(1))

    def show(self, real: torch.Tensor) -> None:
        """Have the mask hide all keys but those of `real` `[B,T]` (bool), the sequence so far."""
        assert self.mask is not None and self.first_key is not None
        self.mask.fill_(False)
        self.mask[:, 0, 0, : real.shape[1]] = real
        # Of a row that is hidden whole, its first new token.
        first = real.to(torch.uint8).argmax(-1)
        self.first_key.copy_(torch.where(real.any(-1), first, real.shape[1]))

    @contextmanager
    def told_to(self, layers: Iterable[Any]) -> Iterator[None]:
        """Within it these cache layers know each row's first real key."""
        own = [layer for layer in layers if isinstance(layer, PlugLayer)]
        try:
            for layer in own:
                layer.first_key = self.first_key
            yield
        finally:
            for layer in own:
                layer.first_key = None

    def verified(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Those that a pass over drafts reads and writes: token, position, slot, mask, rows."""
        return self.token, self.position, self.slot, self.mask, self.unfinished


def decode_step(
    model: Any,
    cache: PlugCache,
    token: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    mask: torch.Tensor | None,
    window: torch.Tensor | None,
    unfinished: torch.Tensor,
    verdict: torch.Tensor,
    ends: torch.Tensor | None,
    pad: torch.Tensor | None,
    greedy: bool,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """Feed the last token and move position, slot and masks on by one. Where `greedy`, choose and
    write the next token as well; else return its logits `[B,V]` in float32."""
    _compare_sizes(cache)
    if mask is not None:
        mask.index_fill_(3, slot, True)
    masks: Any = mask
    drafted = round_of(cache.layers)
    if drafted is not None:
        masks = masks_by_type(mask, drafted.mask(1))
    elif window is not None:
        roll_in(window, True, held_by_windows(cache.layers), 3)
        masks = masks_by_type(mask, window)
    outputs = model(
        input_ids=token,
        position_ids=position,
        attention_mask=masks,
        use_cache=True,
        return_dict=True,
        **{CACHE: cache},
        **options,
    )
    position.add_(1)
    slot.add_(1)
    if drafted is not None:
        drafted.place.add_(1)
    logits = outputs.logits[:, -1].to(dtype=torch.float32, copy=True)
    if not greedy:
        return logits
    accept(argmax(logits), token, unfinished, verdict, ends, pad)
    return None


def masks_by_type(full: torch.Tensor | None, window: torch.Tensor) -> dict[str, Any]:
    """A mask for each type of layer, as generate's compiled steps give it to a model that names
    its layers' types."""
    return {"full_attention": full, "sliding_attention": window}


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest value `[B]` in `[B,V]`, the first of equal ones. In pieces,
    as inductor has one program find a row's: 33 us of 152,064 logits on an H200."""
    size = logits.shape[-1]
    count = math.gcd(size, PIECES)
    if count < FEWEST:
        return logits.argmax(-1)
    best, place = logits.unflatten(-1, (count, size // count)).max(-1)
    piece = best.argmax(-1, keepdim=True)
    return (piece * (size // count) + place.gather(-1, piece)).squeeze(-1)


def _compare_sizes(cache: PlugCache) -> None:
    """Let the compiler see that the buffers of all layers are of one length: it has a symbol for
    each of them until then, and guards and graphs that carry them all."""
    if not torch.compiler.is_compiling():
        return
    layers = [layer for layer in cache.layers if isinstance(layer, PlugLayer)]
    first = [tensor.shape for tensor in layers[0].tensors()]
    for layer in layers[1:]:
        for one, other in zip(first, (tensor.shape for tensor in layer.tensors()), strict=False):
            if len(one) > 2 and len(other) > 2 and one[2] == other[2]:
                continue


def accept(
    chosen: torch.Tensor,
    token: torch.Tensor,
    unfinished: torch.Tensor,
    verdict: torch.Tensor,
    ends: torch.Tensor | None,
    pad: torch.Tensor | None,
) -> None:
    """Write the chosen tokens `[B]`, padding in rows that have ended, which rows go on, and the
    verdict of that."""
    if ends is not None and pad is not None:
        chosen = torch.where(unfinished, chosen, pad)
        unfinished.logical_and_((chosen[:, None] != ends).all(-1))
        verdict.copy_(~unfinished.any())
    token.copy_(chosen[:, None])


def layers_to_prepare(cache: PlugCache) -> list[list[PlugLayer]]:
    """Those that may want something of the host before a step, by their class."""
    kinds: dict[type[PlugLayer], list[PlugLayer]] = {}
    for layer in cache.layers:
        if isinstance(layer, PlugLayer) and type(layer).prepare_step != PlugLayer.prepare_step:
            kinds.setdefault(type(layer), []).append(layer)
    return list(kinds.values())


def due_layers(kinds: list[list[PlugLayer]], tokens: int) -> list[Sequence[PlugLayer]]:
    """Those of `layers_to_prepare` that have work before the next step, by their class."""
    due = [type(layers[0]).due_layers(layers, tokens) for layers in kinds]
    return [layers for layers in due if layers]


def prepare_layers(
    kinds: Iterable[Sequence[PlugLayer]], tokens: int, mask: torch.Tensor | None
) -> None:
    """Call `prepare_steps` of the classes of `layers_to_prepare` or `due_layers`."""
    for layers in kinds:
        type(layers[0]).prepare_steps(layers, tokens, mask)
