"""The methods of the literature that attnplug's are compared with, as policies for evaluation only.

    python bench/rivals.py eval smollm2-135m --policy "quest(like='gather')" --policy gather ...

runs the attnplug command with all of them registered; the study `rivals` of bench/studies.py asks
them. They are written through the public API, in plain torch: a step computes exact scores over the
whole cache and masks them, so that their quality is real and their time is not. One list a KV head
serves its group of query heads, as attnplug's own methods have it.

Decode, each beside the first `sink` keys and the last `window`:

    streaming        StreamingLLM (Xiao et al., 2024): these alone. Positions stay what they are
    matched_window   the same with a block of 128 for a sink: the matched window of paper 000
    quest            Quest (Tang et al., 2024): pages of keys, by what no key of theirs exceeds; its
                     bounds are INT8, rounded outwards
    double_sparsity  Double Sparsity (Yang et al., 2024): by a few of the keys' channels of 4 bits,
                     those with the largest |q||k| over the prompt
    loki             Loki (Singhania et al., 2024): by the principal components of the prompt's
                     keys, of 4 bits
    snapkv           SnapKV (Li et al., 2024): the keys that the prompt's last queries attend to

`like` is a policy such as "gather" or "sketch(k=512)": a step then reads as many bytes as a step of
that policy, what it scans to choose keys included. bench/rival_prefills.py has the prefills."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import torch
from rival_prefills import PooledBlocks, VerticalSlash, logits_of

from attnplug.cli import app
from attnplug.models.cache import PlugLayer, RowBuffers
from attnplug.policies import (
    AttentionCall,
    Dense,
    LayerShape,
    Phase,
    StepReads,
    parse,
    register,
)

CLIP = 3.64  # standard deviations that codes of 4 bits span, as sketch's do
TOP = 15  # the highest code of 4 bits
QUERIES = 512  # last of a prompt, that say which channels matter


class Rows(NamedTuple):
    """Keys and values `[B,Hkv,n,D]`, float32, of which each row's first stands first; which of them
    are seen `[B,n]`, and the place behind the last `[B,1]`."""

    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor
    end: torch.Tensor


def rows_of(call: AttentionCall) -> Rows:
    size, device = call.k.shape[2], call.k.device
    first = call.first_key
    begin = torch.zeros(len(call.q), 1, device=device) if first is None else first[:, None]
    slot = torch.arange(size, device=device) + begin.long()
    length = size if call.lengths is None else call.lengths
    seen, slot = slot < length, slot.clamp(max=size - 1)
    if call.key_mask is not None:
        seen = seen & call.key_mask.gather(1, slot)
    k, v = call.k, call.v
    if first is not None:
        k, v = (x.take_along_dim(slot[:, None, :, None], 2) for x in (k, v))
    k, v = (x.float().masked_fill(~seen[:, None, :, None], 0.0) for x in (k, v))
    return Rows(k, v, seen, length - begin.long())


def grouped(call: AttentionCall, last: int = 1) -> torch.Tensor:
    """The last queries, float32 `[B,Hkv,G,last,D]`."""
    return call.q[:, :, -last:].float().unflatten(1, (call.k.shape[1], -1))


def attend_kept(call: AttentionCall, rows: Rows, kept: torch.Tensor) -> torch.Tensor:
    """A step over the keys that are `kept` `[B,Hkv,n]`."""
    logits = logits_of(call, grouped(call)[:, :, :, 0], rows.k)
    out = logits.masked_fill(~kept[:, :, None], -torch.inf).softmax(-1) @ rows.v
    return out.flatten(1, 2)[:, :, None].to(call.q.dtype)


@functools.cache
def reads_of(policy: str, tokens: int, head_dim: int, room: int) -> StepReads | None:
    """What a step of a policy reads."""
    method = parse(policy).decode
    return None if method is None else method.step_reads(tokens, head_dim, room)


@dataclasses.dataclass(frozen=True)
class Rival(Phase):
    """Decode over the first `sink` keys, the last `window`, and those of a subclass. With `like`,
    as many bytes a step as that policy's."""

    like: str = ""
    sink: int = 128
    window: int = 512

    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __post_init__(self) -> None:
        integers = [f.name for f in dataclasses.fields(self) if f.type is int]
        self.check_integers(*integers)
        for option in integers:
            self.check(option, getattr(self, option) >= (option not in ("sink", "k")), "at least 1")
        if self.like:
            said = reads_of(self.like, 1 << 20, 128, 0)
            self.check("like", said is not None, "a policy that says what its steps read")

    def refusal(self, shape: LayerShape) -> str | None:
        if shape.sinks:
            return f"{self.name}: attention sinks"
        return super().refusal(shape)

    def scanned(self, tokens: int, head_dim: int) -> float:
        """Bytes that a step scans of a KV head to choose keys."""
        return 0.0

    @property
    def always(self) -> int:
        """Keys that a step reads in any case."""
        return self.sink

    @property
    def unlike(self) -> int:
        """Keys that a step reads where no other policy says how many."""
        return self.sink + self.window

    def step_reads(self, tokens: int, head_dim: int, room: int = 0) -> StepReads:
        keys, scanned = self.unlike, self.scanned(tokens, head_dim)
        if self.like:
            reads = reads_of(self.like, tokens, head_dim, room)
            assert reads is not None  # __post_init__ has asked
            keys = reads.keys + int((reads.scanned - scanned) / (4 * head_dim))
            self.check("like", keys > self.always, "a policy that reads more than what is scanned")
        return StepReads(min(keys, tokens), scanned)

    def budget(self, call: AttentionCall) -> int:
        """Keys that a step reads in this cache, by its room, which a captured step knows."""
        return self.step_reads(call.k.shape[2], call.k.shape[3]).keys

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Streaming: what the sink leaves of the budget is the window."""
        rows = rows_of(call)
        near = self.fixed(rows, self.budget(call) - self.always) & rows.seen
        return attend_kept(call, rows, near[:, None].expand(-1, call.k.shape[1], -1))

    def fixed(self, rows: Rows, window: int) -> torch.Tensor:
        """`[B,n]`: the sink and the last `window` places."""
        place = torch.arange(rows.k.shape[2], device=rows.k.device)
        return (place < self.sink) | (place >= rows.end - window)


@dataclasses.dataclass(frozen=True)
class Streaming(Rival):
    """StreamingLLM."""

    sink: int = 4
    window: int = 1020

    name: ClassVar[str] = "streaming"


@dataclasses.dataclass(frozen=True)
class MatchedWindow(Rival):
    """The matched window of paper 000."""

    name: ClassVar[str] = "matched_window"


@dataclasses.dataclass(frozen=True)
class Selector(Rival):
    """`k` more keys of the row, those with the highest scores of a subclass."""

    k: int = 1024

    @property
    def always(self) -> int:
        return self.sink + self.window

    @property
    def unlike(self) -> int:
        return self.always + self.k

    def scores(self, call: AttentionCall, rows: Rows) -> torch.Tensor:
        """`[B,Hkv,n]`; minus infinity: not to be read."""
        raise NotImplementedError

    def attend(self, call: AttentionCall) -> torch.Tensor:
        rows, heads = rows_of(call), call.k.shape[1]
        near = (self.fixed(rows, self.window) & rows.seen)[:, None].expand(-1, heads, -1)
        scores = self.scores(call, rows).masked_fill(near | ~rows.seen[:, None], -torch.inf)
        # Keys of one page are equal: the first of them come first.
        place = torch.arange(scores.shape[-1], device=scores.device)
        count = max(0, self.budget(call) - self.always)  # a short cache is read whole
        best, index = (scores.double() - 1e-12 * place).topk(count, -1)
        kept = near.scatter(2, index, best > -torch.inf) | near
        return attend_kept(call, rows, kept)


@dataclasses.dataclass(frozen=True)
class Quest(Selector):
    """Quest; a list may end within a page."""

    page: int = 16

    name: ClassVar[str] = "quest"

    def scanned(self, tokens: int, head_dim: int) -> float:
        return tokens / self.page * 2 * head_dim

    def scores(self, call: AttentionCall, rows: Rows) -> torch.Tensor:
        size, hidden = rows.k.shape[2], ~rows.seen[:, None, :, None]
        least = rows.k.masked_fill(hidden, torch.inf)
        largest = rows.k.masked_fill(hidden, -torch.inf)
        low, high = least.amin(2, keepdim=True), largest.amax(2, keepdim=True)
        step = ((high - low) / 255).clamp(min=1e-8)
        pad = (0, 0, 0, -size % self.page)
        least, largest = (
            torch.nn.functional.pad(x, pad, value=fill).unflatten(2, (-1, self.page))
            for x, fill in ((least, torch.inf), (largest, -torch.inf))
        )
        # Pages without a seen key have no bounds; their keys are hidden later.
        least = (((least.amin(3) - low) / step).floor() * step + low).nan_to_num()
        largest = (((largest.amax(3) - low) / step).ceil() * step + low).nan_to_num()
        q = grouped(call)[:, :, :, 0]
        bounds = q.clamp(min=0) @ largest.mT + q.clamp(max=0) @ least.mT
        return bounds.amax(2).repeat_interleave(self.page, 2)[..., :size]


class LearntLayer(PlugLayer):
    """Keys, values, and what a rival has learnt of the prompt: `learnt` `[B,Hkv,*shape]`."""

    row_buffers: ClassVar[RowBuffers] = {"learnt": 0}

    learnt: torch.Tensor

    def __init__(self, max_length: int, method: "Learner") -> None:
        super().__init__(max_cache_len=max_length)
        self.method = method

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        assert self.keys is not None
        shape = (*self.keys.shape[:2], *self.method.shape(*self.keys.shape[2:]))
        self.bind_rows(learnt=torch.zeros(shape, dtype=torch.float32, device=self.keys.device))

    def continue_from(self, source: PlugLayer) -> None:
        super().continue_from(source)
        assert isinstance(source, LearntLayer)
        self.learnt[..., : source.learnt.shape[-1]].copy_(source.learnt)


@dataclasses.dataclass(frozen=True)
class Learner(Selector):
    """A selector that learns from the prompt, in `learn`."""

    def shape(self, room: int, head_dim: int) -> tuple[int, int]:
        """Of what is learnt for a KV head of a cache with that room."""
        raise NotImplementedError

    def learn(self, call: AttentionCall, rows: Rows) -> torch.Tensor:
        raise NotImplementedError

    def cache_layer(self, max_length: int) -> LearntLayer:
        return LearntLayer(max_length, self)

    def note_queries(self, call: AttentionCall) -> None:
        if isinstance(call.state, LearntLayer):
            learnt = self.learn(call, rows_of(call))
            call.state.learnt[..., : learnt.shape[-1]].copy_(learnt)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if not isinstance(call.state, LearntLayer):  # a cache of the user's own
            return Dense().attend(call)
        return super().attend(call)


@dataclasses.dataclass(frozen=True)
class Projected(Learner):
    """Keys by a few coordinates of 4 bits; learnt are the `[D,channels]` that make them, and the
    lowest value and the step of each."""

    channels: int = 32

    def scanned(self, tokens: int, head_dim: int) -> float:
        return tokens * self.channels / 2

    def refusal(self, shape: LayerShape) -> str | None:
        if self.channels > shape.head_dim:
            return f"{self.name}: {self.channels} channels of a head of {shape.head_dim}"
        return super().refusal(shape)

    def shape(self, room: int, head_dim: int) -> tuple[int, int]:
        return head_dim + 2, self.channels

    def basis(self, call: AttentionCall, rows: Rows, weight: torch.Tensor) -> torch.Tensor:
        """`[B,Hkv,D,channels]`; `weight` `[B,1,n,1]` is 1 of keys that are seen, else 0."""
        raise NotImplementedError

    def learn(self, call: AttentionCall, rows: Rows) -> torch.Tensor:
        weight = rows.seen[:, None, :, None].float()
        basis = self.basis(call, rows, weight)
        x, count = rows.k @ basis, weight.sum(2, keepdim=True)
        mean = (x * weight).sum(2, keepdim=True) / count
        spread = (
            (((x - mean).square() * weight).sum(2, keepdim=True) / count).sqrt().clamp(min=1e-8)
        )
        return torch.cat([basis, mean - CLIP * spread, 2 * CLIP * spread / TOP], 2)

    def scores(self, call: AttentionCall, rows: Rows) -> torch.Tensor:
        """The share of attention by the codes, summed over the group."""
        assert isinstance(call.state, LearntLayer)
        basis, low, step = call.state.learnt.split([call.k.shape[3], 1, 1], 2)
        x = ((rows.k @ basis - low) / step).round().clamp(0, TOP) * step + low
        logits = logits_of(call, grouped(call)[:, :, :, 0] @ basis, x)
        return logits.masked_fill(~rows.seen[:, None, None], -torch.inf).softmax(-1).sum(2)


@dataclasses.dataclass(frozen=True)
class DoubleSparsity(Projected):
    name: ClassVar[str] = "double_sparsity"

    def basis(self, call: AttentionCall, rows: Rows, weight: torch.Tensor) -> torch.Tensor:
        q = grouped(call, QUERIES).abs()
        place = torch.arange(-q.shape[3], 0, device=q.device) + rows.end
        q = (q * (place >= 0)[:, None, None, :, None]).mean((2, 3))  # not those of padding
        label = q * (rows.k.abs() * weight).sum(2)
        best = label.topk(self.channels, -1).indices
        return torch.nn.functional.one_hot(best, rows.k.shape[3]).mT.float()


@dataclasses.dataclass(frozen=True)
class Loki(Projected):
    name: ClassVar[str] = "loki"

    def basis(self, call: AttentionCall, rows: Rows, weight: torch.Tensor) -> torch.Tensor:
        mean = (rows.k * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True)
        centred = (rows.k - mean) * weight
        vectors = torch.linalg.eigh((centred.mT @ centred).double()).eigenvectors
        return vectors[..., -self.channels :].float()  # the largest come last


@dataclasses.dataclass(frozen=True)
class SnapKV(Learner):
    """SnapKV; learnt are a prompt's votes, 0 for keys without any."""

    last: int = 32
    pool: int = 5

    name: ClassVar[str] = "snapkv"

    def shape(self, room: int, head_dim: int) -> tuple[int, int]:
        return 1, room

    def learn(self, call: AttentionCall, rows: Rows) -> torch.Tensor:
        q = grouped(call, self.last)
        logits = logits_of(call, q.flatten(2, 3), rows.k).unflatten(2, q.shape[2:4])
        place = torch.arange(rows.k.shape[2], device=q.device)
        at = torch.arange(-q.shape[3], 0, device=q.device) + rows.end  # `[B,last]`
        seen = (place <= at[..., None]) & rows.seen[:, None]
        hidden = logits.masked_fill(~seen[:, None, None], -torch.inf)
        votes = hidden.softmax(-1).nan_to_num(0.0).sum((2, 3))
        return torch.nn.functional.avg_pool1d(votes, self.pool, 1, self.pool // 2)[:, :, None]

    def scores(self, call: AttentionCall, rows: Rows) -> torch.Tensor:
        assert isinstance(call.state, LearntLayer)
        votes = call.state.learnt[:, :, 0]
        return votes.masked_fill(votes == 0, -torch.inf)


RIVALS: tuple[type[Phase], ...] = (
    *(Streaming, MatchedWindow, Quest, DoubleSparsity, Loki, SnapKV),
    *(PooledBlocks, VerticalSlash),
)


def register_rivals() -> None:
    """Make policy strings know them, in this process."""
    for method in RIVALS:
        register(method)


if __name__ == "__main__":
    register_rivals()
    app()
