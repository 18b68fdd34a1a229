"""Measurements on the prose that need no answers: sliding-window perplexity, fidelity of the decode
steps against dense, and the attention that a block mask keeps.

Perplexity: window i is `tokens` tokens long and starts `i * STRIDE` tokens into the prose; its last
STRIDE tokens are scored, each after at least `tokens - STRIDE` others (half the window where that
is shorter than two strides), so that no token is scored twice.

Fidelity: both sides prefill the same tokens, then read the same next tokens one at a time (teacher
forcing), each through its real decode step over a static cache: the last 32 of a
window ("fidelity"), its last 1,024 ("long-decode"), or 1,024 of which the last 768 are of plays and
not of the prose ("topic-change"). From the logits of every step, p dense's and r the policy's
distribution:

    agreement = 1 where both have the same most likely token
    agreement-at-margin = the same, over steps where dense's best logit leads by more than 1
    kl = sum p (log p - log r), in nats          total-variation = sum |p - r| / 2

and of either side the mean loss of the tokens that the steps predict, whose exponential is the
perplexity of a policy's decode."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch

from attnplug.api import applied, make_cache
from attnplug.errors import ArgumentError
from attnplug.eval.fidelity import BlockMask, measure_masks
from attnplug.eval.mass import captured_mass
from attnplug.eval.needle import prose
from attnplug.eval.served import Served, ServedBy, who_served
from attnplug.eval.steps import Steps, own_steps
from attnplug.models.names import CACHE
from attnplug.policies import Policy

STRIDE, STEPS, LONG = 512, 32, 1024
OTHER = 768  # of LONG tokens those that are of another topic
MARGIN = 1.0
CHUNK = 32  # steps whose distributions are compared at once: a vocabulary is large in float64


@lru_cache(maxsize=8)
def _prose_tokens(tokenizer: Any, long: bool = False) -> list[int]:
    """The tokens of the prose. With `long` the tokens of the long prose's additions follow, so that
    a window which ends before them is the same with and without `long`."""
    if not long:
        return _plain_tokens(tokenizer, "\n\n".join(prose()))
    more = "\n\n".join(prose(long=True)[len(prose()) :])
    return _prose_tokens(tokenizer) + _plain_tokens(tokenizer, f"\n\n{more}")


def _plain_tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def prose_window(tokenizer: Any, tokens: int, number: int) -> torch.Tensor:
    """Window `number` of the prose, `[1,tokens]`, STRIDE tokens after the one before, led by the
    tokenizer's special tokens. Raises ArgumentError past the prose's end."""
    return _window(tokenizer, tokens, number, min(STRIDE, tokens // 2))


def _window(tokenizer: Any, tokens: int, number: int, stride: int) -> torch.Tensor:
    first = tokenizer("").input_ids  # the special tokens that a text starts with
    start, end = number * stride, number * stride + tokens - len(first)
    whole = _prose_tokens(tokenizer)
    if end > len(whole):
        whole = _prose_tokens(tokenizer, long=True)
    if end > len(whole):
        raise ArgumentError(f"window {number} ends at token {end}, the prose has {len(whole)}")
    return torch.tensor([first + whole[start:end]], dtype=torch.int64, device="cpu")


def long_window(tokenizer: Any, tokens: int, number: int) -> torch.Tensor:
    """As `prose_window`, LONG tokens after the one before: no step is measured twice."""
    _leave_a_prompt(tokens)
    return _window(tokenizer, tokens, number, LONG)


def topic_window(tokenizer: Any, tokens: int, number: int) -> torch.Tensor:
    """As `long_window`, but the last OTHER tokens are the next ones of the plays."""
    prose_part = long_window(tokenizer, tokens, number)[:, : tokens - OTHER]
    plays = _plays_tokens(tokenizer)
    end = (number + 1) * OTHER
    if end > len(plays):
        raise ArgumentError(f"window {number} ends at token {end} of the plays' {len(plays)}")
    return torch.cat(
        [prose_part, torch.tensor([plays[end - OTHER : end]], dtype=torch.int64, device="cpu")], 1
    )


def _leave_a_prompt(tokens: int) -> None:
    if tokens < 2 * LONG:
        raise ArgumentError(f"a window has {tokens} tokens, {LONG} decode steps need {2 * LONG}")


@lru_cache(maxsize=4)
def _plays_tokens(tokenizer: Any) -> list[int]:
    text = files("attnplug.eval").joinpath("data/plays.txt").read_text(encoding="utf-8")
    return _plain_tokens(tokenizer, text)


@dataclass(frozen=True)
class DecodeMeasure:
    """Decode steps that are compared: windows `window(tokenizer, tokens, number)` `[1,tokens]`, the
    steps at a window's end, and what the names of their rows begin with."""

    window: Callable[[Any, int, int], torch.Tensor]
    steps: int
    prefix: str


DECODES = {
    "fidelity": DecodeMeasure(prose_window, STEPS, ""),
    "long-decode": DecodeMeasure(long_window, LONG, "long-"),
    "topic-change": DecodeMeasure(topic_window, LONG, "topic-"),
}


@torch.inference_mode()
def window_nll(model: Any, ids: torch.Tensor) -> float:
    """Mean negative log-likelihood (nats) of the window's last tokens, by whatever attention the
    model has now. Its exponential is the perplexity."""
    scored = min(STRIDE, ids.shape[1] // 2)
    logits = model(ids, use_cache=False, logits_to_keep=scored + 1).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, -scored:]).item()


class Reading:
    """Windows `ids` `[B,T]` of one length whose last `steps` tokens are read one at a time, after a
    prefill of the others. Without a policy: by the model's own attention.

    Several readings may take turns on one model, so that their logits, of which a large vocabulary
    has many, are compared and forgotten a few steps at a time."""

    def __init__(self, model: Any, ids: torch.Tensor, policy: Policy | None, steps: int) -> None:
        self.model, self.policy, self.tokens = model, policy, ids[:, -steps:]
        self.served: Served = {}
        prompt, room = ids[:, :-steps], ids.shape[1]
        if policy is None:
            _, self.steps = own_steps(model, prompt.split(1), room)
            return
        with self._attention(), torch.inference_mode():
            cache = make_cache(model, room)
            model(prompt, use_cache=True, logits_to_keep=1, **{CACHE: cache})
            self.served |= who_served(model)
            real = torch.ones_like(prompt, dtype=torch.bool)
            self.steps = Steps(model, cache, real, masked=False)

    def _attention(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.policy is None else applied(self.model, self.policy)

    def logits(self, first: int, end: int) -> torch.Tensor:
        """Logits `[B,end-first,V]` (float32, the model's device) of the next steps."""
        with self._attention():
            tokens = self.tokens[:, first:end].split(1, dim=1)
            logits = torch.stack([self.steps.logits(token) for token in tokens], 1)
            if self.policy is not None:
                self.served |= who_served(self.model)
            return logits


def compare_decodes(
    model: Any,
    ids: torch.Tensor,
    policies: Mapping[str, Policy | None],
    steps: int,
    served: ServedBy | None = None,
) -> dict[str, list[dict[str, float]]]:
    """For each policy by its name, and each window of `ids` `[B,T]`: the measures above of its last
    `steps` steps against the model's own, and its loss `nll`. None is the model's own. `served`
    takes who served each."""
    dense = Reading(model, ids, None, steps)
    others = {n: Reading(model, ids, policy, steps) for n, policy in policies.items() if policy}
    if served is not None:
        served |= {name: reading.served for name, reading in others.items()}
    parts: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in policies}
    for first in range(0, steps, CHUNK):
        end = min(first + CHUNK, steps)
        wanted = ids[:, ids.shape[1] - steps + first + 1 :][:, : end - first]  # the last has none
        own = dense.logits(first, end)
        for name in policies:
            logits = own if name not in others else others[name].logits(first, end)
            compared = _compare(own, logits) if name in others else {}
            parts[name].append(compared | {"loss": _losses(logits, wanted)})
    found = {}
    for name, chunks in parts.items():
        whole = {key: torch.cat([chunk[key] for chunk in chunks], 1) for key in chunks[0]}
        rows = [{key: values[row] for key, values in whole.items()} for row in range(len(ids))]
        found[name] = [
            (_fidelity(row) if name in others else {}) | {"nll": row["loss"].double().mean().item()}
            for row in rows
        ]
    return found


def _losses(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood (nats) `[B,n]` of the tokens `wanted` `[B,n]` by logits `[B,N,V]`."""
    read = logits[:, : wanted.shape[1]].flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(read, wanted.flatten(), reduction="none")
    return losses.view_as(wanted).cpu()


def _compare(dense: torch.Tensor, policy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every step `[B,N]`: whether both agree, whether dense is sure, KL and total variation."""
    p, r = (logits.double().log_softmax(-1) for logits in (dense, policy))
    best = dense.topk(2, dim=-1).values
    found = {
        "agreement": dense.argmax(-1) == policy.argmax(-1),
        "sure": best[..., 0] - best[..., 1] > MARGIN,
        "kl": (p.exp() * (p - r)).sum(-1),
        "total-variation": (p.exp() - r.exp()).abs().sum(-1) / 2,
    }
    return {name: value.cpu() for name, value in found.items()}


def _fidelity(steps: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The means over steps `[N]`. `agreement-at-margin` is missing where no step has a margin."""
    same, sure = steps["agreement"].double(), steps["sure"]
    values = {
        "agreement": same.mean().item(),
        "kl": steps["kl"].mean().item(),
        "total-variation": steps["total-variation"].mean().item(),
    }
    if sure.any():
        values["agreement-at-margin"] = same[sure].mean().item()
    return values


def compare_logits(dense: torch.Tensor, policy: torch.Tensor) -> dict[str, float]:
    """The measures above of logits `[steps,V]`, but for the loss."""
    chunks = zip(dense.split(CHUNK), policy.split(CHUNK), strict=True)
    parts = [_compare(one[None], other[None]) for one, other in chunks]
    return _fidelity({key: torch.cat([part[key][0] for part in parts]) for key in parts[0]})


def mask_values(
    model: Any, ids: torch.Tensor, mask: BlockMask
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What the block mask keeps of exact attention in the prefill of `ids` `[1,T]`: the means, and
    for each measured layer `captured` and `oracle` (best lists of that size) head by head."""
    layers = measure_masks(model, ids, mask)
    detail = []
    for layer in layers:
        lists = layer.index, layer.best
        kept, most = (captured_mass(layer.mass, each) for each in lists)
        heads = {
            "captured": [round(x, 6) for x in kept.mean((0, 2)).tolist()],
            "oracle": [round(x, 6) for x in most.mean((0, 2)).tolist()],
        }
        detail.append({"layer": layer.layer, "density": layer.density} | heads)
    captured = sum(layer.captured for layer in layers) / len(layers)
    oracle = sum(layer.oracle for layer in layers) / len(layers)
    values = {"captured-mass": captured, "captured-mass-of-oracle": captured / oracle}
    return values, detail
