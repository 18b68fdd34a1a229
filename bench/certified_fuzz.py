"""A long search for a violated bound of certified: counts head-steps, and those whose output is
further from fp64 attention than its bound says; and layers, and those that are further from it than
the tolerance allows, by their bounds or in truth.

    python bench/certified_fuzz.py [--device cuda] [--head-steps 1000000] [--seconds 3000] [--out F]
    python bench/certified_fuzz.py --join F1 F2 .. --out F

The cases are the tests' (`tests/ops/certified/certified_cases.py`): adversaries whose keys sit at
the far ends of their quantization intervals, adversaries whose errors are all in line, as spectral
norms have it, and Gaussian caches; every dtype, several options, heads with small outputs beside
others. On a CPU they run on the numba reference, on a GPU on its kernels: on Hopper 128 channels in
16 bits are the Hopper pass. `--out` gets one JSON object, with the counts of each option and dtype.
Seeds that are equal modulo 18 have one dtype, width and group: `--part 3/18` takes those that leave
3, so that processes which share a GPU compile beside each other. `--join` adds up what they wrote.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from attnplug.bench.provenance import provenance
from attnplug.ops import CertifiedOutput, certified_attention

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/ops/certified"))
from certified_cases import Case, adversary, aligned, gaussian  # noqa: E402

HEAD, ROW = 4, 8  # of `RUNGS`
NONE = {"tolerance": None, "explore": 0.0}
SETTINGS = {
    "default": {},
    "tolerance=0.5": {"tolerance": 0.5, "explore": 0.0},
    "everything quantized": NONE,
    "some promoted": NONE | {"coverage": 0.6, "k_min": 1, "k_max": 3, "ranking": 1},
    "values": NONE | {"v_tol": 0.02, "k_min": 1},
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BATCH, HEADS = 32, 8


def case_of(seed: int) -> Case:
    """A case whose heads have outputs of several sizes."""
    case = one_size(seed)
    case.v[:, ::2] *= 10.0 ** -(seed % 5 % 3)
    return case


def one_size(seed: int) -> Case:
    """Two adversaries of four, one whose errors are in line; widths and groups change from seed to
    seed."""
    dtype, width, group = DTYPES[seed % 3], (64, 128)[seed // 3 % 2], (1, 2, 3)[seed // 6 % 3]
    kind = seed // 18 % 4
    if kind < 2:
        return adversary(seed, dtype, BATCH, HEADS, group, width=width)
    if kind == 2:
        return aligned(seed, dtype, BATCH, HEADS, group, width=width, values=seed % 2 > 0)
    case = gaussian(seed, dtype, BATCH, HEADS, group, 208, width)
    case.q *= 10 ** (seed % 5 / 2 - 1)
    case.v += seed % 2  # an output that does not vanish
    return case


def step(case: Case, tier, device: str, options: dict) -> CertifiedOutput:
    inputs = [x.to(device) for x in (case.q, case.k, case.v)]
    found = certified_attention(*inputs, tier, scale=case.scale, block=case.block, **options)
    return CertifiedOutput(*(x.cpu() for x in found))


def counted(found: CertifiedOutput, want: torch.Tensor, tolerance: float | None) -> dict:
    """Of one step of all heads; `want` is fp64 attention `[B,Hq,D]`."""
    out = found.out[:, :, 0].double()
    error = (out - want).norm(dim=-1)
    share = error / found.bounds[..., :3].double().sum(-1)
    again = (found.rungs & (HEAD | ROW)) > 0
    return {
        "head_steps": share.numel(),
        "layers": len(share),
        "violated": int((~(share <= 1)).sum()),
        "outside_tolerance": outside(found, error, want.flatten(1).norm(dim=-1), ~again, tolerance),
        "recomputed": int(again.sum()),
        "worst": float(share.max()),
    }


def outside(found, error, norm, kept, tolerance: float | None) -> int:
    """Layers that break their promise, of `[B,Hq]` errors and of `[B]` norms of fp64 attention."""
    bound = torch.where(kept, found.bounds[..., :3].double().sum(-1), 0.0).norm(dim=-1)
    spent, least = found.layer.double().unbind(-1)
    good = (least <= norm * (1 + 1e-6)) & (bound <= spent * (1 + 1e-6))
    if tolerance is not None:
        good &= (spent <= tolerance * least * (1 + 1e-6)) & (bound <= tolerance * norm * (1 + 1e-6))
        good &= (error * kept).norm(dim=-1) <= tolerance * norm
    return int((~good).sum())


def search(
    first: int, every: int, head_steps: int, seconds: float, device: str, out: Path | None
) -> dict:
    """What seeds first, first + every, .. came to; written to `out` after each of them."""
    begun, total, seed, rows = time.time(), 0, first, {}
    found = {"device": device, "options": rows}
    while total < head_steps and time.time() - begun < seconds:
        case = case_of(seed)
        tier, want = case.tier(device), case.oracle()[0]
        for name, options in SETTINGS.items():
            output = step(case, tier, device, options)
            one = counted(output, want, options.get("tolerance", 0.05))
            label = f"{name}, {case.q.dtype}".replace("torch.", "")
            add(rows.setdefault(label, dict.fromkeys(one, 0)), one)
            total += one["head_steps"]
        seed += every
        found |= {"seeds": [[first, seed, every]], "seconds": time.time() - begun}
        if out is not None:
            out.write_text(json.dumps(found))
        if seed // every % 10 == 0:
            print(seed, total, sum(row["violated"] for row in rows.values()), flush=True)
    return found


def add(row: dict, one: dict) -> None:
    for key, value in one.items():
        row[key] = max(row.get(key, 0), value) if key == "worst" else row.get(key, 0) + value


def joined(parts: list[dict]) -> dict:
    """Several parts as one, with its totals."""
    rows: dict = {}
    for part in parts:
        for label, one in part["options"].items():
            add(rows.setdefault(label, {}), one)
    sums = ("head_steps", "layers", "violated", "outside_tolerance", "recomputed")
    return {
        "device": parts[0]["device"],
        "seeds": [seeds for part in parts for seeds in part["seeds"]],
        **{key: sum(row[key] for row in rows.values()) for key in sums},
        "worst": max((row["worst"] for row in rows.values()), default=0.0),
        "seconds": max(part["seconds"] for part in parts),
        "options": rows,
        **provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--head-steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3000.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--part", default="0/1", help="this one of so many, by the seed")
    parser.add_argument("--join", nargs="+", type=Path, help="what parts wrote, to be added up")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    if wanted.join:
        parts = [json.loads(path.read_text()) for path in wanted.join]
    else:
        part, parts_in_all = map(int, wanted.part.split("/"))
        first, share = wanted.first + part, -(-wanted.head_steps // parts_in_all)
        parts = [search(first, parts_in_all, share, wanted.seconds, wanted.device, wanted.out)]
    found = joined(parts)
    print(json.dumps(found, indent=1))
    if wanted.out is not None:
        wanted.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(found["violated"] + found["outside_tolerance"] > 0)


if __name__ == "__main__":
    main()
