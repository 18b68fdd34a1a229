"""One prompt over several ranks, in pieces of its sequence.

With n ranks the prompt has 2 n pieces, and rank r computes the layers of pieces r and 2n-1-r: what
causal attention costs grows along the prompt, and a head and a tail piece cost every rank the same.
A layer's keys and values are gathered from all ranks. Then its attention is two ordinary calls:
the queries of a piece are the last of the keys up to the piece's end.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from transformers import AttentionInterface, PreTrainedModel

from attnplug.call import AttentionCall, band_mask
from attnplug.errors import ArgumentError, UnsupportedCallError
from attnplug.models.agreement import together
from attnplug.models.bands import BAND
from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.models.hf import (
    BINDING,
    Binding,
    as_autocast,
    binding_of,
    bindings_of,
    stock_attention,
)
from attnplug.models.names import ATTENTION_NAMES, PIECES_NAME
from attnplug.models.refusals import refuse_options
from attnplug.models.switch import ATTENTION
from attnplug.models.walk import has_moving_rope

# torch 2.13 has a new name for it, and warns of the old one.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
EAGER_SCORES = 1 << 28  # that eager attention may hold at a time, of all heads


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How a prompt is cut: piece i has the tokens `cuts[i]` to `cuts[i + 1]`, 2 pieces a rank."""

    cuts: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, ranks: int, grid: int) -> "Pieces":
        """Pieces of whole blocks of `grid` tokens, but for the last one's end, whose sizes differ
        by one block at most. Raises ArgumentError where there are fewer blocks than pieces."""
        blocks, count = -(-tokens // grid), 2 * ranks
        if blocks < count:
            raise ArgumentError(
                f"a prompt of {tokens} tokens is too short for {ranks} ranks: it has {blocks} "
                f"blocks of {grid} queries, and every rank computes two pieces of at least one. "
                "Call the model itself on one rank."
            )
        each, more = divmod(blocks, count)
        sizes = [each + (i < more) for i in range(count)]
        ends = [sum(sizes[: i + 1]) * grid for i in range(count)]
        return cls((0, *ends[:-1], tokens))

    @property
    def ranks(self) -> int:
        return (len(self.cuts) - 1) // 2

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """The first and last end of a rank's two pieces."""
        pair = rank, 2 * self.ranks - 1 - rank
        return [(self.cuts[i], self.cuts[i + 1]) for i in pair]

    def tokens_of(self, rank: int) -> int:
        return sum(end - begin for begin, end in self.of_rank(rank))

    def positions(self, rank: int, device: torch.device) -> torch.Tensor:
        """Where a rank's tokens stand in the prompt, int64 `[tokens_of(rank)]`."""
        return torch.cat([torch.arange(*piece, device=device) for piece in self.of_rank(rank)])


class Kept(NamedTuple):
    """The heads that this rank's cache keeps: KV heads and query heads, of all that are."""

    heads_kv: slice = slice(None)
    heads_q: slice = slice(None)


class NotesQueries(Protocol):
    """A decode method that wants to know a prompt's last queries."""

    def note_queries(self, call: AttentionCall) -> None: ...


@dataclasses.dataclass
class Run:
    """A prefill in pieces that is under way: this rank's part of the pieces, the group that it
    talks to, the cache that it fills and with which heads, the kind of every layer ("full" or
    "sliding"), and by layer the decode methods that want to know the prompt's queries."""

    pieces: Pieces
    rank: int
    group: dist.ProcessGroup
    cache: PlugCache
    kept: Kept
    kinds: dict[int, str]
    wanting: Mapping[int, NotesQueries]

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """`[B,H,S,D]` of all ranks' `[B,H,tokens of the rank,D]`, in the prompt's order."""
        longest = max(map(self.pieces.tokens_of, range(self.pieces.ranks)))
        missing = longest - own.shape[2]
        own = torch.nn.functional.pad(own, (0, 0, 0, missing)) if missing else own.contiguous()
        parts = own.new_empty((self.pieces.ranks, *own.shape))
        with together("gather a layer's keys and values"):
            ALL_GATHER(parts.flatten(0, 1), own, group=self.group)
        whole = own.new_empty((*own.shape[:2], self.pieces.cuts[-1], own.shape[3]))
        for rank, part in enumerate(parts):
            at = 0
            for begin, end in self.pieces.of_rank(rank):
                whole[:, :, begin:end] = part[:, :, at : at + end - begin]
                at += end - begin
        return whole

    def keep(self, index: int, call: AttentionCall) -> None:
        """Fill a layer of the cache from a call with the whole prompt's keys and values, and this
        rank's queries. The call gets the layer as its state."""
        layer: Any = self.cache.layers[index]
        heads = self.kept.heads_kv
        keys, values = call.k[:, heads], call.v[:, heads]
        buffers = layer.update(keys, values)
        if not isinstance(layer, PlugLayer):
            return
        layer.note_buffers(*buffers)
        call.state = layer
        if index in self.wanting:
            sinks = None if call.sinks is None else call.sinks[self.kept.heads_q]
            queries = self.last_queries(call.q)[:, self.kept.heads_q]
            noted = dataclasses.replace(call, q=queries, k=keys, v=values, sinks=sinks)
            self.wanting[index].note_queries(noted)

    def last_queries(self, own: torch.Tensor) -> torch.Tensor:
        """`[B,Hq,T,D]`: the queries of the prompt's last piece, which is the first rank's."""
        begin, end = self.pieces.of_rank(0)[1]
        last = own[:, :, -(end - begin) :].contiguous()
        if self.rank != 0:
            last = own.new_empty((*own.shape[:2], end - begin, own.shape[3]))
        return self.from_first(last)

    def from_first(self, own: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor, written over that of the others."""
        with together("hand on what the first of them has found"):
            dist.broadcast(own, group=self.group, group_src=0)
        return own


def attend_in_pieces(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function while a prefill runs in pieces: query, key and value are of
    this rank's tokens `[B,H,T,D]`. Returns `[B,T,Hq,D]` and no weights."""
    refuse_options(query, dropout, kwargs)
    binding = binding_of(module)
    assert binding is not None and binding.pieces is not None  # `in_pieces` has set it
    run: Run = binding.pieces
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedCallError(
            f"{type(module).__name__} hands its attention a mask or a bias of its own, which a "
            "prefill in pieces does not serve. Call the model itself on one rank."
        )
    query, key, value = as_autocast(query, key, value, None)
    call = AttentionCall(
        query,
        run.gathered(key),
        run.gathered(value),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    index: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    run.keep(index, call)
    parts, at = [], 0
    for begin, end in run.pieces.of_rank(run.rank):
        piece = dataclasses.replace(
            call,
            q=query[:, :, at : at + end - begin],
            k=call.k[:, :, :end],
            v=call.v[:, :, :end],
            follow=run.pieces.cuts[-1] - end,
        )
        at += end - begin
        windowed = run.kinds[index] == "sliding"
        parts.append(_attend_piece(module, binding, piece, begin, windowed, kwargs))
    return torch.cat(parts, 1), None


def _attend_piece(
    module: torch.nn.Module,
    binding: Binding[Any],
    call: AttentionCall,
    begin: int,
    windowed: bool,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The output `[B,T,Hq,D]` of one piece, which begins at a position of the prompt: by the
    layer's prefill method, or dense by the model's own attention."""
    if binding.policy is not None:
        return binding.policy.prefill.attend(call).transpose(1, 2)
    window = _window_of(module, kwargs) if windowed else None
    tokens, keys = call.q.shape[2], call.k.shape[2]
    band = BAND
    if binding.stock == "eager":  # which stores all scores
        band = max(1, min(band, EAGER_SCORES // (call.q.shape[1] * keys)))
    parts = []
    for first in range(0, tokens, band):
        last = min(first + band, tokens)
        low = 0 if window is None else max(0, begin + first - window) // 64 * 64
        mask = band_mask(last - first, begin + last - low, window, call.q.device)
        part = dataclasses.replace(
            call,
            q=call.q[:, :, first:last],
            k=call.k[:, :, low : begin + last],
            v=call.v[:, :, low : begin + last],
        )
        parts.append(stock_attention(module, binding, part, mask, False, kwargs)[0])
    return torch.cat(parts, 1)


def _window_of(module: torch.nn.Module, kwargs: dict[str, Any]) -> int:
    window = kwargs.get("sliding_window")
    if window is None:
        raise UnsupportedCallError(
            f"{type(module).__name__} has a sliding window and does not hand it to its attention, "
            "so that a prefill in pieces cannot know it. Call the model itself on one rank."
        )
    return window


@contextmanager
def in_pieces(model: PreTrainedModel, run: Run) -> Iterator[None]:
    """Within it the model's attention layers compute the pieces of a run, and its positions may be
    those of some of the prompt's tokens."""
    # A name without a mask function: transformers then makes no mask, of these positions or others.
    AttentionInterface.register(PIECES_NAME, attend_in_pieces)
    bound = bindings_of(model)
    configs = {id(c): c for m in model.modules() if _is_served(c := vars(m).get("config"))}
    names = {key: vars(config)[ATTENTION] for key, config in configs.items()}
    plugged = [layer for layer in run.cache.layers if isinstance(layer, PlugLayer)]
    try:
        with ExitStack() as hooks:
            for module in filter(has_moving_rope, model.modules()):
                hooks.enter_context(_whole_positions(module, run.pieces.cuts[-1]))
            for config in configs.values():
                vars(config)[ATTENTION] = PIECES_NAME
            for module, binding in bound.items():
                setattr(module, BINDING, dataclasses.replace(binding, pieces=run))
            for layer in plugged:
                layer.prefill_tokens = run.pieces.cuts[-1]
            yield
    finally:
        for layer in plugged:
            layer.prefill_tokens = 0
        for module, binding in bound.items():
            setattr(module, BINDING, binding)
        for key, config in configs.items():
            vars(config)[ATTENTION] = names[key]


def _is_served(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) in ATTENTION_NAMES


@contextmanager
def _whole_positions(module: torch.nn.Module, tokens: int) -> Iterator[None]:
    """Within it a rotary embedding is given the prompt's last position behind its own positions, as
    each rank must have the frequencies of the whole prompt; what it makes of it is left out."""

    def widen(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = "position_ids" in kwargs
        positions = kwargs["position_ids"] if named else args[1]
        wide = torch.nn.functional.pad(positions, (0, 1), value=tokens - 1)
        if named:
            return args, kwargs | {"position_ids": wide}
        return (args[0], wide, *args[2:]), kwargs

    def narrow(_: torch.nn.Module, args: tuple[Any, ...], made: Any) -> Any:
        return tuple(part[..., :-1, :] for part in made)

    handles = (
        module.register_forward_pre_hook(widen, with_kwargs=True),
        module.register_forward_hook(narrow),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
