"""How soon a fresh process has its first token: an AOTInductor package beside torch.compile.

    python bench/aot_start.py --out rows.jsonl [--device cuda] [--layers 8] [--policy dense]

For each policy, and the model without one ("stock"): exports one decode step of a model with random
weights (its cache's tensors are the program's buffers), packages it, and starts four processes:
the package, on an empty inductor cache and once more on that cache, and the model compiled
(`fullgraph=True`), likewise. A row says what each took from the first import on, for its first
token and for ten more, and whether all gave the same tokens. If "stock" crashes with signal 11, see
bench/shared_libstdcxx.sh.

On an empty cache inductor compiles a C++ program for each vector instruction set of the CPU, to see
whether the compiler knows it, also before it loads a package. `TORCHINDUCTOR_VEC_ISA_OK=1` spares
all processes that, but for AMX with torch 2.11; `--probe` times them with it. Rows measured on an
H200 stand in aot-start-h200.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import attnplug
import attnplug.ops  # registers what a package calls
from attnplug.bench.provenance import provenance
from attnplug.models.names import CACHE

POLICIES = ("stock", "dense", "gather(min_tokens=0)")
KINDS = ("package", "compile")
SIZE = 4096  # tokens of the cache
TOKENS = 11
# Inductor takes the cache's length, 0 when it is exported, for a constant of the program and folds
# what is counted from it.
CONFIGS = {"joint_graph_constant_folding": False}


class Step(torch.nn.Module):
    """One decode step."""

    def __init__(self, policy: str, layers: int, device: str):
        super().__init__()
        config = LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, vocab_size=32000,
            num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=SIZE,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
        if policy == "stock":
            self.model, self.cache = model, StaticCache(config=config, max_cache_len=SIZE)
        else:
            self.model = attnplug.apply(model, policy)
            self.cache = attnplug.make_cache(self.model, SIZE)
        with torch.no_grad():
            self.model(torch.ones(1, 4, dtype=torch.int64, device=device), **{CACHE: self.cache})
        self.cache.reset()
        for index, layer in enumerate(self.cache.layers):
            for name, value in vars(layer).items():
                for place, part in enumerate(value if isinstance(value, tuple) else [value]):
                    if isinstance(part, torch.Tensor):
                        self.register_buffer(f"{name}_{index}_{place}", part)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, **{CACHE: self.cache}).logits


def first(device: str) -> torch.Tensor:
    return torch.full((1, 1), 7, device=device)


def tokens_of(step, device: str, begin: float) -> dict[str, object]:
    """Seconds to the first token and for the rest, and the tokens."""
    token, tokens, at = first(device), [], []
    for _ in range(TOKENS):
        token = step(token)[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(token))
        at.append(time.time() - begin)
    return {"first_s": at[0], "rest_s": at[-1] - at[0], "tokens": tokens}


def child(kind: str, options: argparse.Namespace) -> None:
    begin = float(os.environ["ATTNPLUG_BENCH_BEGIN"])
    with torch.no_grad():
        if kind == "package":
            step = torch._inductor.aoti_load_package(options.package)
        else:
            step = torch.compile(
                Step(options.policy, options.layers, options.device), fullgraph=True
            )
        print(json.dumps(tokens_of(step, options.device, begin)))


def package(options: argparse.Namespace, path: str) -> float:
    """Seconds that it took to export and package the step."""
    begin = time.time()
    step = Step(options.policy, options.layers, options.device)
    with torch.no_grad():
        program = torch.export.export(step, (first(options.device),), strict=True)
        torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs=CONFIGS
        )
    return time.time() - begin


def started(kind: str, options: argparse.Namespace, path: str, cache: str) -> dict[str, object]:
    """What a fresh process that loads the package, or compiles, says of itself."""
    command = [sys.executable, __file__, "--child", kind, "--package", path]
    command += ["--policy", options.policy, "--device", options.device]
    command += ["--layers", str(options.layers)] + ["--probe"] * options.probe
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "ATTNPLUG_BENCH_BEGIN": str(time.time()),
        "PYTHONFAULTHANDLER": "1",
    }
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        raise SystemExit(f"{kind} ended with {run.returncode}: {run.stderr[:6000]}")
    return json.loads(run.stdout.splitlines()[-1])


def tell(line: str) -> None:
    """What a run that is cut has seen."""
    print(line, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step.pt2"
        made = package(options, path)
        tell(f"{options.policy}: packaged in {made:.0f} s")
        kinds = {f"{kind}_{cache}": kind for kind in KINDS for cache in ("cold", "warm")}
        found = {}
        for name, kind in kinds.items():
            found[name] = started(kind, options, path, f"{folder}/{kind}")
            tell(f"{options.policy}: {name} {found[name]}")
        size = Path(path).stat().st_size
    tokens = [run.pop("tokens") for run in found.values()]
    row = {"case": "aot-start", "policy": options.policy, "layers": options.layers, "n": SIZE}
    row |= {"probe": options.probe, "package_s": made, "package_bytes": size}
    row |= {"same": all(x == tokens[0] for x in tokens)}
    return row | found | provenance()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--policy", help="one; default: all")
    parser.add_argument("--probe", action="store_true", help="let inductor probe the compiler")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--package", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.child:
        return child(options.child, options)
    if not options.probe:
        # Read when torch is imported: the children hear of it, this process must be told.
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
        torch._inductor.config.cpp.vec_isa_ok = True
    for policy in [options.policy] if options.policy else POLICIES:
        options.policy = policy
        row = measure(options)
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                print(json.dumps(row), file=file)
    return None


if __name__ == "__main__":
    main()
