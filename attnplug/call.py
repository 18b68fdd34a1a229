"""What passes between a model's attention layer and its policy.

That is the call, what a layer looks like before it runs, and what a tracing method tells of a call.
Models and policies both import this file. It imports neither."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from attnplug.errors import PolicyError

if TYPE_CHECKING:
    from transformers.cache_utils import StaticLayer


class PickedBlocks(NamedTuple):
    """The key blocks that a layer's model has picked: `blocks` int32 `[B,Hkv,T,K]`, none twice, -1
    for none, of `size` keys each, counted from the first slot of the cache."""

    blocks: torch.Tensor
    size: int


class PickedCompressed(NamedTuple):
    """The blocks of `size` tokens that a layer's model has picked by their compressed keys:
    `blocks` int32 `[B,T,K]`, for all KV heads, none twice, -1 for none. They are blocks of the
    tokens that are no padding, of which a query sees the first `seen` `[B,T]`; it reads the tokens
    of its blocks, and those behind its last complete block. `slots` int32 `[B,S]` says where such
    a token lies, None where n lies in slot n. No query reads more than `most` tokens."""

    blocks: torch.Tensor
    seen: torch.Tensor
    slots: torch.Tensor | None
    size: int
    most: int

    def tokens(self, begin: int, end: int) -> torch.Tensor:
        """The slots that the queries from `begin` to `end` read, int32 `[B,end - begin,most]`, -1
        for none."""
        blocks, seen = self.blocks[:, begin:end], self.seen[:, begin:end, None]
        within = torch.arange(self.size, device=blocks.device)
        listed = torch.where(blocks[..., None] < 0, -1, blocks[..., None] * self.size + within)
        tail = seen // self.size * self.size + within[:-1]
        found = torch.cat((listed.flatten(2), torch.where(tail < seen, tail, -1)), 2)
        if self.slots is not None:
            at = found.clamp(min=0).flatten(1)
            found = torch.where(found < 0, -1, self.slots.gather(1, at).view(found.shape))
        return torch.nn.functional.pad(found, (0, self.most - found.shape[2]), value=-1).int()


class EntrySizes(NamedTuple):
    """What the cache of a layer with windows and compressed entries keeps: the last `window`
    tokens, an entry of each `rate` tokens (0: it has no entries), and of each entry a key of
    `index_width` channels, by which an indexer picks (0: a query reads all that it sees)."""

    window: int
    rate: int
    index_width: int


class PickedEntries(NamedTuple):
    """What a layer's queries read of `size` latents. The first `entries` of these are compressed
    entries, the others the newest of `length` tokens, the newest last. A query reads the last
    `window` tokens up to its own, but none that `shown` `[B,N]` hides (None: nothing is hidden),
    and the entries in `picks` int32 `[B,S,K]`, -1 for none (None: the first `seen` `[B,S]`)."""

    picks: torch.Tensor | None
    seen: torch.Tensor
    entries: int
    window: int
    length: int | torch.Tensor
    size: int
    shown: torch.Tensor | None

    @property
    def most(self) -> int:
        """How many latents a query reads at most."""
        return self.window + (self.entries if self.picks is None else self.picks.shape[2])

    def entries_of(self, begin: int, end: int) -> torch.Tensor:
        """The entries that the queries from `begin` to `end` read, `[B,end - begin,K]`, -1 for
        none."""
        if self.picks is not None:
            return self.picks[:, begin:end]
        each = torch.arange(self.entries, device=self.seen.device)
        return torch.where(each < self.seen[:, begin:end, None], each, -1)

    def listed(self, begin: int, end: int) -> torch.Tensor:
        """The latents that the queries from `begin` to `end` read, int32 `[B,end - begin,most]`,
        -1 for none."""
        rows, queries = self.seen.shape
        device = self.seen.device
        own = torch.arange(begin - queries, end - queries, device=device) + self.length
        token = own[:, None] - torch.arange(self.window, device=device)
        place = torch.where(token < 0, -1, token + (self.size - self.length))
        place = place.expand(rows, -1, -1)
        if self.shown is not None:
            shown = self.shown.index_select(1, token.clamp(min=0).flatten())
            place = torch.where(shown.view(place.shape), place, -1)
        return torch.cat((self.entries_of(begin, end), place), 2).int()


@dataclasses.dataclass
class AttentionCall:
    """One attention layer's work in one forward pass, as a policy sees it.

    q is `[B,Hq,T,D]`; k, v are `[B,Hkv,S,D]`, not repeated, and may be longer than what is valid:
    `lengths` (`[1]`, int64, or None for S) counts the valid keys, the T queries being the last of
    them. `key_mask` `[B,S]` is False where a key must not be seen (padding). `start` `[B]` is the
    first key that it lets through, and is given for T > 1 only. `state` is the layer's static
    cache, a method's own layer where generate or `make_cache` made it, or None. `trace_to` takes
    the edges that a tracing method finds, while `attnplug.trace.record` is on. `follow` is how many
    tokens of the prompt are known to come after these queries, None where nobody knows it, as an
    engine says of no chunk that it is the last. `picked` is what the model itself has picked, where
    it does. The policy leaves the name of the method that has served
    the call in `served_by`, and where that is "dense" in another method's place, the reason in
    `why_dense`; `is_step` says whether it was the method that decodes. The attention is causal; a
    policy returns `[B,Hq,T,D]`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    start: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    state: "StaticLayer | None" = None
    trace_to: "EdgeWriter | None" = None
    follow: int | None = 0
    picked: PickedBlocks | PickedCompressed | None = None
    served_by: str = ""
    why_dense: str = ""
    is_step: bool = False

    def flush(self) -> None:
        """Write the cache layer's pending token (see `PlugLayer`). A method that reads k, v or
        `lengths`, and does not take the token itself, must call this first."""
        flush = getattr(self.state, "flush", None)
        if flush is not None:
            flush()

    @property
    def whole(self) -> bool:
        """Whether the queries are the whole sequence (a first prefill), known from shapes."""
        return self.lengths is None and self.q.shape[2] == self.k.shape[2]

    @property
    def first_key(self) -> torch.Tensor | None:
        """The first real key of each row, int32 `[B]`, or None for 0: blocks count from there. A
        decode step is told the mask and not where it begins, which generate's loop leaves in the
        cache layer."""
        if self.start is not None or self.key_mask is None:
            return self.start
        known: torch.Tensor | None = getattr(self.state, "first_key", None)
        if known is not None:
            return known
        return self.key_mask.to(torch.uint8).argmax(-1).to(torch.int32)

    @property
    def options(self) -> dict[str, Any]:
        """What every attention op takes of the call: scale, softcap, lengths and key mask."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "lengths": self.lengths,
            "key_mask": self.key_mask,
        }


@dataclasses.dataclass
class LatentCall:
    """The work of a layer that attends to latents, in one forward pass.

    q is `[B,Hq,S,Dk+P]`: the part that meets the latents' keys, then the rotated one. latents are
    `[B,T,R]` and rope `[B,T,P]`, one for all heads. up `[Hq,Dk+Dv,R]` makes a head's keys and
    values of a latent, and is empty, `[0]`, where a latent is both key and value of every head.
    picks `[B,S,K]` int32 are the tokens that each query reads, -1 for none, `PickedEntries` where
    latents are entries and a window, or None where it reads all that it sees. sinks
    `[Hq]`, lengths `[1]` and key_mask `[B,T]` are as in `AttentionCall`. A method returns
    `[B,S,Hq,Dv]`, and leaves its name in `served_by`, and in `why_other` what it could not do as
    it was asked to. state is the layer's static cache, or None.
    """

    q: torch.Tensor
    latents: torch.Tensor
    rope: torch.Tensor
    up: torch.Tensor
    picks: torch.Tensor | PickedEntries | None
    scale: float
    sinks: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    state: "StaticLayer | None" = None
    served_by: str = ""
    why_other: str = ""

    @property
    def whole(self) -> bool:
        """Whether the queries are the whole sequence (a first prefill), known from shapes."""
        return self.lengths is None and self.q.shape[2] == self.latents.shape[1]


@dataclasses.dataclass
class PagedCall:
    """One decode step of several requests over one layer's pages, as continuous batching has it.

    q is `[R,Hq,1,D]`, a token of each request. k, v are pages `[pages,Hkv,page,D]` that hold these
    tokens. `table` `[R,P]` int32 says which pages are whose. `lengths` `[R]` int32 counts a
    request's keys, 0 for a row that only pads the batch. `state` is what the method's `page_state`
    made. `slots` `[R]` says where the step has written its keys, if the method is still to note
    them (`notes_in_step`). `k_scale` and `v_scale` `[]` are what keys and values in float8_e4m3fn
    are to be multiplied by, None for 1. Nothing here may be read on the host: CUDA graphs replay
    the step.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    state: Any = None
    slots: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def room(self) -> int:
        """Keys that the table has room for in a row, known from shapes."""
        return self.table.shape[1] * self.k.shape[2]

    @property
    def options(self) -> dict[str, Any]:
        """What every attention op takes of the call."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What is known of an attention layer before it runs. The heads are those of this process."""

    heads_q: int
    heads_kv: int
    head_dim: int
    softcap: float
    sinks: bool
    device: torch.device
    positions: int | None = None  # tokens that the model reads; None where that is not known
    indexed: bool = False  # the model picks the tokens that the layer reads
    entries: EntrySizes | None = None  # of a layer that reads a window and compressed entries
    latent: int = 0  # numbers that the cache keeps of a token for all heads, where it keeps latents

    @property
    def reads_latents(self) -> bool:
        """Whether the layer keeps latents and reads all of them."""
        return self.latent > 0 and not self.indexed

    @property
    def told_tokens(self) -> int:
        """At how many tokens a note tells what a method reads: 131,072, or all that the model
        reads."""
        return min(131072, self.positions or 131072)

    @property
    def heads(self) -> str:
        """Query heads, KV heads and head dimension, such as "28/4x128"."""
        return f"{self.heads_q}/{self.heads_kv}x{self.head_dim}"


@dataclasses.dataclass(frozen=True)
class Edges:
    """What a tracing method found in one call, in blocks of `query_block` queries and `block` keys.

    `index` (int32 `[B,Hq,NQ,K]`, -1 = none) are the key blocks that each query block attends to,
    `weight` (float32, like index) what they weigh, and `weights` says what a weight means. Where it
    was measured, `captured` `[B,Hq,2]` is how much of the attention they hold: the sum over some
    queries, and the number of these."""

    index: torch.Tensor
    weight: torch.Tensor
    query_block: int
    block: int
    weights: str
    captured: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Reads:
    """The key blocks that a method reads for each query block: int32 `[B,Hq,NQ,K]`, no block
    twice, -1 = none. They are blocks of `query_block` queries and of `block` keys."""

    index: torch.Tensor
    query_block: int
    block: int


class StepReads(NamedTuple):
    """What a decode step reads of one KV head's row at most: `keys`, each with its value, and the
    bytes that it scans to choose them, such as summaries or codes, for a cache in 16 bits."""

    keys: int
    scanned: float = 0.0


class EdgeWriter(Protocol):
    """Where one layer's edges go, on the host."""

    def emit(self, call: AttentionCall, edges: Edges | None) -> None:
        """Take the edges of a call, None where there are none to tell."""
        ...


class Served(NamedTuple):
    """The method that has served a layer, and why it was dense in another one's place, or did
    otherwise than it was asked to."""

    by: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.by} ({self.why})" if self.why else self.by


class Serves(Protocol):
    """What an attention layer needs of its policy."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output `[B,Hq,T,D]` of one call."""
        ...

    def serves_steps(self, state: Any) -> Served:
        """What serves decode steps over a cache layer that holds tokens."""
        ...

    def rounds(self) -> int:
        """Drafts a round, where steps only draft and a dense pass verifies them; else 0."""
        ...

    @property
    def varies_rounds(self) -> bool:
        """Whether rounds make fewer drafts where few were accepted."""
        ...

    @property
    def asks_for_rounds(self) -> bool:
        """Whether a call is decoded in rounds even where they turn out not to pay."""
        ...


def causal_mask(call: AttentionCall) -> torch.Tensor:
    """`[B or 1,1,T,S]` bool: which keys each query sees, from lengths and key mask."""
    length = call.k.shape[2] if call.lengths is None else call.lengths.view(-1, 1, 1, 1)
    queries = torch.arange(call.q.shape[2], device=call.q.device) - call.q.shape[2]
    keys = torch.arange(call.k.shape[2], device=call.q.device)
    visible = keys <= (queries + length).reshape(-1, 1, call.q.shape[2], 1)
    if call.key_mask is not None:
        visible = visible & call.key_mask[:, None, None, :]
    return visible


def band_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """`[1,1,queries,keys]` bool: each query, the last ones of the keys, sees itself and the keys
    before it, of a window the `window - 1` before it."""
    away = torch.arange(queries, device=device)[:, None] + (keys - queries)
    away = away - torch.arange(keys, device=device)
    seen = away >= 0
    return (seen if window is None else seen & (away < window))[None, None]


def check_output(name: str, q: torch.Tensor, out: object) -> None:
    """Raise PolicyError unless `out` is the output of queries `q` `[B,Hq,T,D]`, of their dtype, as
    the method called `name` has to return it. A model would take another shape with as many numbers
    for it."""
    if not isinstance(out, torch.Tensor):
        raise PolicyError(f"{name}: its output is {shown(out)}, needs a tensor [B,Hq,T,D]")
    if out.dim() != 4 or out.shape[:3] != q.shape[:3] or out.dtype != q.dtype:
        raise PolicyError(
            f"{name}: its output is {list(out.shape)} of {out.dtype}, needs [B,Hq,T,D] of the "
            f"queries, {list(q.shape)} of {q.dtype}"
        )


def shown(found: object) -> str:
    """What a method returned, in a line of an error."""
    plain = isinstance(found, str | int | float | type | None)
    return repr(found)[:80] if plain else f"a {type(found).__name__}"
