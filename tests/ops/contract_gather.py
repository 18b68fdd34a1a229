"""Small inputs of the ops of dense decoding and gather, for `contracts.py`."""

from collections.abc import Iterator

import torch
from contract_inputs import CAPPED, FP8, SINKS, Inputs, keys, new_token, pages_of, rows_of, token

from attnplug import ops
from attnplug.ops.gather.block_bounds import empty_bounds
from attnplug.ops.gather.gather_pieces import gather_pieces
from attnplug.ops.gather.page_bounds import empty_page_bounds


def dense_decode() -> Iterator[Inputs]:
    plain = {"q": token(), **keys(50), "scale": 0.125}
    yield plain | rows_of(50) | CAPPED | {"window": 7}
    yield plain
    paged = {"q": token(), **pages_of(144), "scale": 0.125}
    yield paged | {"start": torch.tensor([0, 3]), "window": 5, **CAPPED}
    yield paged | {"lengths": None}


def divided() -> Iterator[Inputs]:
    lengths = torch.tensor([5, 0, 300], dtype=torch.int32)
    made = {"near": lengths.clone(), "far": lengths.clone(), "chosen": torch.zeros(3).bool()}
    yield {"lengths": lengths, **made, "row": 100, "alone": 200, "steps": 2}


CHOICE = {"block": 16, "top_k": 3, "sink": 1, "local": 2}


def summaries(k: torch.Tensor, parts: int = 2, dtype: torch.dtype | None = None) -> Inputs:
    progress = torch.zeros(k.shape[0], 2, dtype=torch.int32)
    return {"bounds": empty_bounds(k, 16, parts, dtype=dtype), "progress": progress}


def block_bounds() -> Iterator[Inputs]:
    k = keys(50)["k"]
    for made in (summaries(k), summaries(k, 1, torch.int8)):
        yield {"k": k, **made, **rows_of(50), "block": 16, "band": made["bounds"].shape[3] == 1}
    yield {"k": k, **summaries(k), "block": 16}


def page_bounds() -> Iterator[Inputs]:
    paged = pages_of(96, 32)
    k, slots = paged["k"], torch.arange(7, 90)
    yield {"k": k, "bounds": empty_page_bounds(k, 16), "slots": slots, "block": 16}
    codes = empty_page_bounds(k, 16, dtype=torch.int8)
    yield {"k": k, "bounds": codes, "slots": slots, "block": 16, "band": True}
    yield {"k": k.to(FP8), "bounds": codes, "slots": slots, "block": 16}


def select_blocks() -> Iterator[Inputs]:
    k = keys(200)["k"]
    yield {"q": token(), "k": k, **summaries(k), **CHOICE, **rows_of(200), "scoring": "band"}
    yield {"q": token(), "k": k, **summaries(k), **CHOICE, "scoring": "bounds"}
    for dtype, scoring in ((None, "bounds"), (torch.int8, "band")):
        paged = pages_of(160, 32) | {"q": token(), "progress": None}
        del paged["v"]
        bounds = empty_page_bounds(paged["k"], 16, dtype=dtype)
        yield {**paged, "bounds": bounds, **CHOICE, "scoring": scoring}


def gather_attention() -> Iterator[Inputs]:
    index = torch.tensor([2, -1], dtype=torch.int32).repeat(2, 2, 1, 1)
    asked = {"q": token(), "index": index, "scale": 0.125, "block": 16, "sink": 1, "local": 2}
    yield asked | keys(90) | rows_of(90) | CAPPED
    yield asked | keys(90)
    picks = torch.tensor([[4, 0, -1], [1, 3, 2], [5, -1, -1]], dtype=torch.int32).repeat(2, 2, 1, 1)
    yield (
        asked | {"q": token().repeat(1, 1, 3, 1), "index": picks, "sink": 0, "local": 0} | keys(90)
    )
    yield asked | pages_of(96, 32)


def gather_decode() -> Iterator[Inputs]:
    new = dict(zip(("new_k", "new_v"), new_token(), strict=True))
    asked = {"q": token(), "scale": 0.125, **CHOICE}
    for count in (True, False):
        kv = keys(200)
        there = kv | summaries(kv["k"]) | {"lengths": torch.tensor([130, 77]), "count": count}
        more = {"start": torch.tensor([0, 9]), "key_mask": rows_of(200)["key_mask"]}
        yield asked | there | new | more | CAPPED
        yield asked | there | new
    paged = pages_of(160, 32)
    paged |= {"bounds": empty_page_bounds(paged["k"], 16), "progress": None}
    yield asked | paged | {"new_k": None, "new_v": None}


def tiered_decode() -> Iterator[Inputs]:
    kv, new = keys(200), new_token()
    near = ops.ResidentBlocks.empty(2, 2, 200, 64, 16, 2, 5, torch.float32, torch.device("cpu"))
    asked = {"q": token(), **kv, **summaries(kv["k"]), "near": near, "scale": 0.125, **CHOICE}
    asked["lengths"] = torch.tensor([130, 130])
    more = {"start": torch.tensor([0, 9]), "key_mask": rows_of(200)["key_mask"]}
    yield asked | {"new": new} | more | CAPPED
    yield asked


def on_pages() -> Inputs:
    paged = pages_of(160, 32)
    bounds = empty_page_bounds(paged["k"], 16)
    return {"q": token(), **paged, "bounds": bounds, "scale": 0.125, **CHOICE}


def in_fp8(there: Inputs) -> Inputs:
    """The same on pages in fp8."""
    k, v = (there[name].to(FP8) for name in "kv")
    scales = {name: torch.tensor([0.5]) for name in ("k_scale", "v_scale")}
    return there | {"k": k, "v": v, "bounds": empty_page_bounds(k, 16, dtype=torch.int8), **scales}


def pieces() -> Iterator[Inputs]:
    yield in_fp8(on_pages()) | {"slots": torch.tensor([31, -1]), "softcap": 3.0}
    yield on_pages() | {"slots": torch.tensor([31, -1]), "softcap": 3.0}
    yield on_pages()


def merged_pieces() -> Iterator[Inputs]:
    made, out = gather_pieces(**on_pages()), torch.zeros_like(token())
    yield {"pieces": made, "lengths": torch.tensor([146, 80]), "out": out, "sinks": SINKS}


def served_rows() -> Iterator[Inputs]:
    there = on_pages() | {"near": torch.tensor([0, 80]), "out": torch.zeros_like(token())}
    there["lengths"] = there["lengths"] * torch.tensor([1, 0])
    yield in_fp8(there) | {"slots": torch.tensor([31, -1])} | CAPPED
    yield there | {"slots": torch.tensor([31, -1])} | CAPPED
    yield there
