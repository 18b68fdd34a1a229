"""One attention layer's decode step as vLLM's CUDA graph has it, without an engine: microseconds of
a layer, and of each launch, beside FlashAttention alone.

    source bench/vllm_setup.sh; python3 bench/vllm_layer.py --out rows.json
    python3 bench/vllm_layer.py --root OLD_TREE --out before.json     # the same of another tree

The graph holds a few layers, each with a cache of its own, so that no step finds its keys in the
L2 cache. `stock` is FlashAttention for all rows. `served` is attnplug's step as the backend runs
it, `in line` FlashAttention for near rows and gather behind it. Where vLLM is not
importable, `dense_decode` and a copy stand in for FlashAttention. Launches are those of one layer
as torch's profiler sees them in a replay, which makes gaps longer. Results are compared on the way.
"""

import argparse
import dataclasses
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, WIDTH, PAGE, LONGEST = 28, 4, 128, 16, 131072
SCALE, SPLITS = WIDTH**-0.5, 32  # what vLLM bounds FlashAttention's splits by in graphs
SHAPE = (8 * LONGEST // PAGE, PAGE, KV_HEADS, WIDTH)  # of one layer's keys, and of its values
STRIDES = (PAGE * KV_HEADS * WIDTH, KV_HEADS * WIDTH, WIDTH, 1)
CASES = "8192x1,32768x1,131072x1,8192x8,32768x8,131072x8"
Step = Callable[[int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("vllm-layer.json"))
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--cases", default=CASES, help="tokens x rows")
    parser.add_argument("--layers", type=int, default=6, help="in a graph; 2.2 GiB each")
    parser.add_argument("--attend", default="", help="of the attending plan: splits=8,stages=3")
    parser.add_argument("--layout", choices=("HND", "NHD"), default="HND", help="of the caches")
    parser.add_argument("--score", default="", help="of the scoring kernel: programs=2,stages=3")
    options = parser.parse_args()
    sys.path.insert(0, str(options.root))
    with torch.inference_mode():
        report = measure(options)
    options.out.write_text(json.dumps(report, indent=1))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases; prints the table as it comes."""
    import triton

    override(numbers(options.attend), numbers(options.score))
    layers = Layers(options.layers, options.layout)
    report = {
        "datetime": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dense": flash_attention.__name__ if has_flash() else stand_in.__name__,
        "options": {x: getattr(options, x) for x in ("attend", "layout", "score")},
        "rows": [],
    }
    print(f"{report['gpu']}, {report['dense']}, us a layer")
    for tokens, rows in (map(int, case.split("x")) for case in options.cases.split(",")):
        batch = Batch.of(rows, tokens, layers.rule)
        for variant, us, launches in measured(layers, batch):
            far = int(batch.chosen.sum())
            row = dict(variant=variant, tokens=tokens, batch=rows, far=far, us=us)
            report["rows"].append(row | {"launches": launches})
            print(f"{tokens // 1024:4}K x{rows} {far} far {variant:8} {us:8.2f}", flush=True)
            for launch in launches:
                print("      {start:7.2f} {us:7.2f}  {grid!s:16} {name}".format(**launch))
    return report


def numbers(text: str) -> dict[str, int]:
    """The numbers that an option names."""
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {name: int(value) for name, value in pairs}


def override(attend: dict[str, int], score: dict[str, int]) -> None:
    """Another plan than the shape's."""
    from attnplug.ops.gather import gather_decode

    stock = gather_decode.plan_for
    if attend:

        def plan_for(*args: Any, **options: Any) -> Any:
            plan = stock(*args, **options)
            return plan._replace(attend=plan.attend._replace(**attend))

        gather_decode.plan_for = plan_for  # pyright: ignore[reportAttributeAccessIssue]
    if score:  # an older tree has none of these
        from attnplug.ops.gather import page_scores

        for name, value in score.items():
            setattr(page_scores, name.upper(), value)


@dataclasses.dataclass
class Batch:
    """Rows of as many tokens, on shuffled pages, and which of them are far."""

    table: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def of(cls, rows: int, tokens: int, rule: Any, device: str = "cuda") -> "Batch":
        room, draw = LONGEST // PAGE, torch.Generator().manual_seed(rows + tokens)
        order = torch.randperm(8 * room, generator=draw)[: rows * room]
        table = order.view(rows, room).to(device, torch.int32)
        # Half of a page: the step completes no block, as 15 of 16 steps do.
        lengths = torch.full((rows,), tokens - PAGE // 2, dtype=torch.int32, device=device)
        last = (lengths - 1).long()
        slots = table[torch.arange(rows, device=device), last // PAGE].long() * PAGE + last % PAGE
        return cls(table, lengths, slots, rule.far(lengths))

    @property
    def far_lengths(self) -> torch.Tensor:
        return self.lengths * self.chosen


class Layers:
    """Layers of a model with gather, each with a cache for 8 rows of `LONGEST` tokens."""

    def __init__(self, count: int, layout: str = "HND", device: str = "cuda") -> None:
        from attnplug.policies import Gather
        from attnplug.serve.paged.layer import ServedLayer
        from attnplug.serve.paged.phases import Phases

        place: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        pages, heads_first = 8 * LONGEST // PAGE, layout == "HND"
        inner = (KV_HEADS, PAGE) if heads_first else (PAGE, KV_HEADS)
        caches = [torch.empty(2, pages, *inner, WIDTH, **place).normal_() for _ in range(count)]
        self.caches = [x if heads_first else x.transpose(2, 3) for x in caches]
        self.queries = [torch.randn(8, HEADS, WIDTH, **place) for _ in range(count)]
        self.outs = [torch.empty(8, HEADS, WIDTH, **place) for _ in range(count)]
        phases, there = Phases(decode=Gather()), torch.device(device, 0)
        some = dict(scale=SCALE, softcap=0.0, sinks=None, device=there)
        self.served = [ServedLayer(phases, **some) for _ in range(count)]
        self.rule = self.served[0].rule
        for served, cache in zip(self.served, self.caches, strict=True):
            served.state.update(cache[0], torch.arange(pages * PAGE, device=device))

    def __len__(self) -> int:
        return len(self.caches)

    def stock(self, batch: Batch) -> Step:
        """FlashAttention for all rows, on pages with tokens first, as vLLM's own backend has."""
        attend = dense_for(batch, batch.lengths)

        def step(i: int) -> None:
            q, out = self.of(batch, i)
            # Whatever lies there: the time is that of tokens first.
            tokens_first = (x.as_strided(SHAPE, STRIDES) for x in self.caches[i])
            attend(q, *tokens_first, out)

        return step

    def served_step(self, batch: Batch) -> Step:
        """The step as attnplug's backend runs it, in this tree or an older one."""
        from attnplug.serve.paged.layer import Far, ServedLayer

        near_lengths = batch.lengths - batch.far_lengths
        far = Far(batch.far_lengths, batch.chosen)
        if "near" in Far._fields:  # an older tree has no such field
            far = far._replace(near=near_lengths)
        attend = dense_for(batch, near_lengths)
        halves = "dense" in inspect.signature(ServedLayer.attend_steps).parameters

        def step(i: int) -> None:
            (q, out), (k, v), served = self.of(batch, i), self.caches[i], self.served[i]

            def near() -> None:
                attend(q, k.transpose(1, 2), v.transpose(1, 2), out)

            if halves:
                steps = q, pages_of(k, v), batch.table, far, out
                served.attend_steps(*steps, slots=batch.slots, dense=near)
            else:
                served.state.update(k, batch.slots)
                near()
                served.attend_steps(q, pages_of(k, v), batch.table, far, out)

        return step

    def of(self, batch: Batch, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries, output) of a layer's rows."""
        rows = len(batch.lengths)
        return self.queries[i][:rows], self.outs[i][:rows]


# ---- dense attention -------------------------------------------------------------------------


def pages_of(k: torch.Tensor, v: torch.Tensor) -> Any:
    """What `ServedLayer` takes for a layer's pages; an older tree takes two tensors."""
    from attnplug.serve.paged.pages import Pages

    return Pages(k, v) if hasattr(Pages, "_fields") else (k, v)


def has_flash() -> bool:
    """Whether vLLM's FlashAttention 3 is here."""
    try:
        from vllm.vllm_flash_attn import get_scheduler_metadata  # noqa: F401

        return hasattr(torch.ops._vllm_fa3_C, "fwd")
    except (ImportError, AttributeError, RuntimeError):
        return False


def dense_for(batch: Batch, lengths: torch.Tensor) -> Callable[..., None]:
    """`attend(q, k, v, out)` for rows of these lengths; k and v `[pages, page, Hkv, D]`."""
    return (flash_attention if has_flash() else stand_in)(batch, lengths)


def flash_attention(batch: Batch, lengths: torch.Tensor) -> Callable[..., None]:
    """vLLM's FlashAttention 3, with a schedule that is made ahead, as in full graphs."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    rows = len(lengths)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=lengths.device)
    schedule = get_scheduler_metadata(
        batch_size=rows,
        max_seqlen_q=1,
        max_seqlen_k=LONGEST,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=WIDTH,
        cache_seqlens=lengths,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=PAGE,
        causal=True,
        num_splits=SPLITS,
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=LONGEST,
            softmax_scale=SCALE,
            causal=True,
            window_size=[-1, -1],
            block_table=batch.table,
            scheduler_metadata=schedule,
            fa_version=3,
            num_splits=SPLITS,
        )

    return attend


def stand_in(batch: Batch, lengths: torch.Tensor) -> Callable[..., None]:
    """attnplug's dense attention and a copy."""
    from attnplug.ops import dense_decode

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        rows = {"table": batch.table, "lengths": lengths}
        pages = k.transpose(1, 2), v.transpose(1, 2)
        found, _ = dense_decode(q.unsqueeze(2), *pages, scale=SCALE, **rows)
        out.copy_(found[:, :, 0])

    return attend


# ---- measuring -------------------------------------------------------------------------------


def measured(layers: Layers, batch: Batch) -> Iterator[tuple[str, float, list[dict[str, Any]]]]:
    """(variant, microseconds a layer, launches of a layer) of each way to run a batch."""
    from attnplug import Gather  # of the tree that is measured

    graph = captured(layers.stock(batch), len(layers))
    yield "stock", timed(graph, len(layers)), launches(graph, len(layers))
    ways = {"served": None} | ({"in line": 0} if hasattr(Gather, "rows_whole") else {})
    usual = getattr(Gather, "rows_whole", None)
    for variant, most in ways.items():
        if most is not None:
            Gather.rows_whole = most
        for out in layers.outs:
            out.fill_(torch.nan)
        graph = captured(layers.served_step(batch), len(layers))
        graph.replay()
        found = [layers.of(batch, i)[1].clone() for i in range(len(layers))]
        yield variant, timed(graph, len(layers)), launches(graph, len(layers))
        hold(layers, batch, found)
    if usual is not None:
        Gather.rows_whole = usual


def hold(layers: Layers, batch: Batch, found: list[torch.Tensor]) -> None:
    """Near rows are dense attention's, and far ones gather's own op's."""
    attend, worst = dense_for(batch, batch.lengths), 0.0
    for i, got in enumerate(found):
        (q, _), (k, v) = layers.of(batch, i), layers.caches[i]
        near = torch.empty_like(got)
        attend(q, k.transpose(1, 2), v.transpose(1, 2), near)
        served = layers.served[i]
        far = far_output(served, q, k, v, batch)
        want = torch.where(batch.chosen[:, None, None], far, near)
        assert got.isfinite().all(), "a row was not written"
        worst = max(worst, float((got.float() - want.float()).abs().max()))
    bound = 2.0**-6 * float(max(x.abs().max() for x in found))
    print(f"      largest difference {worst:.2g}, bound {bound:.2g}")
    assert worst <= bound, "the step gives something else"


def far_output(served: Any, q: Any, k: Any, v: Any, batch: Batch) -> torch.Tensor:
    """gather's output of all rows, `[rows, Hq, D]`."""
    from attnplug.call import PagedCall

    state = served.state.of(k)[0]
    call = PagedCall(q.unsqueeze(2), k, v, batch.table, batch.far_lengths, SCALE, state=state)
    return served.phases.decode.attend_far(call)[:, :, 0]


def captured(step: Step, count: int) -> torch.cuda.CUDAGraph:
    """A graph of all layers' steps; what compiles does so before."""
    for i in range(count):
        step(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            step(i)
    return graph


def timed(graph: torch.cuda.CUDAGraph, count: int, rounds: int = 9, replays: int = 10) -> float:
    """The median microseconds of a layer."""
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (replays * count))
    return statistics.median(times)


def launches(graph: torch.cuda.CUDAGraph, count: int) -> list[dict[str, Any]]:
    """The launches of a layer in the middle of a replay: name, grid, microseconds, and when each
    began after the first one. Empty where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    if not kernels or len(kernels) % count:
        print(f"      the profiler saw {len(kernels)} launches of {count} layers")
        return []
    each = len(kernels) // count
    own = kernels[count // 2 * each : (count // 2 + 1) * each]
    return [
        {
            "name": e["name"][:60],
            "grid": e["args"].get("grid"),
            "start": e["ts"] - own[0]["ts"],
            "us": e["dur"],
        }
        for e in own
    ]


if __name__ == "__main__":
    main()
