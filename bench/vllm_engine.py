"""attnplug inside vLLM beside vLLM's own FlashAttention, on one GPU and in one run: time to first
token, decode steps, and a served load, of models of real shapes with random bf16 weights.

    source bench/vllm_setup.sh   # see bench/README.md
    python3 bench/vllm_engine.py --shape qwen7b --parts ttft,decode --out $OUT/vllm-qwen7b.json

Each engine runs in a process of its own, stock first; prompts are the same. Its figures stay on the
machine: a call that was cut goes on from them with --resume, while they are fresh. TTFT is from
`add_request` to the first token; a step is the mean of 256 after a prefix hit, so that only decode
counts; the load is requests that all come at once. Rows: `case` vllm-ttft, vllm-decode and
vllm-load..., `peer` vllm. --quick makes everything small, for a look at whether it runs.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen7b": dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=152064,
        rope_theta=1e6,
        use_sliding_window=False,
    ),
    "llama8b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        rope_theta=5e5,
    ),
}
SHAPES["tiny"] = SHAPES["qwen7b"] | dict(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
)
COMMON = dict(
    max_position_embeddings=1048576,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
)
TTFT, DECODE = "8192,32768,131072", "8192x1,32768x1,131072x1,32768x8,131072x8"
MADE = 257  # tokens of a decode measurement: 256 steps
FRESH = 900  # seconds: for so long stock's figures may stand beside others
STOCK = "stock"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen7b")
    parser.add_argument("--policy", default="momo+gather")
    parser.add_argument("--parts", default="ttft,decode", help="of ttft, decode, load")
    parser.add_argument("--ttft", default=TTFT, help="tokens of prompts")
    parser.add_argument("--decode", default=DECODE, help="tokens x rows")
    parser.add_argument("--load", default="32x32768x256", help="requests x tokens x new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--chunk", type=int, help="max_num_batched_tokens; vLLM's default without")
    parser.add_argument("--out", type=Path, default=Path("vllm.json"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="stock's figures of the last call")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.ttft, options.decode, options.load = "4096", "4096x2", "4x4096x32"
    if options.engine:
        measure(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Both engines, one after the other, and the rows of attnplug's beside stock's, written as they
    come: a run that is cut keeps them."""
    stock: dict[str, list[float]] = {}
    kept, asked = folder_of(options.shape) / "stock.json", asked_of_stock(options)
    if "sketch" in options.policy:
        keep_basis(SHAPES[options.shape], folder_of(options.shape))
    if options.resume:
        stock = read_stock(kept, asked)
    else:
        kept.unlink(missing_ok=True)
        if run_engine(STOCK, stock.__setitem__) == 0:
            kept.write_text(json.dumps({"asked": asked, "stock": stock}))
    rows: list[dict[str, Any]] = []

    def add(key: str, times: list[float]) -> None:
        if key in stock:
            rows.extend(rows_of(options, key, times, stock[key]))
            options.out.write_text(json.dumps({"datetime": now(), "rows": rows}, indent=1))

    run_engine(options.policy, add)
    for row in rows:
        print(f"{row['case']} {row['n']} x{row['batch']}: {row['ratio']:.3f}x", flush=True)


def folder_of(shape: str) -> Path:
    """Where a shape's configuration is, and what stock took for it."""
    folder = Path(tempfile.gettempdir(), f"attnplug-{shape}")
    folder.mkdir(exist_ok=True)
    return folder


def keep_basis(shape: dict[str, Any], folder: Path) -> None:
    """Give the model, whose random weights are in no file, a file by which it is known and a basis:
    that of a single layer of its heads, for all layers, as steps take as long by any."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

    from attnplug.calibration.basis_file import Bases, rope_of, weights_of, write
    from attnplug.calibration.measure import measure
    from attnplug.ops.sketch.model_basis import fit_model_basis

    write_config(folder, shape)
    save_file({"name": torch.zeros(1)}, folder / "model.safetensors")
    small = dict(num_hidden_layers=1, hidden_size=256, intermediate_size=256, vocab_size=1000)
    model = Qwen2ForCausalLM(Qwen2Config(**(shape | COMMON | small | {"torch_dtype": "float32"})))
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, 1000, (4096,), generator=draw).tolist()]
    inv_freq, moments = measure(model.eval(), texts)
    basis = fit_model_basis(moments[0], inv_freq)
    count = shape["num_hidden_layers"]
    layers = {layer: type(basis)(*(x.clone() for x in basis)) for layer in range(count)}
    rope = rope_of(AutoConfig.from_pretrained(folder))
    write(Bases(weights_of(folder), rope, inv_freq, layers), folder.name)


def write_config(folder: Path, shape: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(shape | COMMON))


def asked_of_stock(options: argparse.Namespace) -> dict[str, Any]:
    """The options that stock's figures depend on."""
    names = ("parts", "ttft", "decode", "load", "rounds", "memory", "chunk")
    return {name: getattr(options, name) for name in names}


def read_stock(kept: Path, asked: dict[str, Any]) -> dict[str, list[float]]:
    """What stock took in the call before this one, of a machine that has not changed since."""
    if not kept.exists():
        raise SystemExit(f"{kept} is not there: measure stock first")
    age = time.time() - kept.stat().st_mtime
    if age > FRESH:
        raise SystemExit(f"{kept} is {age / 60:.0f} minutes old: measure stock again")
    known = json.loads(kept.read_text())
    if known["asked"] != asked:
        raise SystemExit(f"{kept} is of {known['asked']}: measure stock again")
    print(f"stock's figures are {age:.0f} s old", flush=True)
    return known["stock"]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())


def run_engine(engine: str, tell_of: Callable[[str, list[float]], None]) -> int:
    """Each measurement of one engine, in a process of its own, and its microseconds. Returns the
    process's exit status."""
    command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
    print(f"== {engine}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("MEASURED "):
            key, times = json.loads(line.removeprefix("MEASURED "))
            print(f"{engine} {key}: {[round(t / 1e3, 3) for t in times]} ms", flush=True)
            tell_of(key, times)
        elif "attnplug" in line or "ERROR" in line or "KV cache" in line:
            print(line, end="", flush=True)
    if process.wait():
        print(f"{engine} ended with {process.returncode}", flush=True)
    return process.returncode


def rows_of(options, key: str, times: list[float], stock: list[float]) -> list[dict[str, Any]]:
    """The rows of one measurement; where it is a distribution, one for its 99th percentile too."""
    from attnplug.bench.rows import make_row, policy_name

    case, tokens, rows = key.split(" ")
    n, batch = int(tokens), int(rows)
    shape, decoder = SHAPES[options.shape], options.policy.split("+")[-1].partition("(")[0]
    op, bytes_, flops = (
        ("momo", *bill(shape, n, n, 1)) if "ttft" in case else (decoder, *bill(shape, n, 1, batch))
    )
    row = dict(
        op=op,
        n=n,
        batch=batch,
        heads_q=shape["num_attention_heads"],
        heads_kv=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        dtype="bfloat16",
        options="",
        policy=policy_name(options.policy),
        peer="vllm",
        bytes=bytes_,
        flops=flops,
        ceiling=lambda seconds: None,  # that of a whole engine, host included, says little
    )
    made = [make_row(case=case, times_us=times, peer_times_us=stock, **row)]
    if case in ("vllm-load-ttft", "vllm-load-itl"):
        late, stock_late = ([percentile(x, 0.99)] for x in (times, stock))
        made.append(make_row(case=f"{case}-p99", times_us=late, peer_times_us=stock_late, **row))
    return made


def percentile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bill(shape: dict[str, Any], keys: int, queries: int, rows: int) -> tuple[float, float]:
    """(bytes, flops) of a dense forward pass: weights once, keys and values of all rows."""
    hidden, inner, layers = (
        shape[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    wide, narrow = (
        shape[k] * shape["head_dim"] for k in ("num_attention_heads", "num_key_value_heads")
    )
    weights = layers * hidden * (2 * wide + 2 * narrow + 3 * inner) + shape["vocab_size"] * hidden
    cache = layers * rows * keys * narrow * 2
    seen = keys / 2 if queries == keys else keys
    return 2.0 * (weights + cache), rows * queries * (2.0 * weights + 4.0 * layers * wide * seen)


def measure(options: argparse.Namespace) -> None:
    """One engine's measurements, as lines `MEASURED [key, microseconds]`."""
    begun = time.perf_counter()
    bench = Engine(options)
    print(f"attnplug bench: {options.engine} started in {time.perf_counter() - begun:.0f} s")
    first = bench.answer([bench.prompt(32768 if not options.quick else 4096)], 2)
    print(f"attnplug bench: first request {first.ttft[0] / 1e3:.0f} ms", flush=True)
    parts = options.parts.split(",")
    if "ttft" in parts:
        for n in map(int, options.ttft.split(",")):
            times = [bench.answer([bench.prompt(n)], 1).ttft[0] for _ in range(options.rounds)]
            tell(f"vllm-ttft {n} 1", times)
    if "decode" in parts:
        for n, rows in (map(int, item.split("x")) for item in options.decode.split(",")):
            if n * rows > bench.room:
                print(f"attnplug bench: no room for {n} x {rows}, {bench.room} tokens")
                continue
            prompts = [bench.prompt(n - MADE // 2) for _ in range(rows)]
            bench.answer(prompts, 1)  # the prefix cache then holds them
            steps = [bench.answer(prompts, MADE).step for _ in range(options.rounds)]
            tell(f"vllm-decode {n} {rows}", steps)
    if "load" in parts:
        requests, n, made = map(int, options.load.split("x"))
        load = bench.answer([bench.prompt(n) for _ in range(requests)], made)
        assert len(load.ttft) == requests and load.finished == requests, "a request was lost"
        tell(f"vllm-load {n} {requests}", [load.whole])
        tell(f"vllm-load-ttft {n} {requests}", load.ttft)
        tell(f"vllm-load-itl {n} {requests}", load.between)


def tell(key: str, times: list[float]) -> None:
    print("MEASURED " + json.dumps([key, times]), flush=True)


class Answer:
    """When tokens came, in microseconds: `ttft` of each request, `between` of each two tokens of a
    request, `step` between the last request's first token and the end, a step; `whole`."""

    def __init__(self, begun: float, came: dict[str, list[float]], counts: dict[str, int]):
        self.ttft = [(times[0] - begun) * 1e6 for times in came.values()]
        self.between = [
            (after - before) * 1e6
            for times in came.values()
            for before, after in itertools.pairwise(times)
        ]
        begin, end = (pick(t[i] for t in came.values()) for pick, i in ((max, 0), (max, -1)))
        self.step = (end - begin) * 1e6 / max(1, min(counts.values()) - 1)
        self.whole = (end - begun) * 1e6
        self.finished = len(came)


class Engine:
    """vLLM with random weights, told what to use by the name of a policy or "stock"."""

    def __init__(self, options: argparse.Namespace):
        import torch
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt

        self.shape = SHAPES[options.shape]
        folder = folder_of(options.shape)
        write_config(folder, self.shape)
        if options.engine == STOCK:
            chosen: dict[str, Any] = dict(attention_backend="FLASH_ATTN")
        else:
            chosen = dict(
                attention_backend="CUSTOM", additional_config={"attnplug": options.engine}
            )
        if options.chunk:
            chosen["max_num_batched_tokens"] = options.chunk
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=139264,
            max_num_seqs=32,
            gpu_memory_utilization=options.memory,
            enable_prefix_caching=True,
            seed=0,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
            **chosen,
        )
        self.engine, self.params, self.tokens = self.llm.llm_engine, SamplingParams, TokensPrompt
        cache = self.engine.vllm_config.cache_config
        self.room = (cache.num_gpu_blocks or 0) * cache.block_size
        self.random = torch.Generator().manual_seed(1)
        self.torch, self.serial = torch, 0

    def prompt(self, tokens: int) -> Any:
        """A prompt of random tokens, another one each time."""
        draw = self.torch.randint(2, self.shape["vocab_size"], (tokens,), generator=self.random)
        return self.tokens(prompt_token_ids=draw.tolist())

    def answer(self, prompts: list[Any], made: int) -> Answer:
        """All prompts at once, `made` tokens each."""
        params = self.params(temperature=0, max_tokens=made, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        for prompt in prompts:
            self.engine.add_request(str(self.serial), prompt, params)
            self.serial += 1
        came: dict[str, list[float]] = {}
        counts: dict[str, int] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                count = len(output.outputs[0].token_ids)
                if count > counts.get(output.request_id, 0):
                    counts[output.request_id] = count
                    came.setdefault(output.request_id, []).append(time.perf_counter())
        assert min(counts.values()) == made, "a request ended early"
        return Answer(begun, came, counts)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    main()
