"""What a decode step of gvr could know before it ranks its tokens, and what it keeps by the best
score and by share.

    python bench/gvr_hints.py gemma3-270m --tokens 8192

Queries and keys are those of one dense pass over prose; its last 80 positions stand for decode
steps. Every third layer with full attention, or all of three. Hits: a predicted threshold that k to
2 k scores of a row reach, so that a list of 2 k holds the top-k. The threshold is less a margin in
standard deviations, the one that hits most often:

    last k-th           the k-th score of the step before
    last place          its distance from the mean, in deviations; mean and deviation of 256 tokens
    bell                the k-th of so many normal scores with that mean and deviation

Then the share of the exact softmax that the tokens kept by gvr hold (`captured-attention`) and
|out - dense| / |dense| of a layer's heads (`output-error`), over every eighth step. Adds quality
rows of the study `gvr-hints` to bench/results/gvr-hints.json; low and high are the worst and the
best layer."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from _results import run_of, write_rows

from attnplug import Gvr
from attnplug.bench.rows import policy_name
from attnplug.eval.capture import capture_layers
from attnplug.eval.measure import prose_window
from attnplug.models.layers import find_attention_layers
from attnplug.models.pretrained import load
from attnplug.ops import score_tokens, share_tokens
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.policies import AttentionCall

STEPS, EVERY, SINK, WINDOW, SAMPLE = 80, 8, 16, 256, 256
KS = (512, 1024, 2048)
LIST = 2  # of k
MARGINS = torch.tensor([-0.1, 0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5])
RESULTS = Path(__file__).parent / "results" / "gvr-hints.json"
Values = dict[tuple[str, str], list[float]]  # by (task, policy), a value a layer


def step_scores(call: AttentionCall, group: str) -> torch.Tensor:
    """Scores of the steps, `[KV head, step, token]`, -inf for what a step may not choose."""
    codes, scales = quantize_keys(call.k)
    size, steps = call.k.shape[2], []
    for at in range(size - STEPS, size):
        kept = {"sink": SINK, "window": WINDOW, "lengths": torch.tensor([at + 1])}
        args = call.q[:, :, at : at + 1], codes, scales
        if group == "share":
            steps.append(share_tokens(*args, scale=call.scale, softcap=call.softcap, **kept))
        else:
            steps.append(score_tokens(*args, **kept))
    return torch.stack(steps, 1)


def hits(scores: torch.Tensor, k: int) -> Iterator[tuple[str, torch.Tensor]]:
    """For each predictor whether a list of LIST k holds the top-k, `[row, margin]`."""
    size = scores.shape[2]
    span = torch.arange(size - STEPS + 1, size + 1).float() - SINK - WINDOW
    odd = 2 * torch.arange(SAMPLE) + 1
    sampled = SINK + (odd * span[:, None] / (2 * SAMPLE)).long()
    sample = scores.gather(2, sampled.expand(len(scores), -1, -1))
    mean, deviation = sample.mean(2), sample.std(2)
    ascending = scores.sort(2).values
    kth = ascending[:, :, -k]
    bell = -torch.special.ndtri(k / span)
    place = (kth - mean) / deviation
    now = mean[:, 1:], deviation[:, 1:]
    predicted = {
        "hits of the last k-th": (kth[:, :-1], deviation[:, :-1]),
        "hits of the last place": (now[0] + place[:, :-1] * now[1], now[1]),
        "hits of the bell": (now[0] + bell[1:] * now[1], now[1]),
    }
    for name, (threshold, unit) in predicted.items():
        at = threshold[..., None] - MARGINS * unit[..., None]
        count = size - torch.searchsorted(ascending[:, 1:].contiguous(), at.contiguous())
        yield name, ((count >= k) & (count <= LIST * k)).float().flatten(0, 1)


def kept(call: AttentionCall, scores: torch.Tensor, k: int) -> tuple[float, float]:
    """(share of attention, error of the output) of the tokens that the best k by score make."""
    size, group = call.k.shape[2], call.q.shape[1] // call.k.shape[1]
    mass, error, steps = 0.0, 0.0, range(0, STEPS, EVERY)
    for step in steps:
        at = size - STEPS + step
        keys, values = (x[0, :, : at + 1].float() for x in (call.k, call.v))
        query = call.q[0, :, at].float().unflatten(0, (-1, group))
        weights = (torch.einsum("hgd,hnd->hgn", query, keys) * call.scale).softmax(2)
        near = torch.arange(at + 1)
        chosen = ((near < SINK) | (near > at - WINDOW)).repeat(len(keys), 1)
        chosen.scatter_(1, scores[:, step].topk(k).indices, True)
        held = weights * chosen[:, None]
        dense = torch.einsum("hgn,hnd->hgd", weights, values)
        out = torch.einsum("hgn,hnd->hgd", held / held.sum(2, keepdim=True), values)
        mass += float(held.sum(2).mean())
        error += float((out - dense).norm() / dense.norm())
    return mass / len(steps), error / len(steps)


def measure(call: AttentionCall, found: dict[tuple[str, str], list[torch.Tensor]]) -> Values:
    """The quality of a layer's picks; adds its hits to `found`."""
    quality: Values = {}
    for group in ("max", "share"):
        scores = step_scores(call, group)
        for k in KS:
            policy = policy_name(Gvr(k=k, group=group))
            for name, each in hits(scores, k):
                found[name, policy].append(each)
            mass, error = kept(call, scores, k)
            quality["captured-attention", policy] = [mass]
            quality["output-error", policy] = [error]
    return quality


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu")
    model = model.bfloat16()
    served = [layer.index for layer in find_attention_layers(model) if not layer.reason]
    layers = served if len(served) <= 3 else served[::3]
    found: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    values: Values = defaultdict(list)
    with torch.inference_mode():
        calls = capture_layers(model, prose_window(tokenizer, options.tokens, 1), layers)
        for layer, call in calls.items():
            for key, each in measure(call, found).items():
                values[key] += each
            print(options.model, "layer", layer, flush=True)
    for key, each in found.items():
        margin = int(torch.cat(each).mean(0).argmax())
        values[key] = [float(layer[:, margin].mean()) for layer in each]
    write(values, {"model": options.model, "n": options.tokens, "layers": len(layers)})


def write(values: Values, about: dict) -> None:
    """Put the rows in the place of those of the same model and length."""
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    known = [row for row in known if any(row[key] != about[key] for key in ("model", "n"))]
    about = {"study": "gvr-hints", "trials": STEPS, **run_of()} | about
    for (task, policy), each in values.items():
        spread = {"value": sum(each) / len(each), "low": min(each), "high": max(each)}
        dense = 0.0 if task == "output-error" else 1.0
        known.append({"task": task, "policy": policy, "dense": dense} | about | spread)
    write_rows(RESULTS, known)


if __name__ == "__main__":
    main()
