"""Selectors of the literature as methods of decode, for comparisons: which tokens a step would read
that chose them so. They compute exact scores over the whole cache and mask them, so that their
quality is real and their time is not. Every step also reads what sketch's and gather's do: the
first 128 tokens, and the last four blocks of 128.

    bounds   Quest's (Tang et al., 2024): pages, ranked by what no key of theirs exceeds, the most
             of a group's heads. Bounds are INT8, rounded outwards.
    mean     pages ranked by their mean key, INT8
    double   Double Sparsity's (Yang et al., 2024): tokens, by a few of the keys' channels of 4
             bits, chosen by |q||k| over the prompt
    loki     Loki's (Singhania et al., 2024): tokens, by the keys' principal components, coded as
             sketch's coordinates are
    exact    tokens, by their own scores: what any choice of single tokens could do

Tokens are ranked by their share of attention, summed over a group's heads: with one list a group
that is kinder than the papers' own maximum. `size` is what is scanned for each token and KV head,
in bytes; pages are as long as that many bytes allow."""

import dataclasses
import math
from typing import ClassVar

import torch

from attnplug.ops.sketch.basis import CLIPS
from attnplug.ops.sketch.kernels.codes import LOCAL
from attnplug.ops.sketch.state import BLOCK, COORDINATES
from attnplug.policies import AttentionCall, Phase

NAMES = {
    "bounds": "quest",
    "mean": "quest-mean",
    "double": "double-sparsity",
    "loki": "loki",
    "exact": "exact-scores",
}
INT8 = 255  # steps of a byte
QUERIES = 512  # last of a prompt, that say which channels matter


def page_size(kind: str, size: int, width: int) -> int:
    """Tokens of a page whose summary, two bytes a channel or one, is `size` bytes a token."""
    return max(1, (2 if kind == "bounds" else 1) * width // size)


def candidates(length: int) -> slice:
    """The tokens that a selector chooses from; the others are read by every step."""
    near = max((length - 1) // BLOCK - (LOCAL.value - 1), 1)
    return slice(min(BLOCK, length), min(near * BLOCK, length))


def coded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """What codes of so many bits stand for, `[..., n, c]`, each channel within sketch's clips."""
    mean, deviation = x.mean(-2, keepdim=True), x.std(-2, keepdim=True).clamp(min=1e-8)
    step = 2 * CLIPS[bits] * deviation / (2**bits - 1)
    low = mean - CLIPS[bits] * deviation
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low


def bytes_of(spread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest value, step) of a channel's bytes, `[Hkv,1,D]`, over the range of `spread`."""
    low, high = spread.amin(1, keepdim=True), spread.amax(1, keepdim=True)
    return low, ((high - low) / INT8).clamp(min=1e-8)


class Summaries:
    """What a selector keeps of one layer's candidates `k [Hkv,n,D]`, float32."""

    def __init__(self, kind: str, size: int, k: torch.Tensor, queries: torch.Tensor):
        heads, self.tokens, width = k.shape
        self.kind, self.page = kind, 1
        if kind in ("bounds", "mean"):
            self.page = page_size(kind, size, width)
            self._summarise_pages(k[:, : self.tokens // self.page * self.page])
        elif kind == "double":
            group = queries.unflatten(0, (heads, -1))
            weight = group.abs().mean((1, 2)) * k.abs().mean(1)
            self.channels = weight.topk(min(2 * size, width), -1).indices
            self.codes = coded(k.gather(2, self.channels[:, None].expand(-1, self.tokens, -1)), 4)
        elif kind == "loki":
            self._find_components(k, *COORDINATES[size])

    def _summarise_pages(self, k: torch.Tensor) -> None:
        pages = k.unflatten(1, (-1, self.page))
        low, step = bytes_of(k)
        least, largest, mean = (pages.amin(2), pages.amax(2), pages.mean(2))
        self.least = ((least - low) / step).floor() * step + low
        self.largest = ((largest - low) / step).ceil() * step + low
        low, step = bytes_of(mean)
        self.mean = ((mean - low) / step).round() * step + low

    def _find_components(self, k: torch.Tensor, fine: int, coarse: int) -> None:
        self.centre = k.mean(1, keepdim=True)
        centred = k - self.centre
        covariance = (centred.mT @ centred / self.tokens).double().cpu()
        vectors = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
        self.vectors = vectors[..., : fine + coarse].to(k)
        x = centred @ self.vectors
        self.codes = torch.cat([coded(x[..., :fine], 4), coded(x[..., fine:], 2)], -1)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Estimates of q.k, or a bound of it, for `q [Hkv,G,D]` and every page or token."""
        if self.kind == "bounds":
            return q.clamp(min=0) @ self.largest.mT + q.clamp(max=0) @ self.least.mT
        if self.kind == "mean":
            return q @ self.mean.mT
        if self.kind == "double":
            q = q.gather(2, self.channels[:, None].expand(-1, q.shape[1], -1))
            return q @ self.codes.mT
        if self.kind == "loki":
            return q @ self.vectors @ self.codes.mT + q @ self.centre.mT
        return q @ k.mT


@dataclasses.dataclass(frozen=True)
class Selector(Phase):
    """Decode over the tokens that a selector of the literature would choose, `k` of them (pages
    that have as many) from `size` bytes a token. For one sequence without padding. Make another
    for another text: it keeps what it has made of a layer in `known`, and a prompt's queries by
    layer in `queries`."""

    kind: str
    k: int
    size: int = 0
    queries: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)
    known: dict[int, Summaries] = dataclasses.field(default_factory=dict, repr=False)

    name: ClassVar[str] = "selector"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __str__(self) -> str:
        scanned = f"bytes={self.size}, " if self.size else ""
        return f"{NAMES[self.kind]}({scanned}k={self.k})"

    def note_queries(self, call: AttentionCall) -> None:
        self.queries[id(call.state)] = call.q[0, :, -QUERIES:].float()

    def kept(self, call: AttentionCall) -> torch.Tensor:
        """Which tokens a step reads, bool `[Hkv,n]`."""
        length, heads = valid(call), call.k.shape[1]
        q = call.q[0, :, 0].float().unflatten(0, (heads, -1))
        k, span = call.k[0, :, :length].float(), candidates(length)
        read = torch.ones(heads, length, dtype=torch.bool, device=k.device)
        if span.stop - span.start <= self.k:
            return read
        fixed, middle = torch.cat([k[:, : span.start], k[:, span.stop :]], 1), k[:, span]
        found = self.known.get(id(call.state))
        if found is None or found.tokens != middle.shape[1]:
            queries = self.queries.get(id(call.state), q.flatten(0, 1)[:, None])
            found = self.known[id(call.state)] = Summaries(self.kind, self.size, middle, queries)
        scores = found.scores(q, middle) * call.scale
        # A token's share of attention, which a page's bound has no part in.
        if self.kind == "bounds":
            rank = scores.amax(1)
        else:
            known = (q @ fixed.mT * call.scale).logsumexp(-1, keepdim=True)
            rest = scores.logsumexp(-1, keepdim=True) + math.log(found.page)
            rank = (scores - torch.logaddexp(known, rest)).logsumexp(1)
        best = rank.topk(min(self.k // found.page, rank.shape[1]), -1).indices
        chosen = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, True)
        chosen = chosen.repeat_interleave(found.page, 1)
        read[:, span.start : span.stop] = torch.nn.functional.pad(
            chosen, (0, middle.shape[1] - chosen.shape[1])
        )
        return read

    def attend(self, call: AttentionCall) -> torch.Tensor:
        probabilities = shares(call, self.kept(call))
        v = call.v[0, :, : probabilities.shape[-1]].float()
        return (probabilities @ v).flatten(0, 1)[None, :, None].to(call.q.dtype)


def valid(call: AttentionCall) -> int:
    """Tokens of a call's one sequence."""
    return call.k.shape[2] if call.lengths is None else int(call.lengths)


def shares(call: AttentionCall, kept: torch.Tensor | None = None) -> torch.Tensor:
    """The softmax of a step, float32 `[Hkv,G,n]`, over the tokens `kept` `[Hkv,n]` or all."""
    heads, length = call.k.shape[1], valid(call)
    q = call.q[0, :, 0].float().unflatten(0, (heads, -1))
    scores = q @ call.k[0, :, :length].float().mT * call.scale
    if call.softcap > 0:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if kept is not None:
        scores = scores.masked_fill(~kept[:, None], -torch.inf)
    return scores.softmax(-1)
