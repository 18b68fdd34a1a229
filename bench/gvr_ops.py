"""Plans of gvr's step and of topk on one GPU: whether they are right, and how long each takes.

    python bench/gvr_ops.py [--seconds 115] [--part all|checks|steps|topk|kernels]

Prints a JSON line a measurement: CUDA graphs of calls on caches that rotate past the L2. A variant
that fails is a line with its error; the script goes on, and exits with 1.
"""

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _op_rows import FAILURES, dense_steps, microseconds, sets_for
from test_topk import PEERS, peer_of

scoring: Any = importlib.import_module("attnplug.ops.gvr.score_tokens")
ranking: Any = importlib.import_module("attnplug.ops.gvr.topk")
sifted: Any = importlib.import_module("attnplug.ops.gvr.kernels.topk_sifted_rows")
attending: Any = importlib.import_module("attnplug.ops.gvr.gather_tokens_attention")

HEADS, KV, WIDTH, K, SINK, WINDOW = 28, 4, 128, 2048, 16, 256
SHAPES = [(1, 1 << 17), (1, 1 << 15), (1, 1 << 16), (1, 1 << 20), (8, 1 << 17)]
NEW = {"keys_first": True, "halves": True, "whole": True}


class Variant(NamedTuple):
    """A way to make a step."""

    name: str
    score: Any = None  # a plan of score_tokens; None: the default
    topk: Any = None  # a plan of topk; None: the default


class Layer:
    """A cache full of tokens, and a query."""

    def __init__(self, batch: int, tokens: int, seed: int):
        random = torch.Generator("cuda").manual_seed(seed)
        self.k, self.v = torch.empty(
            2, batch, KV, tokens, WIDTH, dtype=torch.bfloat16, device="cuda"
        ).normal_(generator=random)
        self.q = torch.randn(batch, HEADS, 1, WIDTH, device="cuda", generator=random).bfloat16()
        self.codes = torch.empty(self.k.shape, dtype=torch.int8, device="cuda")
        self.scales = torch.empty(self.k.shape[:3], device="cuda")
        for b in range(batch):
            for h in range(KV):
                made = scoring.quantize_keys(self.k[b, h])
                self.codes[b, h], self.scales[b, h] = made
        self.lengths = torch.full((1,), tokens, device="cuda", dtype=torch.int32)

    def score(self, plan: Any = None) -> torch.Tensor:
        rows, size = len(self.q) * KV, self.k.shape[2]
        scores = torch.empty(rows, size, device="cuda")
        scoring.launch_score_tokens(
            self.q, self.codes, self.scales, SINK, WINDOW, self.lengths, None, None, scores,
            plan=plan,
        )  # fmt: skip
        return scores

    def rank(self, scores: torch.Tensor, plan: Any = None) -> tuple[torch.Tensor, ...]:
        """topk's outputs."""
        found = ranking._allocate(scores, K, None, None, False)
        ranking.launch_topk(scores, K, None, self.lengths, False, *found, plan=plan)
        return found

    def attend(self, picks: torch.Tensor) -> torch.Tensor:
        """Attention over the picks."""
        index = picks.view(len(self.q), KV, 1, K)
        out, lse = torch.empty_like(self.q), torch.empty(self.q.shape[:3], device="cuda")
        attending.launch_gather_tokens_attention(
            self.q, self.k, self.v, index, WIDTH**-0.5, SINK, WINDOW, self.lengths, None, None,
            0.0, None, out, lse,
        )  # fmt: skip
        return out

    def step(self, variant: Variant) -> torch.Tensor:
        return self.attend(self.rank(self.score(variant.score), variant.topk)[0])


# --- variants --------------------------------------------------------------------------------


def sift_plan(size: int, parts: int | None = None, chunk: int = 8, rows: int = KV) -> Any:
    return ranking.Plan(False, sift=sifted.sift_for(size, K, rows, parts, chunk))


def plans_before(batch: int, size: int) -> tuple[Any, Any]:
    """The plans of score_tokens and of topk until 2026-11-27, still those of pages and of hints."""
    score = scoring.plain_plan_for(batch * KV, size, WIDTH, 132)
    return score, ranking.verified_plan_for(batch * KV, size, K)


def score_plans(batch: int, size: int) -> Iterator[tuple[str, Any]]:
    """Plans of score_tokens, most of one wave."""
    rows = batch * KV
    base, _ = plans_before(batch, size)
    yield "before", base
    yield "before, keys first, halves, whole", base._replace(**NEW)
    for each, tile, warps, stages in (
        (2, 256, 8, 3), (3, 256, 8, 3), (4, 128, 4, 4), (6, 128, 4, 3), (8, 128, 4, 3),
        (4, 128, 4, 3), (3, 128, 4, 5), (1, 512, 8, 3), (2, 256, 4, 3),
    ):  # fmt: skip
        programs = max(1, min(-(-size // tile), each * 132 // rows))
        yield (
            f"{each} x {tile}/{warps}w/{stages}s",
            scoring.Plan(tile, programs, warps, stages, **NEW),
        )


def variants(batch: int, size: int) -> list[Variant]:
    score, topk = plans_before(batch, size)
    long = dict(score_plans(batch, size))["3 x 256/8w/3s"]
    made = [Variant("default"), Variant("before", score, topk), Variant("3 x 256", long)]
    return [*made, *(Variant(f"sift of {n}", None, sift_plan(size, n)) for n in (16, 32, 64))]


# --- lines -----------------------------------------------------------------------------------


class Lines:
    """A JSON line a measurement."""

    def __init__(self, seconds: float):
        self.begin, self.seconds, self.failed = time.monotonic(), seconds, 0

    def attempt(self, what: str, case: str, variant: str, run: Callable[..., Any], *args: Any):
        line: dict[str, Any] = {"what": what, "case": case, "variant": variant}
        if time.monotonic() - self.begin > self.seconds:
            line["result"] = "skipped: out of time"
        else:
            try:
                line |= run(*args)
                torch.cuda.synchronize()
            except FAILURES as error:
                self.failed += 1
                line["result"] = f"FAILED {type(error).__name__}: {error}"[:400]
        line = {name: round(x, 2) if isinstance(x, float) else x for name, x in line.items()}
        print(json.dumps(line | {"s": round(time.monotonic() - self.begin)}), flush=True)


def caches(batch: int, tokens: int) -> list[Layer]:
    read = batch * KV * (tokens * (WIDTH + 8) + (K + SINK + WINDOW) * 4 * WIDTH)
    held = batch * KV * tokens * (5 * WIDTH + 4)
    return [Layer(batch, tokens, seed) for seed in range(min(8, sets_for(read, held)))]


# --- checks ----------------------------------------------------------------------------------


def hold_scores(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Assert that scores are `wanted` up to a float32's rounding; by how much they differ."""
    seen = wanted.isfinite()
    assert torch.equal(seen, found.isfinite()), "other tokens may be chosen"
    error = (found - wanted)[seen].abs().max().item()
    largest = wanted[seen].abs().max().item()
    assert error < 1e-4 * largest, f"error {error:.3g}"
    return f"error {error:.1e} of {largest:.1f}"


def check_scores(plan: Any, tokens: int = 32768) -> dict[str, Any]:
    """Scores beside those of the reference, on the CPU."""
    layer = Layer(1, tokens, 7)
    found = layer.score(plan).cpu()
    keys = layer.q.cpu(), layer.codes.cpu(), layer.scales.cpu()
    wanted = scoring.score_tokens(*keys, sink=SINK, window=WINDOW)
    return {"result": hold_scores(found, wanted)}


def exact(scores: torch.Tensor, found: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Whether `found` is the set of a stable sort; and the ways that the rows went."""
    indices, values, how = found
    clean = torch.where(scores.isnan(), -torch.inf, scores)
    wanted = clean.sort(dim=1, descending=True, stable=True).indices[:, :K]
    assert torch.equal(indices.sort(1).values.long(), wanted.sort(1).values), "another set"
    assert torch.equal(values, clean.gather(1, indices.long()) + 0.0), "other values"
    paths = [ranking.PATHS[path] for path in how[:, 0].unique().tolist()]
    most = {"passes": how[:, 1].max().item(), "candidates": how[:, 2].max().item()}
    return {"result": f"exact, {'/'.join(paths)}", **most}


def kind_of(kind: str, rows: int, size: int) -> torch.Tensor:
    """Rows of scores."""
    x = torch.randn(rows, size, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    if kind == "heavy":
        return (4 * x).exp()
    if kind == "ties":
        return x.mul(4).round()
    if kind == "together":
        x[:, 1000 : 1000 + K] += 9
    if kind == "padded":
        x[:, : size - K // 2] = -torch.inf
    if kind == "odd":
        x[:, ::7], x[:, 1::50] = torch.nan, torch.inf
    return x


def check_topk(kind: str, rows: int, size: int, parts: int | None) -> dict[str, Any]:
    scores = kind_of(kind, rows, size)
    found = ranking._allocate(scores, K, None, None, False)
    ranking.launch_topk(scores, K, None, None, False, *found, plan=sift_plan(size, parts))
    again = ranking._allocate(scores, K, None, None, False)
    ranking.launch_topk(scores, K, None, None, False, *again, plan=sift_plan(size, parts))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "not the same twice"
    return exact(scores, found)


def check_step(variant: Variant, batch: int, tokens: int) -> dict[str, Any]:
    """The picks are the best of the variant's scores, which are the plan's of before."""
    layer = Layer(batch, tokens, 3)
    scores = layer.score(variant.score)
    hold_scores(scores, layer.score(plans_before(batch, tokens)[0]))
    return exact(scores, layer.rank(scores, variant.topk))


def run_checks(lines: Lines) -> None:
    for name, plan in score_plans(1, 32768):
        lines.attempt("check", "scores", name, check_scores, plan)
    for kind in ("normal", "heavy", "ties", "together", "padded", "odd"):
        lines.attempt("check", f"topk {kind}", "sift", check_topk, kind, 64, 32768, None)
    for size, parts in ((131072, None), (131072, 16), (1 << 20, None)):
        lines.attempt("check", f"topk {size}", f"{parts}", check_topk, "normal", 4, size, parts)
    for batch, tokens in ((1, 1 << 17), (8, 1 << 15), (1, 1 << 20)):
        for variant in variants(batch, tokens):
            case = f"step {batch} x {tokens}"
            lines.attempt("check", case, variant.name, check_step, variant, batch, tokens)


# --- times -----------------------------------------------------------------------------------


def timed(calls: list[Callable[[], Any]]) -> dict[str, float]:
    return microseconds(calls * -(-8 // len(calls)))


def run_steps(lines: Lines, kernels: bool) -> None:
    for batch, tokens in SHAPES:
        case, layers = f"{batch} x {tokens}", caches(batch, tokens)
        lines.attempt("step", case, "dense", timed, dense_steps(layers))
        for variant in variants(batch, tokens):
            steps = [functools.partial(layer.step, variant) for layer in layers]
            lines.attempt("step", case, variant.name, timed, steps)
        if kernels:
            run_kernels(lines, case, layers, batch, tokens)
        del layers
        torch.cuda.empty_cache()


def run_kernels(lines: Lines, case: str, layers: list[Layer], batch: int, tokens: int) -> None:
    """Each kernel of the step alone."""
    for name, plan in score_plans(batch, tokens):
        calls = [functools.partial(layer.score, plan) for layer in layers]
        lines.attempt("score", case, name, timed, calls)
    scores = [layer.score() for layer in layers]
    _, before = plans_before(batch, tokens)
    plans = {"before": before, "sift": sift_plan(tokens), "sift of 64": sift_plan(tokens, 64)}
    if tokens <= 1 << 17:
        plans["sift of 16"] = sift_plan(tokens, 16)
    for name, plan in plans.items():
        both = zip(layers, scores, strict=True)
        calls = [functools.partial(layer.rank, x, plan) for layer, x in both]
        lines.attempt("topk", case, name, timed, calls)
    picks = [layer.rank(x)[0] for layer, x in zip(layers, scores, strict=True)]
    calls = [functools.partial(layer.attend, x) for layer, x in zip(layers, picks, strict=True)]
    lines.attempt("attend", case, "default", timed, calls)


def run_topk(lines: Lines) -> None:
    """64 rows, beside the peers; scores rotate past the L2."""
    for size in (1 << 17, 1 << 15):
        case = f"64 x {size}"
        rows = [torch.randn(64, size, device="cuda") for _ in range(sets_for(64 * size * 4, 1))]
        plans = {"before": ranking.verified_plan_for(64, size, K)}
        plans |= {f"sift of {parts}": sift_plan(size, parts) for parts in (8, 16, 32, 64)}
        plans["sift of 32, chunks of 32"] = sift_plan(size, 32, 32)
        for name, plan in plans.items():
            calls = [functools.partial(topk_of, x, plan) for x in rows]
            lines.attempt("topk", case, name, timed, calls)
        for peer in PEERS:
            theirs = peer_of(peer)
            calls = [functools.partial(theirs, x, K) for x in rows]
            lines.attempt("topk", case, peer, timed, calls)


def topk_of(scores: torch.Tensor, plan: Any) -> None:
    found = ranking._allocate(scores, K, None, None, False)
    ranking.launch_topk(scores, K, None, None, False, *found, plan=plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=115)
    parts = ("all", "checks", "steps", "topk", "kernels")
    parser.add_argument("--part", choices=parts, default="all")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    lines = Lines(args.seconds)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    if args.part in ("all", "checks"):
        run_checks(lines)
    if args.part in ("all", "topk"):
        run_topk(lines)
    if args.part in ("all", "steps", "kernels"):
        run_steps(lines, args.part != "steps")
    return 1 if lines.failed else 0


if __name__ == "__main__":
    sys.exit(main())
