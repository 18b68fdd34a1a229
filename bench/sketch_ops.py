"""The kernels of `sketch` on one GPU: right against their references, and how long each takes.

    python bench/sketch_ops.py --out rows.jsonl [--part basis|steps|checks|kernels] [--seconds 150]

Checks every op of the chain on a few odd shapes against its CPU reference, then times the whole
chain, and each kernel of it under a few plans, beside `dense_decode` over the same cache: CUDA
graphs of calls on caches that rotate past the L2. Each call of the chain has a query of its own,
which correlates by 0.9 with the one before on that cache, and the hint that one left. A variant
that fails is a row with its error; the script goes on, prints a short table last, and exits with 1.
`--part basis` times what a prompt's basis and codes cost a model of 28 layers.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _op_rows import Rows, dense_steps, microseconds, near, sets_for
from _sketch_checks import CHECKS, PLANS, check, compare_counts

from attnplug.ops.sketch import attend_picks as attend
from attnplug.ops.sketch import encode_keys as encode
from attnplug.ops.sketch import merge_sketch as merge
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_query as prepare
from attnplug.ops.sketch import scan_sketch as scan
from attnplug.ops.sketch import sketch_decode as decode
from attnplug.ops.sketch.basis import Fit, fit_bases, fit_basis
from attnplug.ops.sketch.state import empty_codes

HEADS, KV_HEADS, WIDTH, TOP_K = 28, 4, 128, 2048
SHAPES = [(1, 1 << 15), (1, 1 << 17), (1, 1 << 20), (8, 1 << 17), (8, 1 << 20), (1, 1 << 19)]
TUNED = SHAPES[:4]  # whose kernels are timed under a few plans
PICKS = [(2048, 4, 64), (2048, 8, 64), (4096, 8, 64), (1024, 4, 64)]  # tile, warps, registers
LARGE = [(1 << 17, 32, 2048), (150001, 13, 1024), (1 << 20, 66, 2048)]  # tokens, pieces, tile
DRIFT = 0.9  # correlation of a query with the one before


# --- times -----------------------------------------------------------------------------------


class Layer:
    """A cache full of tokens, its codes, and what each kernel of a step makes of them."""

    def __init__(self, batch: int, tokens: int, seed: int):
        random = torch.Generator("cuda").manual_seed(seed)
        shape = (2, batch, KV_HEADS, tokens, WIDTH)
        self.k, self.v = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(
            generator=random
        )
        asked = torch.randn(batch, HEADS, 64, WIDTH, device="cuda", generator=random)
        asked = asked.to(torch.bfloat16)
        self.q = asked[:, :, -1:].contiguous()
        self.hint = torch.full((batch, KV_HEADS), -torch.inf, device="cuda")
        self.random = random
        self.lengths = torch.full((1,), tokens, device="cuda")
        part = slice(0, 32768)
        self.basis = fit_basis(self.k[:, :, part], self.v[:, :, part], asked)
        self.codes = empty_codes(self.k, 24)
        encode.encode_keys(self.k, self.v, self.basis.encoder, *self.codes, lengths=self.lengths)
        self.step: dict[str, Any] = {}

    def chain(self, plan: decode.Plan, steps: int, hinted: bool) -> list[Callable[[], Any]]:
        """Steps of drifting queries, each with the hint that the one before has left."""
        none = dict.fromkeys(decode.Call._fields)
        own = {"k": self.k, "v": self.v, **self.basis._asdict(), **self.codes._asdict()}
        own |= {"scale": WIDTH**-0.5, "top_k": TOP_K, "tail": "regression", "softcap": 0.0}
        own |= {"lengths": self.lengths, "hint": self.hint if hinted else None}
        calls, drifting = [], [self.q.float()]
        for _ in range(steps // 2):
            noise = torch.randn(self.q.shape, device="cuda", generator=self.random)
            drifting.append(DRIFT * drifting[-1] + (1 - DRIFT**2) ** 0.5 * noise)
        drifting += drifting[-2:0:-1]  # back again: a graph that is replayed goes on from the first
        for q in drifting[:steps]:
            call = decode.Call(**(none | own | {"q": q.to(torch.bfloat16)}))
            outputs = decode._allocate(*call)
            calls.append(functools.partial(decode.launch_sketch_decode, *call, *outputs, plan=plan))
        return calls

    def kernels(self, plan: decode.Plan, more: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        """One call of each kernel of the chain, the scan and the picks with the hint that a first
        step leaves; `more` are options of launchers, by kernel."""
        self.chain(plan, 1, True)[0]()
        rows, q, k, v = (self.lengths, None), self.q, self.k, self.v
        asked = (q, k, v, self.basis.queries, WIDTH**-0.5, *rows, None, 0.0)
        projected, *fixed = prepare._allocate(*asked)
        asked_scan = (projected, fixed[1], *self.codes, TOP_K, plan.parts, *rows, None, 0.0)
        scanned = scan._allocate(*asked_scan)
        shares, total, sums, norm, middle = scanned
        asked_picks = (shares, total, middle, TOP_K, *rows)
        pick_plan = plan.pick._replace(**more.get("pick", {}))
        notes = pick.Notes.empty(shares, pick_plan)
        picks = pick._allocate(*asked_picks)
        asked_attend = (
            q,
            k,
            v,
            projected,
            *self.codes[:2],
            *picks,
            norm,
            WIDTH**-0.5,
            plan.pieces,
            0.0,
        )
        own = attend._allocate(*asked_attend)
        merged = (q.new_empty(q.shape), norm[..., None].clone())

        def ready():
            prepare.launch_prepare_query(
                *asked,
                projected,
                *fixed,
                total=total,
                marks=notes.marks,
                encoder=self.basis.encoder,
                codes=self.codes,
                **more.get("prepare", {}),
            )

        def scan_tokens():
            scan.launch_scan_sketch(
                *asked_scan,
                *scanned,
                plan=plan.scan,
                fewest=plan.fewest,
                chained=True,
                hint=self.hint,
                counted=notes.counted,
            )

        def pick_from_shares():
            pick.launch_pick_tokens(*asked_picks, *picks, pick_plan, notes, hint=self.hint)

        return {
            "prepare": ready,
            "scan": scan_tokens,
            "pick": pick_from_shares,
            "attend": lambda: attend.launch_attend_picks(
                *asked_attend, *own, warps=plan.attend_warps
            ),
            "merge": lambda: merge.launch_merge_sketch(
                q,
                projected,
                *fixed,
                *own,
                sums,
                norm,
                picks[1],
                self.basis.v_mean,
                "regression",
                0.0,
                None,
                *merged,
                columns=plan.columns,
            ),
        }


def check_large(tokens, pieces, tile) -> dict[str, Any]:
    """Picks of many tokens against the reference, of shares that the scan made on the GPU: of all
    tokens, and of those that the scan has counted, with good and with bad hints."""
    pick_plan = pick.Plan(pieces, tile=tile)
    layer = Layer(1, tokens, 0)
    plan = decode.plan_for(KV_HEADS, tokens, TOP_K, WIDTH, 2, 132)
    asked = (layer.q, layer.k, layer.v, layer.basis.queries, WIDTH**-0.5, layer.lengths, None)
    projected, *fixed = prepare._prepare_query(*asked, None, 0.0)
    asked = (projected, fixed[1], *layer.codes, TOP_K, plan.parts, layer.lengths, None, None, 0.0)
    made = []
    for scan_plan in PLANS.values():
        made.append(scan._allocate(*asked))
        scan.launch_scan_sketch(*asked, *made[-1], plan=scan_plan)
    until = 128 * encode.near_block(tokens, 0)
    shares, total, sums, _, middle = made[0]
    plain = made[1]
    scale = 1 + plain[2].sum(2).abs()
    found = [
        near("shares", shares[..., 128:until], plain[0][..., 128:until].cpu(), 0.02),
        near("sums", sums.sum(2) / scale, plain[2].sum(2).cpu() / scale.cpu(), 2e-3),
    ]
    rows = {"lengths": layer.lengths.cpu(), "start": None}
    own = [x.cpu() for x in (shares, total, middle)]
    compare_counts(*own, rows, TOP_K)
    rescan = (projected, fixed[1], *layer.codes, TOP_K, plan.parts, layer.lengths, None, None, 0.0)
    asked = (shares, total, middle, TOP_K, layer.lengths, None)
    wanted = pick._pick_tokens(*own, TOP_K, rows["lengths"], None)
    for _ in range(20):
        picked = pick._allocate(*asked)
        pick.launch_pick_tokens(*asked, *picked, plan=pick_plan)
        assert torch.equal(picked[0].cpu(), wanted[0]), f"picks differ, tile {tile}"
        assert torch.equal(picked[1].cpu(), wanted[1]), f"cut differs, tile {tile}"
    true = wanted[1][..., 2]
    for guess in (true, true + 9, true - 9, true + torch.inf, true * torch.nan, true + 80):
        hint = guess.cuda()
        again = scan._allocate(*rescan)
        notes = pick.Notes.empty(again[0], pick_plan)
        notes.marks.zero_()
        scan.launch_scan_sketch(*rescan, *again, hint=hint, counted=notes.counted)
        shares, total, _, _, middle = again
        asked = (shares, total, middle, TOP_K, layer.lengths, None)
        picked = pick._allocate(*asked)
        pick.launch_pick_tokens(*asked, *picked, pick_plan, notes, hint=hint)
        picks, cut = (x.cpu() for x in picked)  # the next hint may differ
        same = torch.equal(picks, wanted[0]) and torch.equal(cut[..., :2], wanted[1][..., :2])
        assert same, f"picks differ by the hint {guess.flatten()[0]}, tile {tile}"
    return {"result": "ok: " + ", ".join(found)}


def caches(batch: int, tokens: int) -> list[Layer]:
    one = 4 * batch * KV_HEADS * tokens * WIDTH
    read = batch * KV_HEADS * (24 * tokens + 4 * WIDTH * (TOP_K + 640))
    return [Layer(batch, tokens, seed) for seed in range(sets_for(read, one))]


def plan_of(batch: int, tokens: int) -> decode.Plan:
    return decode.plan_for(batch * KV_HEADS, tokens, TOP_K, WIDTH, 2, 132)


def time_chain(rows: Rows, batch: int, tokens: int) -> dict[str, str]:
    """The chain, and dense."""
    case = f"batch={batch} n={tokens}"
    layers, base = caches(batch, tokens), plan_of(batch, tokens)
    dense = dense_steps(layers)
    for evict in ("", "evict_first"):
        plan = base._replace(scan=base.scan._replace(evict=evict))
        rows.attempt("chain", case, named(plan), whole, layers, plan)
    rows.attempt("dense", case, "", microseconds, dense)
    return {"result": "done"}


def time_kernels(rows: Rows, batch: int, tokens: int) -> dict[str, str]:
    """Each kernel of the chain, the slow ones under a few plans."""
    case, pairs = f"batch={batch} n={tokens}", batch * KV_HEADS
    layers, base = caches(batch, tokens), plan_of(batch, tokens)
    for kernel in ("prepare", "scan", "pick", "attend", "merge"):
        rows.attempt(kernel, case, named(base), alone, layers, base, kernel)
    for many in (1, 2, 3, 4):
        parts = max(1, min(many * 132 // pairs, tokens // 512))
        if parts != base.parts:
            plan = base._replace(parts=parts, fewest=scan.ALL_PARTS)
            rows.attempt("chain", case, named(plan), whole, layers, plan)
    for tile, warps, registers in PICKS:
        more = {"pick": {"tile": tile, "warps": warps, "registers": registers}}
        variant = f"tile={tile}/{warps}w/{registers}r"
        rows.attempt("pick", case, variant, alone, layers, base, "pick", more)
    for pieces, warps in ((9, 4), (12, 4), (18, 4), (36, 4), (18, 8)):
        plan = base._replace(pieces=pieces, attend_warps=warps)
        rows.attempt("attend", case, named(plan), alone, layers, plan, "attend")
    for registers in (96, 128):
        more = {"prepare": {"registers": registers}}
        variant = f"registers={registers}"
        rows.attempt("prepare", case, variant, alone, layers, base, "prepare", more)
    rows.attempt("chain", case, "no hint", whole, layers, base, False)
    rows.attempt("chain", case, "hint too high", whole, layers, base, True, 250.0)
    return {"result": "done"}


def time_basis(batch: int, tokens: int) -> dict[str, Any]:
    """Bases and codes of 28 layers, from nothing: how long the host takes to ask for them (which is
    less where it does not wait), and how long it is until they are there. The medians of five."""
    shape, layers = (batch, KV_HEADS, tokens, WIDTH), 28
    fits, codes = [], []
    for _ in range(layers):
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(batch, HEADS, 520, WIDTH, device="cuda", dtype=torch.bfloat16)
        fits.append(Fit(k, v, q, torch.tensor([tokens], device="cuda")))
        codes.append(empty_codes(k, 24))
    asked, whole_times = [], []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for of, basis, code in zip(fits, fit_bases(fits), codes, strict=True):
            code.progress.zero_()
            encode.encode_keys(of.keys, of.values, basis.encoder, *code, lengths=of.lengths)
        asked.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole_times.append(time.perf_counter() - begin)
    host, there = (1e3 * statistics.median(x[1:]) for x in (asked, whole_times))
    first = 1e3 * whole_times[0]
    return {
        "host_ms": host,
        "ms": there,
        "first_ms": first,
        "result": f"host {host:.1f} ms, there after {there:.1f} ms, at first {first:.0f} ms",
    }


def alone(
    layers: list[Layer], plan: decode.Plan, kernel: str, more: dict[str, Any] | None = None
) -> dict[str, float]:
    """The time of one kernel; those of the chain have run once, in their order."""
    calls = []
    for layer in layers:
        made = layer.kernels(plan, more or {})
        for call in made.values():
            call()
        calls.append(made[kernel])
    torch.cuda.synchronize()
    return microseconds(calls)


def whole(
    layers: list[Layer], plan: decode.Plan, hinted: bool = True, wrong: float | None = None
) -> dict[str, float]:
    """The time of the chain: the caches in turn, each with its own drifting queries. With a `wrong`
    hint, also of the kernel that writes it before each step."""
    steps = -(-16 // len(layers))
    chains = [layer.chain(plan, steps, hinted) for layer in layers]
    if wrong is not None:
        for layer, chain in zip(layers, chains, strict=True):
            chain[:] = [functools.partial(misled, layer, wrong, call) for call in chain]
    return microseconds([call for calls in zip(*chains, strict=True) for call in calls])


def misled(layer: Layer, hint: float, call: Callable[[], Any]) -> None:
    layer.hint.fill_(hint)
    call()


def named(plan: decode.Plan) -> str:
    kind = "hopper" if plan.scan.hopper else "plain"
    pieces = f"pieces={plan.pieces}/{plan.attend_warps}w"
    more = f" {plan.scan.evict}".rstrip()
    return f"parts={plan.parts} {kind} {pieces} c={plan.columns}{more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parts = ("all", "basis", "steps", "checks", "kernels")
    parser.add_argument("--part", choices=parts, default="all")
    args = parser.parse_args()
    rows = Rows(args.out, args.seconds)
    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if args.part in ("basis", "all"):
        for shape in ((1, 100_000), (1, 1 << 17), (8, 1 << 14)):
            rows.attempt("basis", f"batch={shape[0]} n={shape[1]}", "", time_basis, *shape)
    # The steps first: a check takes long, because the CPU computes it too.
    if args.part in ("steps", "all"):
        for shape in SHAPES:
            rows.attempt("shape", f"chains of {shape}", "", time_chain, rows, *shape)
    if args.part in ("checks", "all"):
        for tokens, pieces, tile in LARGE:
            how = f"pieces={pieces} tile={tile}"
            rows.attempt("check", f"n={tokens}", how, check_large, tokens, pieces, tile)
        for case in CHECKS:
            rows.attempt("check", label(case), "", check, *case)
    if args.part in ("kernels", "all"):
        for shape in TUNED:
            rows.attempt("shape", f"kernels of {shape}", "", time_kernels, rows, *shape)
    print(f"--- {rows.failed} failed")
    for line in sorted(rows.table):
        if not line.startswith("shape"):
            print(line[:200])
    return 1 if rows.failed else 0


def label(case: tuple[Any, ...]) -> str:
    dtype, width, group, size, tokens, padded, masked, cap = case
    flags = ("p" if padded else "") + ("m" if masked else "") + (f"c{cap:g}" if cap else "")
    return f"{str(dtype).removeprefix('torch.')} D={width} G={group} {size}B n={tokens} {flags}"


if __name__ == "__main__":
    sys.exit(main())
