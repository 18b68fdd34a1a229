"""Which methods name the key block that holds the needle, in SmolLM2's retrieving heads.

    python bench/needle_trace.py [--needles 50] [--tokens 1024] [--only METHOD]

A prompt with a hidden number (`attnplug.eval.needle`) and the reply that quotes it: while the
model writes digit j, a retrieving head attends to digit j in the text. For each such step, each
retrieving head and each method: does its list hold the block with that digit? Retrieving heads are
those that give the digit's block at least a tenth of their attention on average over ten other
prompts, by dense attention. Writes bench/results/needle-trace.json, one quality row a method and
question, the interval a bootstrap over needles; a run goes on where one stopped. `--only` measures
one method, and keeps the rows of the others."""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from _results import row_policy, run_of, write_rows

from attnplug.eval.capture import capture_layers
from attnplug.eval.needle import needle_prompt
from attnplug.eval.stats import bootstrap_mean
from attnplug.models.pretrained import load
from attnplug.ops import select_blocks, stream_mask
from attnplug.policies import AttentionCall, Momo

MODEL = "smollm2-135m"
BLOCK, LOCAL, DIGITS = 16, 4, 5
BUDGETS = (8, 32)
HELD_OUT = range(1000, 1010)
THRESHOLD = 0.1
SEARCHES = {"stream": "bounds", "branches": "branches"}
RESULTS = Path(__file__).parent / "results"
METHODS = {
    "stream": "stream(top_k={k}, block=16)",
    "branches": "stream(top_k={k}, block=16, search='branches')",
    "momo": "momo(top_k={k}, block=16, query_block=64, tail=0)",
    "gather": "gather(k={k}, sink=1, local=4)",
    "oracle": "the {k} blocks with most attention",
}


def quoted(tokenizer, seed: int, tokens: int) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Ids `[1,T]` of prompt and reply up to the last digit but one, the place of each digit in the
    needle, and the places of the queries that predict the digits."""
    depth = 0.1 + 0.7 * (seed * 7 % 50) / 50
    needle = needle_prompt(tokenizer, tokens, depth, seed, "prose")
    city = needle.text.partition("magic number for ")[2].partition(" is hidden")[0]
    reply = f"The special magic number for {city} mentioned in the text is {needle.answer}"
    tail = tokenizer(reply, return_tensors="pt", add_special_tokens=False).input_ids
    digits = tail[0, -DIGITS:].tolist()
    assert tokenizer.decode(digits) == needle.answer
    ids = needle.ids[0].tolist()
    first = next(i for i in range(len(ids)) if ids[i : i + DIGITS] == digits)
    whole = torch.cat([needle.ids, tail[:, :-1]], 1)
    at = torch.arange(whole.shape[1] - DIGITS, whole.shape[1])
    return whole, list(range(first, first + DIGITS)), at


def blocks_read(method: str, k: int, call: AttentionCall, at: torch.Tensor) -> torch.Tensor:
    """The blocks `[Hq,5,K]` that each of the queries `at` would read by a method with budget k."""
    q = call.q[:, :, at]
    if method in SEARCHES:
        options = {"top_k": k, "block": BLOCK, "search": SEARCHES[method]}
        steps = [
            stream_mask(q[:, :, [j]], call.k[:, :, : at[j] + 1], **options)[0]
            for j in range(DIGITS)
        ]
        return torch.cat(steps, 2)[0]
    if method == "gather":
        shape = (*call.k.shape[:2], -(-call.k.shape[2] // BLOCK), 2, call.k.shape[3])
        index = select_blocks(
            q, call.k, torch.zeros(shape), torch.zeros(1, 2, dtype=torch.int32),
            block=BLOCK, top_k=k, sink=1, local=LOCAL, lengths=torch.tensor([int(at[-1]) + 1]),
        )  # fmt: skip
        return index[0].repeat_interleave(call.q.shape[1] // call.k.shape[1], 0)
    if method == "momo":
        momo = Momo(top_k=k, exact_k=min(k, 8), block=BLOCK, query_block=64, tail=0, min_tokens=0)
        reads = momo.reads(call)
        assert reads is not None  # nothing is too short for it
        return reads.index[0][:, at // momo.query_block]
    return masses(call, at).topk(k, -1).indices


def masses(call: AttentionCall, at: torch.Tensor) -> torch.Tensor:
    """Exact attention `[Hq,5,blocks]` of the queries `at` on every block."""
    keys = call.k[0].repeat_interleave(call.q.shape[1] // call.k.shape[1], 0)
    logits = call.q[0][:, at] @ keys.mT * call.scale
    logits = logits.masked_fill(torch.arange(keys.shape[1]) > at[:, None], -torch.inf)
    weights = torch.nn.functional.pad(logits.softmax(-1), (0, -keys.shape[1] % BLOCK))
    return weights.unflatten(-1, (-1, BLOCK)).sum(-1)


def needle_masses(model, tokenizer, seed: int, tokens: int) -> np.ndarray:
    """Mean attention `[layers,Hq]` on the block of the digit that is being quoted."""
    ids, digits, at = quoted(tokenizer, seed, tokens)
    calls = capture_layers(model, ids, range(model.config.num_hidden_layers))
    blocks = torch.tensor(digits) // BLOCK
    each = [masses(call, at)[:, torch.arange(DIGITS), blocks].mean(1) for call in calls.values()]
    return torch.stack(each).numpy()


def sample(model, tokenizer, seed: int, tokens: int, heads: list[list[int]], methods) -> dict:
    """For the methods and every budget `[listed, first, kept]`: in which share of (digit, head) the
    block is listed and stands first, and how much of the heads' attention on it is kept."""
    ids, digits, at = quoted(tokenizer, seed, tokens)
    calls = capture_layers(model, ids, sorted({layer for layer, _ in heads}))
    blocks = torch.tensor(digits) // BLOCK
    sums: dict[str, list[float]] = {}
    weight = 0.0
    for layer, call in calls.items():
        own = [head for each, head in heads if each == layer]
        mass = masses(call, at)[:, torch.arange(DIGITS), blocks][own]
        weight += float(mass.sum())
        for method, k in itertools.product(methods, BUDGETS):
            hit = blocks_read(method, k, call, at)[own] == blocks[:, None]
            listed = hit.any(-1)
            found = sums.setdefault(f"{method} {k}", [0.0, 0.0, 0.0])
            found[0] += float(listed.sum())
            found[1] += float(hit[..., 0].sum())
            found[2] += float((mass * listed).sum())
    total = len(heads) * DIGITS
    shares = {name: [a / total, b / total, c / weight] for name, (a, b, c) in sums.items()}
    return {"seed": seed, "tokens": ids.shape[1], "shares": shares}


def rows(samples: list[dict], tokens: int, heads: int, methods) -> list[dict]:
    about = {"model": MODEL, "n": tokens, "trials": len(samples), "dense": 1.0}
    about |= {"heads": heads, **run_of()}
    found = []
    questions = ("needle-block-listed", "needle-block-first", "needle-attention-kept")
    for place, task in enumerate(questions):
        for method in methods:
            if place == 1 and method in ("gather", "momo"):
                continue  # their lists are in another order
            for k in BUDGETS:
                mean = bootstrap_mean([s["shares"][f"{method} {k}"][place] for s in samples])
                values = {"value": mean.value, "low": mean.low, "high": mean.high}
                found.append({"task": task, "policy": name_of(method, k)} | about | values)
    return found


def name_of(method: str, k: int) -> str:
    """What rows call a method with budget k."""
    name = METHODS[method].format(k=k)
    return name if method == "oracle" else row_policy(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--needles", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--samples", type=Path, default=Path("/tmp/needle-trace.json"))
    parser.add_argument("--only", choices=METHODS)
    options = parser.parse_args()
    methods = [options.only] if options.only else list(METHODS)
    torch.set_num_threads(1)  # start several on a busy machine: threads that wait cost the most
    model, tokenizer = load(MODEL, device="cpu")
    known = json.loads(options.samples.read_text()) if options.samples.exists() else {}
    for seed in HELD_OUT:
        if str(seed) not in known.setdefault("held out", {}):
            found = needle_masses(model, tokenizer, seed, options.tokens)
            known["held out"][str(seed)] = found.tolist()
            options.samples.write_text(json.dumps(known))
    mean = np.mean(list(known["held out"].values()), 0)
    heads = np.argwhere(mean >= THRESHOLD).tolist()
    print("retrieving heads (layer, head):", [(*h, round(float(mean[*h]), 2)) for h in heads])
    for seed in range(options.needles):
        before = known.setdefault("needles", {}).get(str(seed), {"shares": {}})["shares"]
        lacking = [method for method in methods if f"{method} {BUDGETS[0]}" not in before]
        if lacking:
            found = sample(model, tokenizer, seed, options.tokens, heads, lacking)
            found["shares"] = before | found["shares"]
            known["needles"][str(seed)] = found
            options.samples.write_text(json.dumps(known))
            print(seed, found["tokens"], {n: round(s[0], 2) for n, s in found["shares"].items()})
    samples = [known["needles"][str(seed)] for seed in range(options.needles)]
    path = RESULTS / "needle-trace.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = rows(samples, options.tokens, len(heads), methods)
    asked = {(row["n"], row["policy"]) for row in measured}
    kept = [row for row in known if (row["n"], row["policy"]) not in asked] + measured
    write_rows(path, sorted(kept, key=lambda row: row["n"]))


if __name__ == "__main__":
    main()
