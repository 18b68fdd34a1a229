"""certified on a small real model: how tight the bounds are, what the tighter form saves, and what
quantization without certification loses. Writes bench/results/certified/fidelity.json, in which
rows of other policies stay.

    python bench/certified_fidelity.py [context tokens] [steps] [--device cuda] [--out FILE]

Float32 on a CPU, float16 on a GPU; the true errors are those against dense attention in float32.

Prose; a dense prefill, then teacher-forced decode steps with each policy over a cache of its own.
Every head-step's bound stands beside its true error, against dense attention over the same queries.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

import attnplug
from attnplug import Certified
from attnplug.bench.provenance import provenance
from attnplug.bench.rows import policy_name
from attnplug.models.names import CACHE
from attnplug.models.pretrained import load
from attnplug.ops import certified_attention, dense_decode, quantize_kv
from attnplug.policies import AttentionCall
from attnplug.policies.certified import CertifiedLayer

ROOT = Path(__file__).resolve().parent.parent
NAIVE = {"tolerance": None, "explore": 0.0}
POLICIES = {
    "certified(block=16)": Certified(block=16, min_tokens=0),
    "certified": Certified(min_tokens=0),
    "certified(tolerance=0.1)": Certified(tolerance=0.1, min_tokens=0),
    "paper": Certified(
        tolerance=None, coverage=0.995, k_min=2, k_max=128, v_tol=0.05, ranking=1, min_tokens=0
    ),
    "naive(block=16)": Certified(block=16, min_tokens=0, **NAIVE),
    "naive": Certified(min_tokens=0, **NAIVE),
}
TOLERANCES = (0.1, 0.2, 0.5, 1.0)
RESULTS = ROOT / "bench/results/certified/fidelity.json"
HEADS: dict[str, list[torch.Tensor]] = {}


@dataclasses.dataclass(frozen=True)
class Watched(Certified):
    """Certified, whose steps are kept beside their true errors."""

    label: str = ""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        state = call.state
        assert isinstance(state, CertifiedLayer) and state.tier is not None
        quantize_kv(call.k, call.v, state.tier, block=self.block, lengths=call.lengths)
        names = ("block", "tolerance", "coverage", "k_min", "k_max", "v_tol", "ranking", "explore")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        found = certified_attention(
            call.q, call.k, call.v, state.tier, scale=call.scale, lengths=call.lengths, **options
        )
        inputs = (x.float() for x in (call.q, call.k, call.v))
        want, _ = dense_decode(*inputs, scale=call.scale, lengths=call.lengths)
        error = (found.out - want)[:, :, 0].double().norm(dim=-1, keepdim=True)
        paper = schwarz(call, state, found.bounds[..., 5:6].double(), self.block)
        size = want[:, :, 0].double().norm(dim=-1, keepdim=True)
        again = ((found.rungs & 12) > 0).double().unsqueeze(-1)
        row = torch.cat([found.bounds.double(), error, paper, size, again], -1)
        HEADS.setdefault(self.label, []).append(row.flatten(0, 1).cpu())
        return found.out


def schwarz(call: AttentionCall, state: CertifiedLayer, ours: torch.Tensor, block: int):
    """E_key by the paper's form with the paper's Delta (Cauchy-Schwarz), from the one with the sum
    of absolute values: 2 V m e^2D (e^2D - 1) in both."""
    assert state.tier is not None and call.lengths is not None
    count = int(call.lengths) // block
    scales = state.tier.k_meta[:, :, :count, 0].double()
    group = call.q.shape[1] // call.k.shape[1]
    q = call.q[:, :, 0].double().unflatten(1, (-1, group)) * call.scale
    one = (q.abs() @ scales.transpose(2, 3)).amax(-1) / 2
    two = q.norm(dim=-1) * scales.norm(dim=-1).amax(-1, keepdim=True) / 2
    change = torch.exp(2 * two) * torch.expm1(2 * two) / (torch.exp(2 * one) * torch.expm1(2 * one))
    return ours * change.flatten(1, 2).unsqueeze(-1)


@torch.no_grad()
def losses(model, cache, ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, given all before it."""
    rows = []
    for at in range(ids.shape[1] - 1):
        logits = model(ids[:, at : at + 1], **{CACHE: cache}).logits[0, -1].double()
        rows.append(-logits.log_softmax(-1)[ids[0, at + 1]])
    return torch.stack(rows).cpu()


def quantiles(x: torch.Tensor) -> dict[str, float]:
    return {f"p{int(100 * p)}": float(x.quantile(p)) for p in (0.05, 0.5, 0.95)} | {
        "max": float(x.max())
    }


def heads_row(rows: torch.Tensor) -> dict[str, Any]:
    """What the head-steps of one policy come to."""
    key, value, rounding, key0, value0, paper, error, schwarz_, size, again = rows.unbind(-1)
    kept = again == 0
    bound = (key + value + rounding)[kept]
    row: dict[str, Any] = {
        "head_steps": len(rows),
        "recomputed": float(again.mean()),
        "violated": int((error > key + value + rounding + 1e-5).sum()),
        "bound_over_error": quantiles(bound / error[kept].clamp(min=1e-9)),
        "error_over_output": quantiles(error[kept] / size[kept]),
        "bound_over_output": quantiles(bound / size[kept]),
        "E_key": quantiles(key0),
        "E_val": quantiles(value0),
        "E_round": quantiles(rounding),
        "E_key_paper": quantiles(paper),
        "E_key_paper_schwarz": quantiles(schwarz_),
    }
    for limit in TOLERANCES:
        rest = value0 + rounding
        row[f"above {limit}"] = {
            name: float((~(x + rest <= limit)).double().mean())
            for name, x in (("tight", key0), ("paper", paper), ("paper_schwarz", schwarz_))
        }
    return row


def bootstrap(delta: torch.Tensor) -> tuple[float, float]:
    random = torch.Generator().manual_seed(0)
    picks = torch.randint(0, len(delta), (10000, len(delta)), generator=random)
    means = delta[picks].mean(1)
    return float(means.quantile(0.025)), float(means.quantile(0.975))


@torch.no_grad()
def study(context: int, steps: int, device: str, out: Path, name: str = "smollm2-135m") -> None:
    model, tokenizer = load(name, dtype=torch.float32 if device == "cpu" else torch.float16)
    model.to(device)
    text = (ROOT / "attnplug/eval/data/rust_book.txt").read_text()[: 16 * (context + steps)]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : context + steps + 1].to(device)
    base: torch.Tensor | None = None
    rows = []
    others = json.loads(RESULTS.read_text())
    names = {label: policy_name(policy) for label, policy in POLICIES.items()}
    others = [row for row in others if row["policy"] not in names.values()]
    for label, policy in ({"dense": None} | POLICIES).items():
        options = {} if policy is None else dataclasses.asdict(policy)
        chosen = attnplug.Dense() if policy is None else Watched(**options, label=label)
        with attnplug.applied(model, attnplug.Policy(decode=chosen)):
            cache = attnplug.make_cache(model, context + steps + 8)
            model(ids[:, :context], **{CACHE: cache})
            found = losses(model, cache, ids[:, context:])
        if base is None:
            base = found
            continue
        delta = found - base
        low, high = bootstrap(delta)
        row = {
            "task": "perplexity", "model": name, "n": context, "trials": len(delta),
            "device": device, "policy": names[label], "dense": math.exp(float(base.mean())),
            "value": math.exp(float(found.mean())), "delta_nll": float(delta.mean()),
            "low": low, "high": high, **heads_row(torch.cat(HEADS[label])), **provenance(),
        }  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
        out.write_text(json.dumps(rows + others, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("context", nargs="?", type=int, default=1024)
    parser.add_argument("steps", nargs="?", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    wanted = parser.parse_args()
    study(wanted.context, wanted.steps, wanted.device, wanted.out)


if __name__ == "__main__":
    main()
