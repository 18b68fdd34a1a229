"""Measurements on the prose that need no answers: sliding-window perplexity, fidelity of the decode
steps against dense, and the attention that a block mask keeps.

Perplexity: window i is `tokens` tokens long and starts `i * STRIDE` tokens into the prose; its last
STRIDE tokens are scored, each after at least `tokens - STRIDE` others (half the window where that
is shorter than two strides), so that no token is scored twice.

Fidelity: both sides prefill the same tokens, then read the same next tokens one at a time (teacher
forcing), each through its real decode step, over its static cache for a policy: the last 32 of a
window ("fidelity"), its last 1,024 ("long-decode"), or 1,024 of which the last 768 are of plays and
not of the prose ("topic-change"). From the logits of every step, p dense's and r the policy's
distribution:

    agreement = 1 where both have the same most likely token
    agreement-at-margin = the same, over steps where dense's best logit leads by more than 1
    kl = sum p (log p - log r), in nats          total-variation = sum |p - r| / 2

and of either side the mean loss of the tokens that the steps predict, whose exponential is the
perplexity of a policy's decode."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch

from attnplug.api import applied, make_cache
from attnplug.errors import ArgumentError
from attnplug.eval.fidelity import BlockMask, measure_masks
from attnplug.eval.mass import captured_mass, oracle_blocks
from attnplug.eval.needle import prose
from attnplug.policies import Policy

STRIDE, STEPS, LONG = 512, 32, 1024
OTHER = 768  # of LONG tokens those that are of another topic
MARGIN = 1.0
CHUNK = 32  # steps whose distributions are compared at once: a vocabulary is large in float64


@lru_cache(maxsize=4)
def _prose_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a text starts with, and the prose's tokens."""
    whole = tokenizer("\n\n".join(prose()), add_special_tokens=False, verbose=False).input_ids
    return tokenizer("").input_ids, whole


def prose_window(tokenizer: Any, tokens: int, number: int) -> torch.Tensor:
    """Window `number` of the prose, `[1,tokens]`, STRIDE tokens after the one before, led by the
    tokenizer's special tokens. Raises ArgumentError past the prose's end."""
    first, whole = _prose_tokens(tokenizer)
    return _window(first, whole, tokens, number, min(STRIDE, tokens // 2))


def _window(
    first: list[int], whole: list[int], tokens: int, number: int, stride: int
) -> torch.Tensor:
    start, end = number * stride, number * stride + tokens - len(first)
    if end > len(whole):
        raise ArgumentError(f"window {number} ends at token {end}, the prose has {len(whole)}")
    return torch.tensor([first + whole[start:end]])


def long_window(tokenizer: Any, tokens: int, number: int) -> torch.Tensor:
    """As `prose_window`, LONG tokens after the one before: no step is measured twice."""
    _leave_a_prompt(tokens)
    return _window(*_prose_tokens(tokenizer), tokens, number, LONG)


def topic_window(tokenizer: Any, tokens: int, number: int) -> torch.Tensor:
    """As `long_window`, but the last OTHER tokens are the next ones of the plays."""
    prose_part = long_window(tokenizer, tokens, number)[:, : tokens - OTHER]
    plays = _plays_tokens(tokenizer)
    end = (number + 1) * OTHER
    if end > len(plays):
        raise ArgumentError(f"window {number} ends at token {end} of the plays' {len(plays)}")
    return torch.cat([prose_part, torch.tensor([plays[end - OTHER : end]])], 1)


def _leave_a_prompt(tokens: int) -> None:
    if tokens < 2 * LONG:
        raise ArgumentError(f"a window has {tokens} tokens, {LONG} decode steps need {2 * LONG}")


@lru_cache(maxsize=4)
def _plays_tokens(tokenizer: Any) -> list[int]:
    text = files("attnplug.eval").joinpath("data/plays.txt").read_text(encoding="utf-8")
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


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


@torch.inference_mode()
def step_logits(
    model: Any, ids: torch.Tensor, policy: Policy | None, steps: int = STEPS
) -> torch.Tensor:
    """Logits `[steps,V]` (float32, the model's device) of the last `steps` tokens of `ids` `[1,T]`,
    read one at a time after a prefill of the others. Without a policy: the model's own attention
    and cache."""
    if policy is not None:
        with applied(model, policy):
            return _steps(model, ids, make_cache(model, ids.shape[1]), steps)
    return _steps(model, ids, None, steps)


def _steps(model: Any, ids: torch.Tensor, cache: Any, steps: int) -> torch.Tensor:
    prompt, rest = ids[:, :-steps], ids[:, -steps:]
    out = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = []
    for step in range(steps):
        token = rest[:, step : step + 1]
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[0, -1].float())
    return torch.stack(logits)


def step_nll(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Mean negative log-likelihood (nats) that `step_logits` of `ids` give to the tokens after
    those that were read; the last step has none."""
    wanted = ids[0, 1 - len(logits) :].to(logits.device)
    return torch.nn.functional.cross_entropy(logits[:-1], wanted).item()


def compare_logits(dense: torch.Tensor, policy: torch.Tensor) -> dict[str, float]:
    """The means over steps of the measures above, for logits `[steps,V]`. `agreement-at-margin` is
    missing where no step has such a margin."""
    chunks = zip(dense.split(CHUNK), policy.split(CHUNK), strict=True)
    same, sure, kl, distance = (
        torch.cat(parts).cpu()
        for parts in zip(*(_compare(*chunk) for chunk in chunks), strict=True)
    )
    values = {
        "agreement": same.double().mean().item(),
        "kl": kl.mean().item(),
        "total-variation": distance.mean().item(),
    }
    if sure.any():
        values["agreement-at-margin"] = same[sure].double().mean().item()
    return values


def _compare(dense: torch.Tensor, policy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of every step: whether both agree, whether dense is sure, KL and total variation."""
    p, r = (logits.double().log_softmax(-1) for logits in (dense, policy))
    best = dense.topk(2, dim=-1).values
    return (
        dense.argmax(-1) == policy.argmax(-1),
        best[:, 0] - best[:, 1] > MARGIN,
        (p.exp() * (p - r)).sum(-1),
        (p.exp() - r.exp()).abs().sum(-1) / 2,
    )


def mask_values(
    model: Any, ids: torch.Tensor, mask: BlockMask
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What the block mask keeps of exact attention in the prefill of `ids` `[1,T]`: the means, and
    for each measured layer `captured` and `oracle` (best lists of that size) head by head."""
    layers = measure_masks(model, ids, mask)
    detail = []
    for layer in layers:
        best = oracle_blocks(layer.mass, mask.top_k)
        kept, most = (captured_mass(layer.mass, lists) for lists in (layer.index, best))
        heads = {
            "captured": [round(x, 6) for x in kept.mean((0, 2)).tolist()],
            "oracle": [round(x, 6) for x in most.mean((0, 2)).tolist()],
        }
        detail.append({"layer": layer.layer, "density": layer.density} | heads)
    captured = sum(layer.captured for layer in layers) / len(layers)
    oracle = sum(layer.oracle for layer in layers) / len(layers)
    values = {"captured-mass": captured, "captured-mass-of-oracle": captured / oracle}
    return values, detail
