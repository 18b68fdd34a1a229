"""Ways to run a layer's decode step in vLLM, side by side in one process: JSON rows on stdout.

    source bench/vllm_setup.sh; python3 bench/vllm_rows.py --out rows.jsonl

`stock` is FlashAttention 3 for all rows, `in line` the same for near rows and gather's kernels
behind it. `chain` is one chain of gather's kernels that reads near rows too (`gather_rows`), with
settings behind the word. Each graph has a few layers, each with a cache of
its own. `back to back` is microseconds a layer of these alone; `apart` the same with one small
kernel in front of each layer that writes its queries, as a model has others there, and without that
kernel's own time. `cold` is `apart` behind a copy of 192 MB: between two layers a model's weights
pass through the L2 cache. Outputs of every variant
are held to stock's and gather's own op's first; a variant that differs, or fails, prints its error
and no time.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import vllm_layer as layer_bench
from _op_rows import FAILURES
from vllm_layer import Batch, Layers, Step, captured, timed

WEIGHTS: list[torch.Tensor] = []  # what flushes the L2 cache, once it is there
SECONDS = 100  # after which nothing further begins


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is set while a graph is captured. None: as it is."""

    name: str
    rows_whole: int = 0  # of Gather
    whole: int = 0  # stages of a near row's pieces; 0: as it is
    programs: int = 2  # of near rows for each multiprocessor
    attend: str = ""  # of the plan of far rows' pieces: splits=8,stages=4
    score: str = ""  # of the kernel that scores: programs=8,stages=3


CHAIN: dict[str, Any] = {"rows_whole": 64}
VARIANTS = (
    Variant("in line"),
    Variant("chain", **CHAIN),
    Variant("chain whole=3", **CHAIN, whole=3),
    Variant("chain whole=4", **CHAIN, whole=4),
    Variant("chain programs=1", **CHAIN, programs=1),
)
ATTEND = (
    "ahead=0,stages=1",
    "splits=8,stages=4",
    "splits=16,stages=3",
    "splits=37,stages=2,ahead=1",
)
ATTEND += (
    "tile=128,splits=37",
    "tile=128,splits=37,stages=2,ahead=1",
    "splits=37,stages=3,ahead=1",
)
SCORE = ("programs=8,stages=1", "programs=2,stages=3", "programs=2,stages=2", "programs=3,stages=2")
TUNED = (
    *(Variant(f"chain {plan}", **CHAIN, attend=plan) for plan in ATTEND),
    *(Variant(f"chain scores {plan}", **CHAIN, score=plan) for plan in SCORE),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("vllm-rows.jsonl"))
    parser.add_argument("--cases", default=layer_bench.CASES, help="tokens x rows")
    parser.add_argument("--layers", type=int, default=6, help="in a graph; 2.2 GiB each")
    parser.add_argument("--heads", default="28/4", help="of queries and of keys")
    parser.add_argument("--only", default="", help="variants whose names contain this")
    parser.add_argument("--tuned", action="store_true", help="plans of the kernels, too")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="nothing begins after these")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    set_heads(*map(int, options.heads.split("/")))
    begin = time.monotonic()
    with torch.inference_mode(), options.out.open("w") as file:
        for row in rows_of(options, begin):
            line = json.dumps(row | {"heads": options.heads, "s": time.monotonic() - begin})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()


def set_heads(heads: int, kv_heads: int) -> None:
    """The shape of the layers, which vllm_layer has as constants."""
    page, width = layer_bench.PAGE, layer_bench.WIDTH
    layer_bench.HEADS, layer_bench.KV_HEADS = heads, kv_heads
    layer_bench.SHAPE = (8 * layer_bench.LONGEST // page, page, kv_heads, width)
    layer_bench.STRIDES = (page * kv_heads * width, kv_heads * width, width, 1)


def rows_of(options: argparse.Namespace, begin: float) -> Iterator[dict[str, Any]]:
    import triton

    layers = Layers(options.layers)
    dense = "flash_attention" if layer_bench.has_flash() else "stand_in"
    yield {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dense": dense,
    }
    for tokens, rows in (map(int, case.split("x")) for case in options.cases.split(",")):
        batch = Batch.of(rows, tokens, layers.rule)
        case = {"tokens": tokens, "rows": rows, "far": int(batch.chosen.sum())}
        empty = {
            name: timed(captured(feed, len(layers)), len(layers))
            for name, feed in feeds(layers, batch).items()
        }
        stock = times(layers.stock(batch), layers, batch, empty)
        yield case | {"variant": "stock", **stock}
        want = wanted_outputs(layers, batch)
        for variant in VARIANTS + TUNED * options.tuned:
            if options.only not in variant.name:
                continue
            row: dict[str, Any] = {"error": "no time left"}
            if time.monotonic() - begin < options.seconds:
                row = measured(variant, layers, batch, want, empty, stock)
            yield case | {"variant": variant.name} | row


def wanted_outputs(layers: Layers, batch: Batch) -> list[torch.Tensor]:
    """FlashAttention's output in near rows and that of gather's own op in far ones, as they are
    without any setting."""
    attend, found = layer_bench.dense_for(batch, batch.lengths), []
    for i in range(len(layers)):
        (q, out), (k, v) = layers.of(batch, i), layers.caches[i]
        near = torch.empty_like(out)
        attend(q, k.transpose(1, 2), v.transpose(1, 2), near)
        far = layer_bench.far_output(layers.served[i], q, k, v, batch)
        found.append(torch.where(batch.chosen[:, None, None], far, near))
    return found


def measured(
    variant: Variant,
    layers: Layers,
    batch: Batch,
    want: list[torch.Tensor],
    empty: dict[str, float],
    stock: dict[str, float],
) -> dict[str, Any]:
    """The row of one variant; its error where it gives something else or fails to compile."""
    before = settings(variant)
    try:
        found = outputs(layers.served_step(batch), layers, batch)
        pairs = list(zip(found, want, strict=True))
        assert all(x.isfinite().all() for x in found), "a row was not written"
        worst = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
        bound = 2.0**-6 * float(max(x.abs().max() for x in want))
        assert worst <= bound, f"differs by {worst:.3g}, more than {bound:.3g}"
        row = times(layers.served_step(batch), layers, batch, empty)
        lost = {f"{name}, lost": round(row[name] - stock[name], 2) for name in row}
        return {**row, **lost, "difference": worst}
    except FAILURES as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def settings(variant: Variant) -> list[tuple[Any, str, Any]]:
    """Set what the variant says; (owner, name, value) of what was there."""
    from attnplug import Gather
    from attnplug.ops.gather import gather_decode, gather_rows, page_scores

    stock, attend = gather_decode.plan_for, layer_bench.numbers(variant.attend)
    score = {"programs": page_scores.PROGRAMS, "stages": page_scores.STAGES}
    score |= layer_bench.numbers(variant.score)

    def plan_for(*args: Any, **options: Any) -> Any:
        plan = stock(*args, **options)
        return plan._replace(attend=plan.attend._replace(**attend))

    wanted = [
        (Gather, "rows_whole", variant.rows_whole),
        (gather_rows, "STAGES", variant.whole or gather_rows.STAGES),
        (gather_rows, "LONG_STAGES", variant.whole or gather_rows.LONG_STAGES),
        (gather_rows, "PROGRAMS", variant.programs),
        (gather_decode, "plan_for", plan_for if attend else stock),
        (gather_rows, "rows_plan", gather_rows.plan_of if attend else gather_rows.rows_plan),
        (page_scores, "PROGRAMS", score["programs"]),
        (page_scores, "STAGES", score["stages"]),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
    for owner, name, value in wanted:
        setattr(owner, name, value)
    return before


def outputs(step: Step, layers: Layers, batch: Batch) -> list[torch.Tensor]:
    """What a replay of the captured step leaves, after NaN was there; the same twice."""
    graph, found = captured(step, len(layers)), []
    for _ in range(2):
        for out in layers.outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        found.append([layers.of(batch, i)[1].clone() for i in range(len(layers))])
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert same, "two replays differ"
    return found[0]


def times(step: Step, layers: Layers, batch: Batch, empty: dict[str, float]) -> dict[str, float]:
    """Microseconds a layer, alone and behind other kernels."""
    found = {"back to back": timed(captured(step, len(layers)), len(layers))}
    for name, feed in feeds(layers, batch).items():

        def behind(i: int, feed: Callable[[int], None] = feed) -> None:
            feed(i)
            step(i)

        found[name] = timed(captured(behind, len(layers)), len(layers)) - empty[name]
    return {name: round(us, 2) for name, us in found.items()}


def feeds(layers: Layers, batch: Batch) -> dict[str, Callable[[int], None]]:
    """What runs in front of a layer, by the name of the time behind it."""
    alone = feed_alone(layers, batch)

    def flush(i: int) -> None:
        WEIGHTS[1].copy_(WEIGHTS[0])
        alone(i)

    if not WEIGHTS:
        WEIGHTS.append(torch.zeros(2, 96 << 20, dtype=torch.uint8, device="cuda"))
        WEIGHTS[:] = WEIGHTS[0].unbind()
    return {"apart": alone, "cold": flush}


def feed_alone(layers: Layers, batch: Batch) -> Callable[[int], None]:
    """A small kernel that writes a layer's queries, and waits for the layer in front."""
    kept = [x.clone() for x in layers.queries]

    def feed(i: int) -> None:
        q, _ = layers.of(batch, i)
        q.copy_(kept[i][: len(q)])

    return feed


if __name__ == "__main__":
    main()
