"""A long search for a violated bound of certified: counts head-steps, and those whose output is
further from fp64 attention than its bound says, or than the tolerance allows.

    python bench/certified_fuzz.py [--device cuda] [--head-steps 1000000] [--seconds 3000] [--out F]

The cases are the tests' (`tests/ops/certified/certified_cases.py`): adversaries whose keys sit at
the far ends of their quantization intervals, and Gaussian caches; every dtype, several options. On
a CPU they run on the numba reference, on a GPU on its kernels: on Hopper 128 channels in 16 bits
are the Hopper pass. `--out` gets one JSON object, with the counts of each option and dtype.
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
from certified_cases import Case, adversary, gaussian  # noqa: E402

HEAD, ROW = 4, 8  # of `RUNGS`
NONE = {"tolerance": None, "explore": 0.0}
SETTINGS = {
    "default": {},
    "tolerance=0.5": {"tolerance": 0.5, "explore": 0.0},
    "everything quantized": NONE,
    "some promoted": NONE | {"coverage": 0.6, "k_min": 1, "k_max": 3, "ranking": 1},
    "values": NONE | {"v_tol": 0.02, "k_min": 1, "value_budget": 0.2},
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BATCH, HEADS = 32, 8


def case_of(seed: int) -> Case:
    """Two adversaries of three; widths and groups change from seed to seed."""
    dtype, width, group = DTYPES[seed % 3], (64, 128)[seed // 3 % 2], (1, 2, 3)[seed // 6 % 3]
    if seed // 2 % 3 < 2:
        return adversary(seed, dtype, BATCH, HEADS, group, width=width)
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
    error, size = (out - want).norm(dim=-1), out.norm(dim=-1)
    share = error / found.bounds[..., :3].double().sum(-1)
    again = (found.rungs & (HEAD | ROW)) > 0
    outside = ~again & (error > (tolerance or float("inf")) * size * 1.01)
    return {
        "head_steps": share.numel(),
        "violated": int((~(share <= 1)).sum()),
        "outside_tolerance": int(outside.sum()),
        "recomputed": int(again.sum()),
        "worst": float(share.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--head-steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3000.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    begun, total, seed, rows = time.time(), 0, wanted.first, {}
    while total < wanted.head_steps and time.time() - begun < wanted.seconds:
        case = case_of(seed)
        tier, want = case.tier(wanted.device), case.oracle()[0]
        for name, options in SETTINGS.items():
            one = counted(
                step(case, tier, wanted.device, options), want, options.get("tolerance", 0.05)
            )
            row = rows.setdefault(
                f"{name}, {case.q.dtype}".replace("torch.", ""), dict.fromkeys(one, 0)
            )
            for key, value in one.items():
                row[key] = max(row[key], value) if key == "worst" else row[key] + value
            total += one["head_steps"]
        seed += 1
        if seed % 10 == 0:
            print(seed, total, sum(row["violated"] for row in rows.values()), flush=True)
    found = {
        "device": wanted.device, "seeds": [wanted.first, seed], "head_steps": total,
        "violated": sum(row["violated"] for row in rows.values()),
        "outside_tolerance": sum(row["outside_tolerance"] for row in rows.values()),
        "seconds": time.time() - begun, "options": rows, **provenance(),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if wanted.out is not None:
        wanted.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(found["violated"] + found["outside_tolerance"] > 0)


if __name__ == "__main__":
    main()
