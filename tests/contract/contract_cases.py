"""The policies of the contract, a row each. A method that serves a phase has a row of its own name:
every suite here, the docs' table of what is served and the CUDA graphs take it from there."""

from dataclasses import dataclass

import attnplug
from attnplug.policies import methods


@dataclass(frozen=True)
class Case:
    """A policy, and `exact`, the same with a budget that covers every text of the contract. A NaN
    in the first third of 70 tokens is to be within `policy`'s reach (promise 8).
    `family` and `graphs` are exact settings for the model families and for CUDA graphs, where those
    of `exact` would not do."""

    policy: str
    exact: str
    family: str = ""
    graphs: str = ""


MOMO = Case(
    "momo(gamma=8, block=16, query_block=16, top_k=2, delta=0.5, tail=8, min_tokens=0)",
    "momo(gamma=8, block=16, query_block=16, top_k=8, tail=8, min_tokens=0)",
    family="momo(gamma=4, block=16, query_block=16, top_k=8, delta=0.5, tail=4, min_tokens=0)",
    graphs="momo(gamma=8, block=16, query_block=16, top_k=4, tail=8, min_tokens=0)",
)
GATHER = Case(
    "gather(k=1, block=16, sink=1, local=2, min_tokens=0)",
    "gather(k=8, block=16, sink=1, local=2, min_tokens=0)",
    family="gather(k=4, block=16, sink=0, local=1, min_tokens=0)",
)
CERTIFIED = Case(
    "certified(block=16, min_tokens=0)",
    "certified(block=16, coverage=1.0, k_min=64, v_tol=0.0, min_tokens=0)",
)
SKETCH = Case("sketch(k=16, min_tokens=0)", "sketch(min_tokens=0)")
HOST_SKETCH = Case("sketch(k=16, min_tokens=0, kv='host')", "sketch(min_tokens=0, kv='host')")
STREAM = "stream(top_k=1, block=16, query_block=16)"
BRANCHES = "stream(top_k=2, block=16, search='branches')"
CASES = {
    "dense": Case("dense", "dense"),
    "auto": Case("auto", "auto"),
    "momo": MOMO,
    "gather": GATHER,
    "exact": Case(
        "exact(draft='gather(k=1, block=16, sink=1, local=2)', m=3, min_tokens=0)",
        "exact(draft='gather(k=8, block=16, sink=1, local=2)', m=3, min_tokens=0)",
    ),
    "gather in host memory": Case(
        "gather(k=1, block=16, sink=1, local=2, min_tokens=0, kv='host', resident=2)",
        "gather(k=8, block=16, sink=1, local=2, min_tokens=0, kv='host', resident=9)",
    ),
    "gvr": Case(
        "gvr(k=8, sink=2, window=8, min_tokens=0)",
        "gvr(k=512, sink=2, window=8, min_tokens=0)",
        family="gvr(k=128, sink=2, window=4, min_tokens=0)",
        graphs="gvr(k=64, sink=2, window=8, min_tokens=0)",
    ),
    "certified": CERTIFIED,
    "sketch": SKETCH,
    "sketch in host memory": HOST_SKETCH,
    "momo+certified": Case(
        f"{MOMO.policy}+{CERTIFIED.policy}",
        f"{MOMO.exact}+{CERTIFIED.exact}",
    ),
    "momo+gather": Case(f"{MOMO.policy}+{GATHER.policy}", f"{MOMO.exact}+{GATHER.exact}"),
    "momo+sketch": Case(f"{MOMO.policy}+{SKETCH.policy}", f"{MOMO.exact}+{SKETCH.exact}"),
    "momo+sketch in host memory": Case(
        f"{MOMO.policy}+{HOST_SKETCH.policy}",
        f"{MOMO.exact}+{HOST_SKETCH.exact}",
    ),
    "sketch+stream": Case(f"{SKETCH.policy}+{STREAM}", f"{SKETCH.exact}+{STREAM}"),
    "momo+gather+stream": Case(
        f"{MOMO.policy}+{GATHER.policy}+{BRANCHES}",
        f"{MOMO.exact}+{GATHER.exact}+{BRANCHES}",
    ),
    "prefill=stream": Case(
        f"prefill={STREAM}", "prefill=stream(top_k=8, block=16, query_block=16)"
    ),
    "prefill=stream by branches": Case(
        "prefill=stream(top_k=2, block=16, query_block=16, search='branches')",
        "prefill=stream(top_k=8, block=16, query_block=16, search='branches')",
    ),
}


def shipped() -> list[str]:
    """The names of attnplug's own methods that serve a prefill or a decode."""
    return [
        name
        for name, cls in methods().items()
        if cls.__module__.startswith(f"{attnplug.__name__}.policies.")
        and cls.phases & {"prefill", "decode"}
    ]


# The rows of single methods, by name.
METHODS = {name: case for name, case in CASES.items() if name in shipped()}
FAMILY = {name: case.family or case.exact for name, case in METHODS.items()}
# Rows of methods that keep their cache elsewhere.
VARIANTS = {name: case for name, case in CASES.items() if name.endswith(" in host memory")}
GRAPHS = {name: case.graphs or case.exact for name, case in (METHODS | VARIANTS).items()}
