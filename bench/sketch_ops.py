"""The kernels of `sketch` on one GPU: right against their references, and how long each takes.

    python bench/sketch_ops.py --out rows.jsonl [--seconds 230]

Checks every op of the chain on a few odd shapes against its CPU reference, then times the whole
chain, and each kernel of it under several plans, beside `dense_decode` over the same cache: CUDA
graphs of calls on caches that rotate past the L2. A variant that fails is a row with its error; the
script goes on, prints a short table last, and exits with 1.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from attnplug.ops import dense_decode
from attnplug.ops.sketch import attend_picks as attend
from attnplug.ops.sketch import encode_keys as encode
from attnplug.ops.sketch import merge_sketch as merge
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_query as prepare
from attnplug.ops.sketch import scan_sketch as scan
from attnplug.ops.sketch import sketch_decode as decode
from attnplug.ops.sketch.kernels import scan as scan_kernels
from attnplug.ops.sketch.state import empty_codes, fit_basis

HEADS, KV_HEADS, WIDTH, TOP_K = 28, 4, 128, 2048
SHAPES = [(1, 1 << 17), (1, 1 << 20), (1, 1 << 15), (1, 1 << 13), (1, 1 << 19), (8, 1 << 17)]
SHAPES += [(8, 1 << 20)]
TUNED = [(1, 1 << 17), (1, 1 << 20)]  # whose kernels are timed under all plans
ROTATE = 256 << 20  # bytes of caches that a graph goes through
# dtype, head dimension, group, bytes, tokens, padded, masked, softcap
CHECKS = [
    (torch.bfloat16, 128, 7, 24, 2501, True, False, 0.0),
    (torch.float16, 64, 1, 24, 1500, False, False, 0.0),
    (torch.float32, 128, 4, 32, 1999, True, True, 0.0),
    (torch.float16, 256, 3, 32, 1777, False, False, 20.0),
    (torch.bfloat16, 96, 8, 24, 2048, True, True, 5.0),
    (torch.float32, 80, 16, 16, 1203, True, False, 0.0),
    (torch.float32, 256, 4, 24, 1300, False, False, 0.0),
]
FAILURES = (
    TritonError,
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    KeyError,
    IndexError,
)


class Rows:
    """Rows as they come, in a file and for the table."""

    def __init__(self, path: Path, seconds: float):
        self.file = path.open("w")
        self.end = time.monotonic() + seconds
        self.table: list[str] = []
        self.failed = 0

    def add(self, **row: Any) -> None:
        print(json.dumps(row), file=self.file, flush=True)
        text = f"{row['p50_us']:9.2f} us" if "p50_us" in row else row.get("result", "")
        self.table.append(f"{row['what']:10} {row['case']:28} {row['variant']:34} {text}")
        print(self.table[-1], flush=True)

    def attempt(self, what: str, case: str, variant: str, run: Callable[..., Any], *args: Any):
        """The row of `run(*args)`, or of the error that it ends in."""
        if time.monotonic() > self.end:
            self.add(what=what, case=case, variant=variant, result="skipped: out of time")
            return None
        try:
            row = run(*args)
            torch.cuda.synchronize()
        except FAILURES as error:
            self.failed += 1
            text = f"{type(error).__name__}: {error}"
            self.add(what=what, case=case, variant=variant, result="FAILED " + text[:300])
            return None
        self.add(what=what, case=case, variant=variant, **row)
        return row


# --- checks ----------------------------------------------------------------------------------


def near(label: str, found: torch.Tensor, wanted: torch.Tensor, allowed: float) -> str:
    """Raise AssertionError unless all elements agree; NaN and infinities must be the same."""
    found, wanted = found.double().cpu(), wanted.double()
    odd = ~wanted.isfinite()
    same = torch.equal(found[odd].nan_to_num(7.0), wanted[odd].nan_to_num(7.0))
    error = (found - wanted)[~odd].abs().max().item() if bool((~odd).any()) else 0.0
    assert same and error <= allowed, f"{label}: error {error:.3g} > {allowed:.3g}, odd {same}"
    return f"{label} {error:.1e}"


def inputs(dtype, width, group, tokens, padded, masked, seed=0, batch=2, kv_heads=2):
    """q, k, v, lengths, start and key mask of a small case, on the CPU."""
    random = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, kv_heads, tokens, width, generator=random)
    k[..., 3] *= 6
    q = torch.randn(batch, kv_heads * group, 32, width, generator=random)
    lengths = torch.tensor([tokens, tokens - 301])
    start = torch.tensor([3, 131]) if padded else None
    mask = torch.rand(batch, tokens, generator=random) < 0.9 if masked else None
    return q.to(dtype), k.to(dtype), v.to(dtype), lengths, start, mask


def check(dtype, width, group, size, tokens, padded, masked, cap) -> dict[str, Any]:
    """Each op on the GPU against the CPU's, on the CPU's inputs of that op."""
    queries, k, v, lengths, start, mask = inputs(dtype, width, group, tokens, padded, masked)
    rows = {"lengths": lengths, "start": start}
    basis = fit_basis(k, v, queries, size=size, **rows, key_mask=mask)
    q, scale, top_k = queries[:, :, -1:], width**-0.5, 200
    found, room = [], 0.03 if dtype != torch.float32 else 1e-4

    def there(x: Any) -> Any:
        return x.cuda() if isinstance(x, torch.Tensor) else x

    def both(op: Callable[..., Any], *args: Any, **options: Any):
        moved = {name: there(x) for name, x in options.items()}
        return op(*args, **options), op(*map(there, args), **moved)

    codes, codes_there = empty_codes(k, size), empty_codes(k.cuda(), size)
    encode.encode_keys(k, v, basis.encoder, *codes, **rows, key_mask=mask)
    moved = {name: there(x) for name, x in rows.items()}
    encode.encode_keys(
        k.cuda(), v.cuda(), basis.encoder.cuda(), *codes_there, **moved, key_mask=there(mask)
    )
    apart = sum(int((a != b.cpu()).sum()) for a, b in zip(codes[:2], codes_there[:2], strict=True))
    assert apart <= 1e-3 * codes.fine.numel(), f"encode: {apart} bytes differ"
    assert all(torch.equal(a, b.cpu()) for a, b in zip(codes[2:], codes_there[2:], strict=True))
    found.append(f"bytes {apart}")
    options = {"scale": scale, "softcap": cap, **rows, "key_mask": mask}
    fixed, fixed_there = both(prepare.prepare_query, q, k, v, basis.queries, **options)
    found.append(near("projected", fixed_there[0], fixed[0], 1e-3))
    found.append(near("fixed_lse", fixed_there[2], fixed[2], room))
    asked = {"top_k": top_k, "parts": 3, **rows, "key_mask": mask, "softcap": cap}
    scanned, scanned_there = both(scan.scan_sketch, fixed[0], fixed[2], *codes, **asked)
    shares, counts, total, sums, norm, middle = scanned
    written = torch.zeros_like(shares, dtype=torch.bool)  # what is no candidate may hold anything
    for b, length in enumerate(lengths.tolist()):
        low = 0 if start is None else int(start[b])
        written[b, :, low + 128 : low + 128 * encode.near_block(length, low)] = True
    found.append(near("shares", scanned_there[0].cpu()[written], shares[written], 0.02))
    found.append(
        near("sums", scanned_there[3] / (1 + sums.abs().cuda()), sums / (1 + sums.abs()), 2e-3)
    )
    found.append(near("norm", scanned_there[4], norm, 1e-3))
    assert torch.equal(scanned_there[1][..., 0].cpu(), counts[..., 0]), "visible tokens differ"
    picked, picked_there = both(
        pick.pick_tokens, shares, counts, total, middle, top_k=top_k, **rows
    )
    assert torch.equal(picked_there[0].cpu(), picked[0]), "picks differ"
    found.append(near("cut", picked_there[1], picked[1], 1e-3))
    own, own_there = both(
        attend.attend_picks,
        q,
        k,
        v,
        fixed[0],
        *codes[:2],
        *picked,
        norm,
        scale=scale,
        pieces=2,
        softcap=cap,
    )
    found.append(near("pick_lse", own_there[1], own[1], room))
    found.append(
        near(
            "pick_sums",
            own_there[2] / (1 + own[2].abs().cuda()),
            own[2] / (1 + own[2].abs()),
            max(room, 2e-3),
        )
    )
    for tail in merge.TAILS:
        merged, merged_there = both(
            merge.merge_sketch,
            q,
            *fixed,
            *own,
            sums,
            norm,
            picked[1],
            basis.v_mean,
            tail=tail,
            softcap=cap,
        )
        found.append(near(f"out {tail}", merged_there[0], merged[0].double(), room))
    chain = (q, k, v, *basis)
    out, lse = decode.sketch_decode(*chain, *codes, **options, top_k=top_k)
    for name in ("cold", "warm"):  # codes made in the step, and there before
        own_codes = empty_codes(k.cuda(), size) if name == "cold" else codes_there
        out_there, lse_there = decode.sketch_decode(
            *map(there, chain),
            *own_codes,
            **{n: there(x) for n, x in options.items()},
            top_k=top_k,
        )
        apart = float((out_there.cpu().double() - out.double()).norm() / out.double().norm())
        assert apart < 0.05, f"chain, {name}: {apart:.3g} apart"
        found.append(near(f"lse {name}", lse_there, lse.double(), 0.05))
        assert torch.equal(own_codes[3].cpu(), codes[3]), f"progress, {name}"
    return {"result": "ok: " + ", ".join(found)}


# --- times -----------------------------------------------------------------------------------


def microseconds(calls: list[Callable[[], Any]]) -> dict[str, float]:
    """p20, p50 and p80 of one call, of graphs that make all calls at least 16 times in all."""
    repeats = -(-16 // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    cuts = statistics.quantiles(times[2:], n=10, method="inclusive")
    return {"p20_us": cuts[1], "p50_us": cuts[4], "p80_us": cuts[7]}


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
        self.lengths = torch.full((1,), tokens, device="cuda")
        part = slice(0, 32768)
        self.basis = fit_basis(self.k[:, :, part], self.v[:, :, part], asked)
        self.codes = empty_codes(self.k, 24)
        encode.encode_keys(self.k, self.v, self.basis.encoder, *self.codes, lengths=self.lengths)
        self.step: dict[str, Any] = {}

    def args(self) -> tuple[Any, ...]:
        return (
            self.q,
            self.k,
            self.v,
            *self.basis,
            *self.codes,
            WIDTH**-0.5,
            TOP_K,
            "regression",
            self.lengths,
            None,
            None,
            0.0,
            None,
        )

    def chain(self, plan: decode.Plan | None = None) -> Callable[[], Any]:
        outputs = decode._allocate(*self.args())
        return lambda: decode.launch_sketch_decode(*self.args(), *outputs, plan=plan)

    def kernels(self, plan: decode.Plan) -> dict[str, Callable[[], Any]]:
        """One call of each kernel of the chain."""
        rows, q, k, v = (self.lengths, None), self.q, self.k, self.v
        asked = (q, k, v, self.basis.queries, WIDTH**-0.5, *rows, None, 0.0)
        projected, *fixed = prepare._allocate(*asked)
        asked_scan = (projected, fixed[1], *self.codes, TOP_K, plan.parts, *rows, None, 0.0)
        scanned = scan._allocate(*asked_scan)
        shares, counts, total, sums, norm, middle = scanned
        asked_picks = (shares, counts, total, middle, TOP_K, *rows)
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
        return {
            "prepare": lambda: prepare.launch_prepare_query(
                *asked, projected, *fixed, total=total, encoder=self.basis.encoder, codes=self.codes
            ),
            "scan": lambda: scan.launch_scan_sketch(
                *asked_scan, *scanned, plan=plan.scan, chained=True
            ),
            "pick": lambda: pick.launch_pick_tokens(*asked_picks, *picks),
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


def time_shape(rows: Rows, batch: int, tokens: int) -> None:
    """Dense, the chain, and for the tuned shapes each kernel under several plans."""
    case = f"batch={batch} n={tokens}"
    one = 4 * batch * KV_HEADS * tokens * WIDTH
    layers = [Layer(batch, tokens, seed) for seed in range(max(1, min(8, ROTATE // one)))]
    dense = [
        lambda x=x: dense_decode(x.q, x.k, x.v, scale=WIDTH**-0.5, lengths=x.lengths)
        for x in layers
    ]
    base = decode.plan_for(batch * KV_HEADS, tokens, TOP_K, WIDTH, 2, 132)
    rows.attempt("dense", case, "", microseconds, dense)
    rows.attempt("chain", case, named(base), whole, layers, base)
    if (batch, tokens) not in TUNED:
        return
    for kernel in ("prepare", "scan", "pick", "attend", "merge"):
        rows.attempt(kernel, case, named(base), alone, layers, base, kernel)
    for many, tile, warps, stages, old in SCANS:
        parts = max(1, min(int(many * 132) // (batch * KV_HEADS), tokens // 256))
        plan = base._replace(parts=parts, scan=scan.Plan(tile, warps, stages))
        variant = named(plan) + (" mma.sync" if old else "")
        rows.attempt("scan", case, variant, with_mma, old, layers, plan)
    for kernel, plan in [
        *(("pick", base._replace(parts=parts)) for parts in (16, 33, 132)),
        *(
            ("attend", base._replace(pieces=pieces, attend_warps=warps))
            for pieces, warps in ((36, 8), (18, 4), (18, 8), (12, 4))
        ),
        *(
            ("merge", base._replace(columns=columns, pieces=pieces))
            for columns, pieces in ((64, 36), (128, 36), (32, 12))
        ),
    ]:
        rows.attempt(kernel, case, named(plan), alone, layers, plan, kernel)
    for many, pieces in itertools.product((1, 2, 4), (18, 36)):
        plan = base._replace(parts=int(many * 132) // (batch * KV_HEADS), pieces=pieces)
        rows.attempt("chain", case, named(plan), whole, layers, plan)


def shape_row(rows: Rows, batch: int, tokens: int) -> dict[str, str]:
    time_shape(rows, batch, tokens)
    return {"result": "done"}


# Programs a multiprocessor, tile, warps, stages, and whether to keep from Hopper's own product.
SCANS = [
    *(
        (2, tile, warps, stages, False)
        for tile, warps in ((128, 4), (256, 4), (256, 8))
        for stages in (2, 3, 5)
    ),
    *((many, 256, 4, 3, False) for many in (1, 3, 4)),
    (4, 128, 4, 4, False),
    (8, 128, 4, 3, False),
    (8, 128, 2, 3, False),
    (4, 256, 2, 3, False),
    (2, 256, 4, 3, True),
    (4, 128, 4, 3, True),
    (2, 256, 8, 3, True),
    (4, 128, 2, 3, True),
]


def alone(layers: list[Layer], plan: decode.Plan, kernel: str) -> dict[str, float]:
    """The time of one kernel; those before it in the chain have run once."""
    calls = []
    for layer in layers:
        made = layer.kernels(plan)
        for call in made.values():
            call()
        calls.append(made[kernel])
    torch.cuda.synchronize()
    return microseconds(calls)


def whole(layers: list[Layer], plan: decode.Plan) -> dict[str, float]:
    """The time of the chain."""
    return microseconds([layer.chain(plan) for layer in layers])


def with_mma(old: bool, layers: list[Layer], plan: decode.Plan) -> dict[str, float]:
    """The time of the scan, compiled to mma.sync if `old`."""
    if not old:
        return alone(layers, plan, "scan")
    os.environ["DISABLE_MMA_V3"] = "1"
    scan_kernels.scan.device_caches.clear()
    try:
        return alone(layers, plan, "scan")
    finally:
        del os.environ["DISABLE_MMA_V3"]
        scan_kernels.scan.device_caches.clear()


def named(plan: decode.Plan) -> str:
    return (
        f"parts={plan.parts} scan={plan.scan.tile}/{plan.scan.warps}w/{plan.scan.stages}s "
        f"pieces={plan.pieces}/{plan.attend_warps}w c={plan.columns}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=230)
    args = parser.parse_args()
    rows = Rows(args.out, args.seconds)
    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    # The usual case first, and the rest in the order of what is lost least if time runs out.
    for case in CHECKS[:1]:
        rows.attempt("check", label(case), "", check, *case)
    for shape in SHAPES[:2]:
        rows.attempt("shape", f"batch={shape[0]} n={shape[1]}", "", shape_row, rows, *shape)
    for case in CHECKS[1:]:
        rows.attempt("check", label(case), "", check, *case)
    for shape in SHAPES[2:]:
        rows.attempt("shape", f"batch={shape[0]} n={shape[1]}", "", shape_row, rows, *shape)
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
