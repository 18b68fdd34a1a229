"""Hit rates of certified's scratch cache on a small real model: prose, a dense prefill, then
teacher-forced decode steps with the paper's options. Writes bench/results/certified/scratch.json.

    python bench/certified_scratch.py [context tokens] [steps]

On a CPU, which keeps the directory of a GPU's cache and not its slots. What is wanted does not
depend on what is kept: one decode serves every number of slots. Bytes are those that would cross
the link, keys and values in 16 bits.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import attnplug
from attnplug import Certified
from attnplug.bench.provenance import provenance
from attnplug.bench.rows import policy_name
from attnplug.models.names import CACHE
from attnplug.models.pretrained import load
from attnplug.ops import Scratch
from attnplug.ops.certified import certified_attention as OP
from attnplug.ops.certified.scratch import simulate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/certified/scratch.json"
SLOTS = (16, 32, 64, 128, 256)
SETTINGS = ({"block": 16}, {"block": 64})
PAPER = {
    "tolerance": None, "coverage": 0.995, "k_min": 2, "k_max": 128, "v_tol": 0.05, "ranking": 1,
    "explore": 0.0,
}  # fmt: skip


@torch.no_grad()
def wanted(model, ids: torch.Tensor, context: int, policy: Certified) -> list[list[np.ndarray]]:
    """For each layer, what every step reads exactly: the marks that `simulate` gets."""
    marks: list[np.ndarray] = []
    with attnplug.applied(model, attnplug.Policy(decode=policy)):
        cache = attnplug.make_cache(model, ids.shape[1] + 8)
        model(ids[:, :context], **{CACHE: cache})
        OP.simulate = lambda found, *_: marks.append(found.copy())
        for at in range(context, ids.shape[1]):
            model(ids[:, at : at + 1], **{CACHE: cache})
        OP.simulate = simulate
    layers = len(cache.layers)
    return [marks[layer::layers] for layer in range(layers)]


def replayed(marks: list[list[np.ndarray]], slots: int, block: int, after: int) -> np.ndarray:
    """(items wanted, items found) from step `after` on, over the layers."""
    total = np.zeros(2, np.int64)
    for layer in marks:
        heads = layer[0].shape[1]
        made = Scratch.empty(1, heads, slots, block, 1, torch.float32, "cpu")
        state = [x.numpy() for x in (made.owner, made.used, made.counters)]
        for step, found in enumerate(layer):
            if step == after:
                state[2][..., 1:] = 0
            simulate(found, np.zeros(1, np.int64), block, *state)
        total += state[2][..., 1:].sum((0, 1, 2))
    return total


def main(context: int = 2048, steps: int = 20, name: str = "smollm2-135m") -> None:
    model, tokenizer = load(name, dtype=torch.float32)
    text = (ROOT / "attnplug/eval/data/rust_book.txt").read_text()[: 16 * (context + steps)]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : context + steps]
    width = model.config.hidden_size // model.config.num_attention_heads
    after, rows = steps // 4, []  # the first steps fill it
    for options in SETTINGS:
        policy = Certified(**options, **PAPER, min_tokens=0)
        marks = wanted(model, ids, context, policy)
        item = 2 * policy.block * width
        for slots in SLOTS:
            asked, found = (int(x) for x in replayed(marks, slots, policy.block, after))
            heads = len(marks) * marks[0][0].shape[1]
            row = {
                "model": name, "n": context, "steps": steps - after,
                "policy": policy_name(policy), **options, "scratch": slots,
                "hit_rate": found / max(1, asked),
                "items_a_step": asked / (steps - after) / heads,
                "link_bytes_a_step": (asked - found) * item / (steps - after),
                "scratch_share": slots * policy.block / 2 / (context + steps), **provenance(),
            }  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
