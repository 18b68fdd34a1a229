"""A bill that is known, rows as it would have them, and the committed rows."""

from pathlib import Path

import numpy as np

from attnplug import Gather, plan
from attnplug.plan_answer import Asked, plan_for, read_options

SHAPE = plan.Shape(layers=3, heads_kv=2, head_dim=64, weights=1e9)

EXTRA = 2e-4

BILL = plan.Bill(2e12, 1e-3, {name: plan.Extra(EXTRA) for name in plan.METHODS})

RESULTS = Path(__file__).parent.parent / "bench/results"

FILES = ("e2e_decode", "e2e_gather", "gvr", "sketch")

ROWS = [RESULTS / f"{name}.json" for name in FILES]


def row(op: str, batch: int, nbytes: float, seconds: float) -> dict:
    return dict(
        case="e2e-decode",
        op=op,
        batch=batch,
        bytes=nbytes,
        options="",
        p50_us=seconds * 1e6,
        policy="dense" if op == "dense_decode" else op,
    )


def rows(bill: plan.Bill, batches=(1, 4), noise: float = 0.0) -> list[dict]:
    """What a machine of that bill would measure."""
    random = np.random.default_rng(0)
    made = []
    for batch in batches:
        for n in (1 << 14, 1 << 17, 1 << 20):
            for op, read, extra in (
                ("dense_decode", SHAPE.cached(n), 0.0),
                ("gather", SHAPE.read(Gather(), n), EXTRA),
            ):
                nbytes = SHAPE.weights + batch * read
                seconds = nbytes / bill.bandwidth + bill.fixed + extra
                made.append(row(op, batch, nbytes, seconds * (1 + noise * random.normal())))
    return made


def asked_for(policy: str, shape=plan.SHAPES["qwen2.5-7b"], batch: int = 1, **more) -> Asked:
    return plan_for(shape, plan.H200, read_options([8192], batch, policy, **more), batch, **more)
