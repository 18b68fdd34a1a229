"""Rows of results that are made up, and a run of bench/report.py."""

from pathlib import Path

BENCH = Path(__file__).parent.parent.parent / "bench"


def timing(n, p50=10.0, **changes):
    row = dict(
        op="dense_decode", case="op", n=n, batch=1, heads_q=28, heads_kv=4, head_dim=128,
        dtype="bfloat16", options="", p20_us=0.9 * p50, p50_us=p50, p80_us=1.2 * p50, peer="cudnn",
        peer_p50_us=15.0, ratio=15.0 / p50, bytes=1, flops=1, ceiling_fraction=0.8134, gpu="H200",
        torch="2.11", triton="3.6", commit="abc", date="2026-01-02",
    )  # fmt: skip
    return row | changes


QUALITY = dict(
    task="needle", model="smollm2", n=4096, trials=20, dense=0.95, policy="momo(gamma=16)",
    value=0.9, low=0.7, high=0.98,
)  # fmt: skip


def run(report, tree, *more):
    where = ["--root", str(tree), "--results", str(tree / "bench" / "results")]
    return report.main([*where, *more])
