"""What `sketch` loses by a basis that a model has once, beside the basis of the prompt itself.

    python bench/model_basis.py smollm2-135m --layers 1,6,11,16,21,27 --k 128,512 -o rows.json

Steps of captured prompts are computed in torch as the ops compute them, but with picks that are
exactly the k best. `own` is `fit_bases` with its moments; `model` is the calibrated basis with
codes of keys turned back to their band, the norm of the tokens that are read exactly, and a
regression over 2,048 evenly spaced tokens, exact ones, anew at each step. `others` is calibrated
without the kinds of text that the prompt is like. A row has the mean error of a head's output,
|out - dense| / |dense|, over steps and heads, its 95th percentile, and the mass of attention that
is read exactly."""

import argparse
import json
import time
from typing import NamedTuple

import torch

from attnplug.calibration import texts
from attnplug.calibration.measure import measure
from attnplug.eval.capture import capture_layers
from attnplug.eval.needle import needle_prompt
from attnplug.models.pretrained import load
from attnplug.ops.sketch.basis import Fit, fit_basis
from attnplug.ops.sketch.model_basis import (
    BAND,
    Moments,
    back_to_start,
    fit_model_basis,
    size_for,
    turn,
)
from attnplug.ops.sketch.state import BLOCK, COORDINATES

SAMPLE = 2048
QUERIES, STEPS = 512, 6
LIKE = {"needle": ("book", "guides"), "plays": ("plays",), "code": ("code",)}


class Step(NamedTuple):
    """One step of a KV head: natural logarithms, `[G, n]`."""

    exact: torch.Tensor
    guess: torch.Tensor
    values: torch.Tensor  # [n, D]
    near: int  # first token of the last blocks


class Estimate(NamedTuple):
    """What a regression of values on scores knows: `[G]`, `[G]`, `[G, D]`, `[D]`."""

    mean: torch.Tensor
    variance: torch.Tensor
    covariance: torch.Tensor
    v_mean: torch.Tensor


def of_sample(step: Step) -> Estimate:
    count = step.near - BLOCK
    at = torch.arange(min(count, SAMPLE))
    at = BLOCK + (at * count // SAMPLE if count > SAMPLE else at)
    s, v = step.exact[:, at], step.values[at]
    mean, v_mean = s.mean(-1), v.mean(0)
    covariance = (s - mean[:, None]) @ (v - v_mean) / len(at)
    return Estimate(mean, s.var(-1, correction=0), covariance, v_mean)


def run(step: Step, known: Estimate, k: int, closed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(output `[G, D]`, the tokens that are read exactly, bool `[n]`), as docs/methods/sketch.md
    has it."""
    n = step.exact.shape[1]
    read = torch.ones(n, dtype=torch.bool)
    read[BLOCK : step.near] = False
    norm = step.exact[:, read].logsumexp(-1)
    inner = slice(BLOCK, step.near)
    guess = step.guess[:, inner]
    if closed:
        form = known.mean + known.variance / 2 + torch.tensor(float(guess.shape[1])).log()
        norm = torch.logaddexp(norm, form)
    shares = (guess - norm[:, None]).logsumexp(0)
    best = BLOCK + shares.topk(min(k, len(shares))).indices
    read[best] = True
    top = step.exact.amax(-1, keepdim=True)
    weight, wide = (step.exact - top).exp(), (step.guess - top).exp()
    low = best[k // 2 :]
    rho = (weight[:, low].sum(-1) / wide[:, low].sum(-1)).clamp(0.25, 4)
    rest = wide[:, ~read]
    mass = rest.sum(-1)
    u = (rest * step.guess[:, ~read]).sum(-1) / mass
    reach = 8 / known.variance.sqrt()
    slope = ((u - known.mean) / known.variance).clamp(-reach, reach)
    value = known.v_mean + known.covariance * slope[:, None]
    tail = (rho * mass)[:, None]
    out = weight[:, read] @ step.values[read] + tail * value
    return out / (weight[:, read].sum(-1, keepdim=True) + tail), read


def rounded(x: torch.Tensor, size: int) -> torch.Tensor:
    fine, coarse = COORDINATES[size]
    most = torch.tensor([15.0] * fine + [3.0] * coarse)
    return torch.minimum((x + 0.5).floor().clamp(min=0), most)


def coded(keys: torch.Tensor, encoder: torch.Tensor, size: int) -> torch.Tensor:
    return rounded(keys @ encoder[:-1] + encoder[-1], size)


class Layer:
    """One captured layer and what each way makes of its KV head h."""

    def __init__(self, call, inv_freq):
        self.q, self.k, self.v = (x[0].float() for x in (call.q, call.k, call.v))
        self.scale, self.inv_freq = call.scale, inv_freq
        self.before = self.k.shape[1] - STEPS  # tokens of the prompt
        self.bands = -(-self.k.shape[1] // BAND)
        angles = back_to_start(inv_freq, self.bands)
        self.turned = turn(self.k, angles.repeat_interleave(BAND, 0)[: self.k.shape[1]])
        self.angles = angles

    def own(self, size):
        prompt = (x[None, :, : self.before] for x in (self.k, self.v, self.q))
        k, v, q = prompt
        basis = fit_basis(*Fit(k, v, q[:, :, -QUERIES:])[:3], size=size)
        for h in range(len(self.k)):
            codes = coded(self.k[h], basis.encoder[0, h], size)
            rank = codes.shape[1]

            def step(query, h=h, codes=codes, rank=rank):
                facts = self.scale * query @ basis.queries[0, h]
                guess = facts[:, :rank] @ codes.T + facts[:, rank, None]
                spread = facts[:, rank + 2 : 2 * rank + 2].square().sum(-1)
                known = facts[:, rank + 1], spread, facts[:, 2 * rank + 2 :], basis.v_mean[0, h]
                # (mean, variance and covariance are of scores in units of the natural logarithm)
                return guess, Estimate(*known)

            yield h, step

    def model(self, basis, size):
        for h in range(len(self.k)):
            codes = coded(self.turned[h], basis.encoder[h], size)

            def step(query, h=h, codes=codes):
                turned = turn(query[:, None].expand(-1, self.bands, -1), self.angles)
                facts = self.scale * turned @ basis.scorer[h]  # [G, bands, r + 1]
                guess = torch.cat(
                    [
                        facts[:, b, :-1] @ codes[b * BAND : (b + 1) * BAND].T + facts[:, b, -1:]
                        for b in range(self.bands)
                    ],
                    -1,
                )
                return guess, None

            yield h, step


def compared(layer: Layer, ways, ks, found):
    group = len(layer.q) // len(layer.k)
    for name, heads in ways.items():
        for h, score in heads:
            for t in range(STEPS):
                n = layer.before + t + 1
                query = layer.q[h * group : (h + 1) * group, n - 1]
                exact = layer.scale * query @ layer.k[h, :n].T
                dense = exact.softmax(-1) @ layer.v[h, :n]
                guess, known = score(query)
                near = max((n - 1) // BLOCK - 3, 1) * BLOCK
                step = Step(exact, guess[:, :n], layer.v[h, :n], near)
                for k in ks:
                    out, read = run(step, known or of_sample(step), k, known is not None)
                    error = (out - dense).norm(dim=-1) / dense.norm(dim=-1)
                    mass = (exact.softmax(-1) * read).sum(-1)
                    found.setdefault((name, k), []).append(torch.stack((error, mass)))


def prompts(tokenizer, tokens, names):
    for name in names:
        kind, _, seed = name.partition(":")
        if kind == "needle":
            place = (0.3, 0.6, 0.15, 0.8, 0.45)[int(seed) % 5]
            prompt = needle_prompt(tokenizer, tokens, place, int(seed), "prose")
            ids = prompt.ids[0].tolist()
        else:
            text = texts.KINDS[kind]()
            letters = texts.LETTERS
            try:
                texts.LETTERS = 40 * tokens
                text = texts.KINDS[kind]()[-6 * tokens :]
            finally:
                texts.LETTERS = letters
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            ids = [*tokenizer("").input_ids, *ids[-tokens:]]
        yield name, ids


def main():
    parser = argparse.ArgumentParser(description="What sketch loses by a model's basis.")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", default="needle:1,needle:3,plays")
    parser.add_argument("--layers", default="")
    parser.add_argument("--k", default="256")
    parser.add_argument("-o", "--out", default="")
    options = parser.parse_args()
    model, tokenizer = load(options.model, device="cpu")
    asked = options.prompts.split(",")
    kinds = {kind: measure(model, [ids]) for kind, ids in texts.windows(tokenizer)}
    inv_freq, some = next(iter(kinds.values()))
    layers = [int(x) for x in options.layers.split(",") if x] or list(some)
    ks, rows = [int(k) for k in options.k.split(",")], []
    for name, ids in prompts(tokenizer, options.tokens, asked):
        began, found = time.monotonic(), {}
        calls = capture_layers(model, torch.tensor([ids]), layers)
        for number, call in calls.items():
            layer = Layer(call, inv_freq)
            size = size_for(layer.k.shape[2])
            ways: dict = {f"own {each} bytes": layer.own(each) for each in sorted({24, size})}
            for way, left_out in (("model", ()), ("others", LIKE[name.partition(":")[0]])):
                own = [x[1][number] for kind, x in kinds.items() if kind not in left_out]
                mixed = Moments(*(sum(x) / len(own) for x in zip(*own, strict=True)))
                basis = fit_model_basis(mixed, inv_freq)
                ways[f"{way} {size} bytes"] = layer.model(basis, size)
            compared(layer, ways, ks, found)
        for (way, k), parts in found.items():
            error, mass = torch.cat(parts, 1)
            rows.append(
                {
                    "model": options.model,
                    "prompt": name,
                    "n": len(ids),
                    "layers": len(layers),
                    "basis": way,
                    "k": k,
                    "error": round(error.mean().item(), 5),
                    "p95": round(error.quantile(0.95).item(), 5),
                    "mass": round(mass.mean().item(), 5),
                }
            )
            print(rows[-1], flush=True)
        print(name, f"{time.monotonic() - began:.0f} s", flush=True)
    if options.out:
        with open(options.out, "w") as file:
            file.write(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
