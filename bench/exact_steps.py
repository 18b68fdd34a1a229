"""exact's time a token over a long cache, beside dense's and its draft's: Qwen2.5-7B's shape.

    python bench/exact_steps.py --tokens 131072,1048576 --m 4,6,8 --accepted 3,4,6 --out rows.jsonl
    python bench/exact_steps.py --rows 8 --tokens 32768,131072 --out rows.jsonl
    python bench/exact_steps.py --m auto,auto --accepted 1,8 --out rows.jsonl
    python bench/exact_steps.py --tokens 131072 --m 2,3 --accepted 0.906,0.906 --out rows.jsonl
    python bench/exact_steps.py --own --tokens 1048576 --m 6 --accepted 0 --out rows.jsonl

Random weights say nothing of acceptance, so that the bench imposes it: a round accepts the number
of drafts that --accepted gives, whatever they are, or each draft with the chance that it gives (a
number with a point), and a row says so. Caches are filled with random
keys, as a prompt of a million tokens takes minutes. A time a token is the difference of a long call
and a short one.
With `--own` rounds go on only where exact finds that they pay, in calls of any length, as rows of
whole_calls.py tell what a call's second step costs. `--small` is for a try on a CPU.
"""

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _acceptance import accepting
from whole_calls import CONFIG, SMALL, built, say, seconds

import attnplug
from attnplug.bench.provenance import provenance
from attnplug.models.generate import LOOP
from attnplug.models.names import CACHE
from attnplug.policies import parse

# Tokens of a call's own prompt, and of a short and a long answer; on a GPU, where the difference of
# 70 tokens scattered by a fifth, of a longer one.
PROMPT, SHORT, LONG, LONGER = 20, 40, 110, 440


def filled(model: Any, rows: int, tokens: int) -> Any:
    cache = attnplug.make_cache(model, tokens + PROMPT + LONGER + 32)
    heads, width = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    empty = torch.empty((rows, heads, 0, width), dtype=model.dtype, device=model.device)
    for layer in cache.layers:
        layer.lazy_initialization(empty, empty)
        for buffer in layer._buffers():
            buffer[:, :, :tokens].normal_()
        layer.cumulative_length.fill_(tokens)
        layer.counted, layer.exposes_buffers = tokens, True
        if hasattr(layer, "summarise"):
            layer.summarise(None, None)
    return cache


@torch.inference_mode()
def a_token(model: Any, rows: int, tokens: int) -> float:
    """Milliseconds of a token of all rows."""
    cache = filled(model, rows, tokens)

    def call(new: int) -> float:
        ids = torch.randint(10, 100, (rows, tokens + PROMPT), device=model.device)
        options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        options[CACHE] = cache
        took = seconds(lambda: model.generate(ids, **options), model.device)
        cache.crop(tokens - int(cache.layers[0].cumulative_length))
        return took

    call(3)
    longer = LONG if model.device.type == "cpu" else LONGER
    few, many = (min(call(new) for _ in range(2)) for new in (SHORT, longer))
    return (many - few) / (longer - SHORT) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="131072,1048576")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--draft", default="gather")
    parser.add_argument("--m", default="4,6,8")
    parser.add_argument("--accepted", default="3,4,6", help="drafts of each m, or a chance")
    parser.add_argument("--own", action="store_true", help="leave it to exact whether rounds go on")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lengths = [int(x) for x in asked.tokens.split(",")]
    accepted = [float(x) if "." in x else int(x) for x in asked.accepted.split(",")]
    ms = [int(x) if x.isdigit() else x for x in asked.m.split(",")]
    device = "cpu" if asked.small else "cuda"
    model = built(SMALL if asked.small else CONFIG, device)
    about = {"case": "exact"} | provenance()
    for tokens in lengths:
        alone = replace(parse(asked.draft).decode, min_tokens=0)  # also where dense would serve
        policies: list[tuple[str, int | float | None]] = [("dense", None), (str(alone), None)]
        more = "" if asked.own else ", min_tokens=0"
        for m, count in zip(ms, accepted, strict=True):
            policies.append((f"exact(draft={asked.draft!r}, m={m!r}{more})", count))
        for policy, count in policies:
            with attnplug.applied(model, policy), accepting(count or 0, over_filled_caches=True):
                row = {
                    "policy": policy,
                    "n": tokens,
                    "batch": asked.rows,
                    "ms_a_token": round(a_token(model, asked.rows, tokens), 3),
                }
                tally = vars(model)[LOOP].rounds.tally
                row |= {"imposed": count, "rounds": tally.rounds, "accepted": tally.accepted}
            say(asked.out, row | about)
            gc.collect()


if __name__ == "__main__":
    main()
