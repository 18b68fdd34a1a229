"""Small inputs of the ops of momo, stream and models that are sparse by training, for
`contracts.py`."""

from collections.abc import Iterator

import torch
from cases import random
from contract_inputs import SINKS, Inputs, keys, prompt, rows_of

# --- momo, stream ----------------------------------------------------------------------------


def block_sparse_attention() -> Iterator[Inputs]:
    index = torch.tensor([3, -1, 1], dtype=torch.int32).repeat(2, 4, 2, 1)
    asked = prompt(20, 40) | {"index": index, "scale": 0.125, "query_block": 16, "block": 8}
    asked |= {"sink": 1, "window": 4}
    yield asked | rows_of(40) | {"softcap": 3.0}
    yield asked | {"rows": random(3, 2, 4, 5, 64), "gamma": 4, "weight": 0.5}


def query_sparse_attention() -> Iterator[Inputs]:
    asked = prompt(40, 50) | {"scale": 0.3, "gamma": 3, "block": 16, "top_k": 3, "exact_k": 1}
    for algorithm in ("estimated", "exact"):
        yield asked | rows_of(50) | {"algorithm": algorithm}
    yield asked | {"algorithm": "exact", "top_k": 0, "exact_k": 0, "softcap": 2.0}


def measure_blocks() -> Iterator[Inputs]:
    before = torch.tensor([[1, 2]], dtype=torch.int32)
    asked = prompt(40, 48) | {"before": before, "scale": 0.125, "gamma": 8, "block": 16}
    asked |= {"query_block": 32, "top_k": 3, "sink": 1}
    yield asked | rows_of(48) | {"softcap": 2.0}
    yield asked | {"v": None}


def merge_block_rows() -> Iterator[Inputs]:
    index = torch.tensor([5, -1, 2, 8], dtype=torch.int32).repeat(2, 2, 6, 1)
    asked = {"index": index, "score": random(0, 2, 2, 6, 4), "lse": random(1, 2, 2, 6)}
    asked |= {"rows": 4, "trim": 5}
    yield asked | {"sink": 2, "before": torch.tensor([[3, 7]], dtype=torch.int32)}
    yield asked | {"merge": "mean"}


def delta_correct() -> Iterator[Inputs]:
    asked = {"out_sparse": random(0, 2, 2, 20, 64), "out_rows": random(1, 2, 2, 3, 64)}
    asked |= {"gamma": 8, "weight": 0.5}
    yield asked | {"lengths": torch.tensor([30]), "start": torch.tensor([12]), "kv_length": 20}
    yield asked


def stream_mask() -> Iterator[Inputs]:
    asked = {"q": random(0, 2, 4, 40, 64), "k": keys(100)["k"], "query_block": 16, "block": 32}
    asked["top_k"] = 3
    more = {"budget": torch.full((1, 4, 3), 2), "block_mask": torch.ones(1, 1, 3, 4).bool()}
    for search in ("bounds", "branches"):
        yield asked | rows_of(100) | more | {"search": search, "gap": 4.0}
        yield asked | {"search": search}


def stream_edges() -> Iterator[Inputs]:
    index = torch.tensor([2, -1, 0], dtype=torch.int32).repeat(2, 4, 2, 1)
    asked = prompt(20, 60) | {"index": index, "scale": 0.1, "query_block": 16, "block": 16}
    yield asked | rows_of(60) | {"weights": "value", "output": True}
    yield asked | {"weights": "score"}


def prefill_rows() -> Iterator[Inputs]:
    policy = "momo(gamma=4, block=16, query_block=32, top_k=2, exact_k=1, tail=0, min_tokens=0)"
    asked = prompt(120, 130) | {"scale": 0.125, "softcap": 0.0, "policy": policy}
    yield asked | {"sinks": SINKS} | rows_of(130)
    yield asked | dict.fromkeys(("sinks", "lengths", "start", "key_mask"))


# --- sparse by training ----------------------------------------------------------------------


def indexed() -> Iterator[Inputs]:
    inputs = {
        "q": random(0, 2, 3, 4, 16),
        "weights": random(1, 2, 3, 4),
        "keys": random(2, 2, 50, 16),
    }
    rows = rows_of(50)
    del rows["start"]
    yield inputs | rows | {"k": 9, "scale": 0.2}
    yield inputs | {"k": 60, "scale": 0.2}
    seen = torch.tensor([[0, 20, 50], [7, 8, 8]])
    yield inputs | {"k": 9, "scale": 0.2, "seen": seen}
    stored = {"keys": inputs["keys"].to(torch.float8_e4m3fn), "key_scale": random(3, 2, 50).abs()}
    yield inputs | stored | rows | {"k": 9, "scale": 0.2}


def pool_keys() -> Iterator[Inputs]:
    turns = random(1, 2, 50, 8)
    inputs = {
        "pooled": random(2, 2, 12, 16),
        "keys": random(0, 2, 50, 16),
        "cos": turns.cos(),
        "sin": turns.sin(),
        "weight": random(3, 16),
        "since": torch.tensor([0, 5]),
        "until": torch.tensor([9, 6]),
        "ratio": 4,
        "eps": 1e-6,
    }
    yield inputs | {"slots": torch.arange(50, dtype=torch.int32).repeat(2, 1)}
    yield inputs


def block_maxima() -> Iterator[Inputs]:
    inputs = {"q": random(0, 2, 4, 3, 16), "keys": random(1, 2, 50, 16), "block": 16}
    yield inputs | {"positions": torch.tensor([[47, 48, 49], [-1, 3, 60]])}
    yield inputs | {"positions": torch.tensor([[0, 1, 2]], dtype=torch.int32).expand(2, -1)}


def latent() -> Iterator[Inputs]:
    inputs = {"q_latent": random(0, 2, 3, 4, 16), "q_rope": random(1, 2, 3, 4, 8)}
    inputs |= {"latents": random(2, 2, 50, 16), "rope": random(3, 2, 50, 8), "scale": 0.2}
    rows = rows_of(50)
    del rows["start"]
    picks = torch.arange(9, dtype=torch.int32).repeat(2, 3, 1)
    yield inputs | rows | {"picks": picks, "sinks": SINKS}
    yield inputs
