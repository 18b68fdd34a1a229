"""What every prompt generator needs: its own seed, the chat template, and a length that fits."""

import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from attnplug.errors import ArgumentError

SHORTEST = 160
AIM, LOW = 0.96, 0.90
# Ten depths in an order whose every beginning is spread: fewer trials still see the whole prompt,
# and more trials keep the earlier ones.
DEPTHS = (0.45, 0.95, 0.15, 0.65, 0.25, 0.75, 0.05, 0.55, 0.35, 0.85)


def depth_of(trial: int) -> float:
    """The depth that a trial asks about, 0 (first) to 1 (last): ten depths in turn."""
    return DEPTHS[trial % len(DEPTHS)]


def generator(task: str, tokens: int, trial: int, seed: int) -> np.random.Generator:
    """The random numbers of one prompt, independent of every other prompt's."""
    entropy = (seed, zlib.crc32(task.encode()), tokens, trial)
    return np.random.default_rng(np.random.SeedSequence(entropy))


def render(tokenizer: Any, user: str, lead: str) -> str:
    """The whole text: a user's turn and the opened assistant's turn where the tokenizer has a chat
    template, else plain text; then `lead`, the start of the answer."""
    if tokenizer.chat_template is None:
        return f"{user} {lead}"
    turn = [{"role": "user", "content": user}]
    opened = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return opened + lead


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered text. A chat template writes the special tokens itself."""
    plain = tokenizer.chat_template is None
    return tokenizer(text, add_special_tokens=plain).input_ids


def template_name(tokenizer: Any) -> str:
    """ "plain", or the first digits of the chat template's hash."""
    template = tokenizer.chat_template
    return "plain" if template is None else f"chat-{digest(str(template))}"


def digest(text: str) -> str:
    """Twelve hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fit(length: Callable[[int], int], target: int) -> int:
    """How many units of filler make a prompt of 90 to 100% of `target` tokens; `length(units)` is
    the prompt's, close to linear. Raises ArgumentError where no number of units does."""
    low, short = 0, length(0)
    if short > target:
        raise ArgumentError(f"needs at least {short} tokens without any filler, not {target}")
    if short >= LOW * target:
        return 0
    high, over, guess = None, 0, 16
    for _ in range(24):
        found = length(guess)
        if LOW * target <= found <= target:
            return guess
        if found < target:
            low, short = guess, found
        else:
            high, over = guess, found
        # From the last short guess on, by the mean cost of a unit so far, inside the bracket.
        cost = max((over - short) / (high - low) if high else found / guess, 0.1)
        guess = max(low + 1, low + round((AIM * target - short) / cost))
        if high is not None:
            guess = min(guess, high - 1)
            if guess <= low:
                break
    raise ArgumentError(f"no filler makes a prompt of {LOW:.0%} to 100% of {target} tokens")
