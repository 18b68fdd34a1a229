"""`gather` with pages of 16 on one GPU: right against its reference, and how long a step takes.

    python bench/gather_ops.py --out rows.jsonl [--part checks|steps|times] [--seconds 140]
                               [--shapes 1x131072,1x1048576]

Checks summaries, lists and steps on odd shapes against the CPU's, and that every plan lists the
same blocks. Then times one layer's step (append, selection, attention) under the paper's options
and the default, beside `dense_decode` over the same cache; and for two shapes each kernel under
several plans. Times are of CUDA graphs over caches that rotate past the L2. A variant that fails is
a row with its error; the script goes on, prints a table as it goes, and exits with 1.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _op_rows import Rows, dense_steps, inputs, microseconds, near, sets_for

from attnplug import Gather
from attnplug.ops.common.device import card
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.gather import attend_plan
from attnplug.ops.gather import block_bounds as summaries
from attnplug.ops.gather import gather_attention as attend
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import select_blocks as select

HEADS, KV_HEADS, WIDTH = 28, 4, 128
PAPER = {"block": 128, "sink": 1, "local": 4, "scoring": "bounds", "min_tokens": 0}
DEFAULT = Gather(min_tokens=0)
POLICIES = [
    DEFAULT,
    Gather(k=32, **PAPER),
    Gather(k=8, **PAPER),
]
SHAPES = [(1, 1 << 17), (1, 1 << 20), (1, 1 << 15), (1, 1 << 13), (8, 1 << 17), (8, 1 << 20)]
TUNED = SHAPES[:3] + SHAPES[4:]  # kernels under all plans
# dtype, head dimension, group, tokens, padded, masked, blocks to list
CHECKS = [
    (torch.bfloat16, 128, 7, 9501, True, False, 256),
    (torch.float16, 64, 1, 1500, False, False, 40),
    (torch.float32, 128, 4, 1999, True, True, 8),
    (torch.float16, 256, 3, 1777, False, False, 64),
    (torch.bfloat16, 96, 8, 2048, True, True, 33),
    (torch.float32, 80, 16, 1203, True, False, 40),
]


# --- checks ----------------------------------------------------------------------------------


def there(x: Any) -> Any:
    return x.cuda() if isinstance(x, torch.Tensor) else x


def apart(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many entries of lists are in one and not in the other."""
    pairs = zip(found.cpu().flatten(0, 2).tolist(), wanted.flatten(0, 2).tolist(), strict=True)
    return sum(len(set(a) ^ set(b)) for a, b in pairs)


def same_summaries(found: torch.Tensor, wanted: torch.Tensor, blocks: int) -> str:
    """Of codes one in 500 may be another, where a frame's last bits decide."""
    codes = (found != wanted)[:, :, :blocks]
    share = float(codes.double().mean())
    assert share <= 2e-3, f"{share:.2%} of the codes differ"
    frames = (summaries.frame_of(x, blocks) for x in (found, wanted))
    for name, a, b in zip(summaries.Frame._fields, *frames, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, equal_nan=True, msg=name)
    return f"codes {int(codes.sum())}"


def check(scoring, dtype, width, group, tokens, padded, masked, top_k) -> dict[str, Any]:
    """Summaries, list and step on the GPU against the CPU's."""
    queries, k, v, lengths, start, mask = inputs(dtype, width, group, tokens, padded, masked)
    q = queries[:, :, -1:].contiguous()
    rows = {"lengths": lengths, "start": start, "key_mask": mask}
    shape = {"block": 16, "sink": 2, "local": 3}
    rows_there = {name: there(x) for name, x in rows.items()}
    band, parts = scoring == "band", summaries.summary_parts(scoring, True)
    made = summaries.empty_bounds(k, 16, parts, dtype=torch.int8)
    made_there, progress = made.cuda(), torch.zeros(2, 2, dtype=torch.int32)
    progress_there = progress.cuda()
    summaries.block_bounds(k, made, progress, block=16, band=band, **rows)
    summaries.block_bounds(k.cuda(), made_there, progress_there, block=16, band=band, **rows_there)
    assert torch.equal(progress_there.cpu(), progress), "progress"
    found = [same_summaries(made_there.cpu(), made, cdiv(tokens, 16))]
    asked = {**shape, "top_k": top_k, "scoring": scoring}
    index = select.select_blocks(q, k, made, progress, **asked, **rows)
    cold = torch.zeros_like(made_there), torch.zeros_like(progress_there)
    for name, state in (("warm", (made_there, progress_there)), ("cold", cold)):
        first = select.select_blocks(q.cuda(), k.cuda(), *state, **asked, **rows_there)
        for turn in range(20):
            listed = select.select_blocks(q.cuda(), k.cuda(), *state, **asked, **rows_there)
            assert torch.equal(first, listed), f"{name} list of call {turn} differs"
        wrong = apart(listed, index)
        assert wrong <= 0.02 * index.numel(), f"{name}: {wrong} of {index.numel()} differ"
        found.append(f"{name} list {wrong}")
    token = torch.randn(2, 2, 2, 1, width, generator=torch.Generator().manual_seed(7)).to(dtype)
    before = lengths - 1
    step = (q, k, v, *token, made, progress, before)
    step_there = tuple(x.clone().cuda() for x in step)
    options = {**asked, "scale": width**-0.5, "start": start, "key_mask": mask}
    out, lse = decode.gather_decode(*step, **options)
    moved = {name: there(x) for name, x in options.items()}
    out_there, lse_there = decode.gather_decode(*step_there, **moved)
    away = float((out_there.cpu().double() - out.double()).norm() / out.double().norm())
    assert away < 0.05, f"step: {away:.3g} apart"
    found.append(f"out {away:.1e}")
    found.append(near("lse", lse_there, lse.double(), 0.05))
    assert torch.equal(step_there[1].cpu(), k), "the token's key"
    return {"result": "ok: " + ", ".join(found)}


def plans(batch: int, blocks: int) -> Iterator[select.Plan]:
    """Plans of the score kernel and the selection behind it."""
    candidates = select.candidates_of(blocks, DEFAULT.local)
    default = select.plan_for(batch * KV_HEADS, candidates, 256, WIDTH, 1, True)
    sizes = (8, 16, 32) if blocks > 16384 else (0, 4, 8, 16)
    for members, warps in itertools.product(sizes, (2, 4, 8, 16)):
        if max(blocks // max(members, 1), 256 * members) <= 2048 * warps:
            yield default._replace(members=members, select_warps=warps)
    for chunk, repeat, warps, stages in SCORE_PLANS:
        if chunk * repeat <= blocks // 8:
            yield default._replace(chunk=chunk, repeat=repeat, warps=warps, stages=stages)
    yield default._replace(registers=None)


# Two stages of 128 blocks are 66 KiB of shared memory, so that three programs fit a multiprocessor
# and not four: 512 programs at 1M are two waves, 5 or 6 turns make one of them.
SCORE_PLANS = [
    (64, 4, 4, 2),
    (64, 4, 4, 3),
    (64, 8, 4, 2),
    (64, 8, 4, 3),
    (64, 11, 4, 3),
    (64, 8, 2, 3),
    (128, 1, 4, 1),
    (128, 2, 4, 1),
    (128, 2, 4, 2),
    (128, 4, 4, 2),
    (128, 4, 4, 3),
    (128, 4, 8, 3),
    (128, 5, 4, 2),
    (128, 6, 4, 2),
    (128, 8, 4, 2),
    (128, 8, 4, 3),
    (64, 2, 4, 2),
    (64, 4, 4, 4),
    (64, 8, 4, 4),
    (64, 16, 4, 4),
    (128, 4, 4, 4),
    (128, 8, 4, 4),
    (256, 1, 4, 1),
    (256, 2, 4, 2),
    (256, 4, 4, 2),
    (256, 4, 4, 3),
    (256, 2, 8, 1),
    (256, 2, 8, 2),
    (256, 4, 8, 3),
]


def attend_plans(batch: int) -> Iterator[attend_plan.Plan]:
    """Plans of attention over 4,736 keys of four KV heads a row, in pages."""
    rows = batch * KV_HEADS
    base = attend_plan.plan_for(rows, HEADS // KV_HEADS, 4736, 16, WIDTH, 2, card(CUDA).processors)
    few = [(64, 74, 4, 1), (64, 37, 4, 1), (32, 148, 4, 1), (32, 148, 2, 1), (16, 148, 2, 2)]
    piped = [(64, 74, 4, 2), (64, 37, 4, 2), (64, 37, 4, 3), (32, 74, 4, 2)]
    many = [(64, splits, 4, stages) for splits in (8, 16, 24, 37) for stages in (1, 3)]
    many += [(32, splits, warps, 1) for splits in (37, 74, 148) for warps in (1, 2)]
    many += [(128, 37, 4, 1), (128, 37, 8, 1), (128, 19, 8, 1), (64, 74, 2, 1), (64, 74, 8, 1)]
    for tile, splits, warps, stages in few + (piped if batch == 1 else many):
        found = {"tile": tile, "splits": splits, "warps": warps, "stages": stages}
        yield base._replace(**found, ahead=False)
    for tile, splits, warps, stages in AHEAD if batch > 1 else ():
        yield base._replace(tile=tile, splits=splits, warps=warps, stages=stages, ahead=True)


# Of programs that look their blocks up before they read keys: tile, splits, warps, stages.
AHEAD = [(64, splits, 4, stages) for splits in (6, 8, 12, 16, 24) for stages in (2, 3, 4)]
AHEAD += [(64, 8, 4, 5), (64, 4, 4, 6), (32, 16, 4, 4), (32, 16, 4, 5), (32, 24, 4, 3)]
AHEAD += [(128, splits, warps, 3) for splits in (2, 4, 8) for warps in (4, 8)]


CUDA = torch.device("cuda")


# --- times -----------------------------------------------------------------------------------


class Layer:
    """A cache of so many tokens but one, in a room that is full of them unless it is told to be
    larger, its summaries for a policy, and a step's arguments."""

    def __init__(self, batch: int, tokens: int, seed: int, room: int = 0):
        random = torch.Generator("cuda").manual_seed(seed)
        made = {"dtype": torch.bfloat16, "device": "cuda", "generator": random}
        shape = (2, batch, KV_HEADS, max(tokens, room), WIDTH)
        self.k, self.v = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(
            generator=random
        )
        self.q = torch.randn(batch, HEADS, 1, WIDTH, **made)
        self.token = torch.randn(2, batch, KV_HEADS, 1, WIDTH, **made)
        self.lengths = torch.full((1,), tokens - 1, device="cuda")

    def summarise(self, policy: Gather) -> None:
        """Make the summaries of all complete blocks."""
        parts, codes, band = policy.summary_form(self.k.shape[2])
        self.bounds = summaries.empty_bounds(self.k, policy.block, parts, dtype=codes)
        self.progress = torch.zeros(len(self.k), 2, dtype=torch.int32, device="cuda")
        made = (self.k, self.bounds, self.progress)
        summaries.block_bounds(*made, block=policy.block, lengths=self.lengths, band=band)

    def args(self, policy: Gather) -> tuple[Any, ...]:
        tensors = (self.q, self.k, self.v, *self.token, self.bounds, self.progress, self.lengths)
        choice = policy.block, policy.k, policy.sink, policy.local, policy.scoring
        return *tensors, WIDTH**-0.5, *choice, None, None, 0.0, None

    def step(self, policy: Gather, plan: decode.Plan | None = None) -> Callable[[], Any]:
        """A step that does not count its token, so that each writes the same one."""
        outputs = decode._allocate(*self.args(policy))
        args = self.args(policy)
        return lambda: decode.launch_gather_decode(*args, *outputs, plan=plan, count=False)

    def scores(self, policy: Gather, plan: select.Plan) -> Callable[[], Any]:
        call = decode.Call(*self.args(policy))
        args = decode.selection(call, self.lengths)
        return lambda: select.launch_scores(*args, plan=plan, new=1)

    def choice(self, policy: Gather, plan: select.Plan) -> Callable[[], Any]:
        scores = self.scores(policy, plan)()
        rows, blocks = self.k.shape[:2], -(-self.k.shape[2] // policy.block)
        out = torch.empty((*rows, 1, policy.k), dtype=torch.int32, device="cuda")
        where = policy.block, policy.k, policy.local, self.lengths, None, blocks, out
        return lambda: (select.launch_choice(scores, self.k, self.progress, *where, new=1), out)

    def attention(self, policy: Gather, plan: attend_plan.Plan) -> Callable[[], Any]:
        made = self.choice(policy, plan_of(self, policy).select)()[1]
        call = decode.Call(*self.args(policy))
        outputs = torch.empty_like(self.q), self.q.new_empty(self.q.shape[:3], dtype=torch.float32)
        step = attend.Step(*self.token, False)
        args = (*decode.attention(call, made, self.lengths), *outputs)
        return lambda: (attend.launch_gather_attention(*args, plan=plan, step=step), outputs[0])


def sets_of(batch: int, tokens: int, room: int) -> int:
    """How many caches a graph goes through, by what a step of the default reads."""
    read = batch * KV_HEADS * (tokens // 16 * (WIDTH + 8) + 4736 * 4 * WIDTH)
    return sets_for(read, 4 * batch * KV_HEADS * room * WIDTH)


def plan_of(layer: Layer, policy: Gather) -> decode.Plan:
    """The plan that a step takes by itself."""
    return decode.plan_for(
        rows=layer.k.shape[0] * KV_HEADS,
        group=HEADS // KV_HEADS,
        candidates=select.candidates_of(-(-layer.k.shape[2] // policy.block), policy.local),
        block=policy.block,
        top_k=policy.k,
        kept=policy.sink + policy.local + policy.k,
        width=WIDTH,
        itemsize=2,
        multiprocessors=card(CUDA).processors,
        summary_size=layer.bounds.element_size(),
    )


def named(plan: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in plan._asdict().items())


def time_steps(
    layers: list[Layer], policy: Gather, plan: Any = None, between: Callable[[], Any] | None = None
) -> dict[str, float]:
    return microseconds([layer.step(policy, plan) for layer in layers], between)


def time_scores(layers: list[Layer], policy: Gather, plan: select.Plan) -> dict[str, Any]:
    """The score kernel alone, and whether the list is that of the default plan."""
    wanted = layers[0].choice(policy, plan_of(layers[0], policy).select)()[1]
    found = layers[0].choice(policy, plan)()[1]
    assert torch.equal(found, wanted), f"{apart(found, wanted.cpu())} listed blocks differ"
    return microseconds([layer.scores(policy, plan) for layer in layers])


def time_choice(layers: list[Layer], policy: Gather, plan: select.Plan) -> dict[str, Any]:
    wanted = layers[0].choice(policy, plan_of(layers[0], policy).select)()[1]
    found = layers[0].choice(policy, plan)()[1]
    assert torch.equal(found, wanted), f"{apart(found, wanted.cpu())} listed blocks differ"
    return microseconds([layer.choice(policy, plan) for layer in layers])


def time_attention(layers: list[Layer], policy: Gather, plan: attend_plan.Plan) -> dict[str, Any]:
    """Attention and merge alone, and whether the output is that of the unpipelined default."""
    usual = plan_of(layers[0], policy).attend._replace(stages=1)
    wanted = layers[0].attention(policy, usual)()[1].double().clone()
    found = layers[0].attention(policy, plan)()[1].double()
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 0.01, f"output {error:.3g} apart"
    return microseconds([layer.attention(policy, plan) for layer in layers])


def time_shape(rows: Rows, batch: int, tokens: int, kernels: list[str]) -> None:
    """Dense and the policies; for the tuned shapes the named kernels of the default under their
    plans."""
    case = f"batch={batch} n={tokens}"
    layers = [Layer(batch, tokens, seed) for seed in range(sets_of(batch, tokens, tokens))]
    dense = dense_steps(layers)
    rows.attempt("dense", case, "dense", microseconds, dense)
    for policy in POLICIES:
        for layer in layers:
            layer.summarise(policy)
        rows.attempt("step", case, str(policy), time_steps, layers, policy)
    if not kernels or (batch, tokens) not in TUNED:
        return
    for layer in layers:
        layer.summarise(DEFAULT)
    time_plans(rows, batch, tokens, layers, kernels)
    for plan in attend_plans(batch) if "attend" in kernels else ():
        rows.attempt("attend", case, named(plan), time_attention, layers, DEFAULT, plan)


def time_plans(
    rows: Rows, batch: int, tokens: int, layers: list[Layer], kernels: list[str]
) -> None:
    """The score kernel under its plans, and the list behind it, which is the same for all."""
    usual, case = plan_of(layers[0], DEFAULT).select, f"batch={batch} n={tokens}"
    for plan in plans(batch, tokens // DEFAULT.block):
        same_list = plan.members, plan.select_warps
        if "score" in kernels and same_list == (usual.members, usual.select_warps):
            rows.attempt("score", case, named(plan), time_scores, layers, DEFAULT, plan)
        same_scores = plan._replace(members=0, select_warps=0)
        if "select" in kernels and same_scores == usual._replace(members=0, select_warps=0):
            rows.attempt("select", case, named(plan), time_choice, layers, DEFAULT, plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140, help="begin nothing after so many")
    parser.add_argument("--part", choices=("checks", "steps", "times", "all"), default="all")
    parser.add_argument("--shapes", help="batch x tokens, as 1x131072,8x32768")
    parser.add_argument("--kernels", default="score,select,attend", help="which `times` goes into")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    rows = Rows(options.out, options.seconds)
    shapes = SHAPES
    if options.shapes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    checks = CHECKS if options.part in ("checks", "all") else ()
    shapes = () if options.part == "checks" else shapes
    for scoring, facts in itertools.product(("bounds", "band"), checks):
        case = " ".join(str(x).removeprefix("torch.") for x in facts)
        rows.attempt("check", case[:40], scoring, check, scoring, *facts)
    kernels = [] if options.part == "steps" else options.kernels.split(",")
    for batch, tokens in shapes:
        try:
            time_shape(rows, batch, tokens, kernels)
        except torch.OutOfMemoryError as error:
            rows.add(what="step", case=f"batch={batch} n={tokens}", variant="", result=str(error))
            rows.failed += 1
        torch.cuda.empty_cache()
    print(f"{rows.failed} failed; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return rows.failed > 0


if __name__ == "__main__":
    sys.exit(main())
