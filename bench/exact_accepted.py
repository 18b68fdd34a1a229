"""How many drafts dense accepts: exact on a small real model, greedy and sampled, float32.

    python bench/exact_accepted.py [--model smollm2-135m] [--tokens 4000] [--new 96] [--m 6|auto]

The prompt is a window of the prose that attnplug's eval reads. Each line is one draft: rounds,
accepted drafts a round, and whether all tokens are dense's. A CPU will do: acceptance is no matter
of speed.
"""

import argparse
import json

import torch

import attnplug
from attnplug.eval.measure import prose_window
from attnplug.models.generate import LOOP
from attnplug.models.pretrained import load

DRAFTS = ("gather", "gather(k=64)", "gather(k=16)", "gather(k=0)", "gvr(k=512)", "gvr(k=128)")
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--m", type=lambda x: int(x) if x.isdigit() else x, default=6)
    asked = parser.parse_args()
    model, tokenizer = load(asked.model, device="cpu", dtype=torch.float32)
    ids = prose_window(tokenizer, asked.tokens, 0).reshape(1, -1)
    for options in ({"do_sample": False}, SAMPLED):
        wanted = _tokens(model, "dense", ids, asked.new, options)[0]
        for draft in DRAFTS:
            policy = f"exact(draft={draft!r}, m={asked.m!r}, min_tokens=0)"
            found, tally = _tokens(model, policy, ids, asked.new, options)
            row = {
                "model": asked.model,
                "n": ids.shape[1],
                "new": asked.new,
                "draft": draft,
                "m": asked.m,
                "sampled": options["do_sample"],
                "rounds": tally.rounds,
                "drafted": tally.drafted,
                "accepted": round(tally.accepted / max(1, tally.rounds), 2),
                "tokens_of_dense": found == wanted,
            }
            print(json.dumps(row), flush=True)


def _tokens(model, policy, ids, new, options):
    torch.manual_seed(1)
    with attnplug.applied(model, policy):
        out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
        return out[0, ids.shape[1] :].tolist(), vars(model)[LOOP].rounds.tally


if __name__ == "__main__":
    main()
