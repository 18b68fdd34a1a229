"""Small inputs of the ops of gvr, sketch and certified, for `contracts.py`."""

from collections.abc import Callable, Iterator

import torch
from cases import random
from contract_inputs import (
    CAPPED,
    SINKS,
    Inputs,
    keys,
    new_token,
    pages_of,
    rows_of,
    token,
)

from attnplug import ops
from attnplug.ops.certified.scratch import Scratch
from attnplug.ops.gvr.page_codes import empty_page_codes
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.ops.sketch.attend_picks import attend_picks
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.model_basis import Moments, fit_model_basis
from attnplug.ops.sketch.pages import empty_page_sketch, turns_of
from attnplug.ops.sketch.pick_tokens import pick_tokens
from attnplug.ops.sketch.prepare_pages import prepare_pages
from attnplug.ops.sketch.prepare_query import prepare_query
from attnplug.ops.sketch.scan_pages import scan_pages
from attnplug.ops.sketch.scan_sketch import scan_sketch
from attnplug.ops.sketch.state import Basis, Codes, empty_codes

# --- gvr -------------------------------------------------------------------------------------


def score_tokens() -> Iterator[Inputs]:
    codes, steps = quantize_keys(keys(90)["k"])
    asked = {"q": token(), "codes": codes, "steps": steps, "sink": 3, "window": 5}
    yield asked | rows_of(90)
    yield asked
    yield asked | {"q": random(1, 2, 4, 3, 64)} | rows_of(90)
    paged = pages_of(96, 32)
    codes, steps = quantize_keys(paged["k"])
    there = {"table": paged["table"], "lengths": torch.tensor([96, 96])}
    yield asked | {"codes": codes, "steps": steps, **there}


def top_tokens() -> Iterator[Inputs]:
    for case in score_tokens():
        if "table" not in case:
            yield case | {"k": 7}


def topk() -> Iterator[Inputs]:
    asked = {"scores": random(0, 2, 60), "k": 4}
    hint = torch.zeros(2, 5, dtype=torch.int32)
    yield asked | {"hint": hint, "lengths": torch.tensor([60]), "sorted": True}
    yield asked


def page_codes() -> Iterator[Inputs]:
    k = pages_of(96, 32)["k"]
    yield {"k": k, **empty_page_codes(k)._asdict(), "slots": torch.arange(7, 90)}


def gather_tokens_attention() -> Iterator[Inputs]:
    index = torch.tensor([22, -1], dtype=torch.int32).repeat(2, 2, 1, 1)
    asked = {"q": token(), "index": index, "scale": 0.125, "sink": 4, "window": 20}
    yield asked | keys(90) | rows_of(90) | CAPPED
    yield asked | keys(90)
    yield asked | pages_of(96, 32)


# --- sketch ----------------------------------------------------------------------------------


def sketched() -> tuple[Inputs, Basis, Codes]:
    """A cache of 900 tokens with its basis and its codes."""
    kv = {name: random(5 + i, 2, 2, 900, 64) for i, name in enumerate("kv")}
    basis, codes = fit_basis(*kv.values(), random(4, 2, 4, 40, 64)), empty_codes(kv["k"], 24)
    ops.encode_keys(*kv.values(), basis.encoder, *codes)
    return kv, basis, codes


def encode_keys() -> Iterator[Inputs]:
    kv, basis, _ = sketched()
    asked = {**kv, "encoder": basis.encoder}
    yield asked | empty_codes(kv["k"], 24)._asdict() | rows_of(900)
    yield asked | empty_codes(kv["k"], 24)._asdict()


def chain() -> dict[str, Inputs]:
    """What each op of a step of sketch gets from those before it."""
    kv, basis, codes = sketched()
    seen = {name: x for name, x in rows_of(900).items() if name != "key_mask"}
    q, mask = token(), {"key_mask": rows_of(900)["key_mask"]}
    first = {"q": q, **kv, "queries": basis.queries, "scale": 0.125, "softcap": 3.0} | seen | mask
    projected, fixed_out, fixed_lse = prepare_query(**first)
    ops.encode_keys(*kv.values(), basis.encoder, *codes, **seen)
    scan = {"projected": projected, "fixed_lse": fixed_lse, **codes._asdict(), "top_k": 60}
    scan |= {"parts": 2, "softcap": 3.0} | seen | mask
    shares, total, sums, norm, middle = scan_sketch(**scan)
    pick = {"shares": shares, "total": total, "middle": middle, "top_k": 60} | seen
    picks, cut = pick_tokens(**pick)
    attend = {"q": q, **kv, "projected": projected, "fine": codes.fine, "coarse": codes.coarse}
    attend |= {"picks": picks, "cut": cut, "norm": norm, "scale": 0.125, "pieces": 2}
    own = dict(zip(("pick_out", "pick_lse", "pick_sums"), attend_picks(**attend), strict=True))
    merge = {"q": q, "projected": projected, "fixed_out": fixed_out, "fixed_lse": fixed_lse, **own}
    merge |= {"sums": sums, "norm": norm, "cut": cut, "v_mean": basis.v_mean, "sinks": SINKS}
    return {"prepare": first, "scan": scan, "pick": pick, "attend": attend, "merge": merge}


def link(name: str) -> Callable[[], Iterator[Inputs]]:
    def cases() -> Iterator[Inputs]:
        case = chain()[name]
        yield case
        optional = ("lengths", "start", "key_mask", "sinks", "softcap")
        plain = {key: value for key, value in case.items() if key not in optional}
        if len(plain) < len(case) and name != "scan":  # whose codes are of these rows
            yield plain

    return cases


def sketch_decode() -> Iterator[Inputs]:
    kv, basis, codes = sketched()
    asked = {"q": token(), **kv, **basis._asdict(), **codes._asdict(), "scale": 0.1, "top_k": 60}
    more = rows_of(900) | CAPPED | {"hint": torch.full((2, 2), -9.0), "tail": "drop"}
    more |= {"new": new_token(), "recent": torch.zeros(2, 4, 8, 64)}
    more["lengths"] = torch.tensor([800, 890])
    yield asked | more
    yield asked | more | {"count": False}
    yield asked
    yield asked | {"q": random(1, 2, 4, 3, 64), "hint": more["hint"]} | rows_of(900) | CAPPED


def paged_chain() -> dict[str, Inputs]:
    """What each op of a step of sketch over pages gets from those before it."""
    paged = pages_of(900, 20)
    k, v, table, lengths = paged.values()
    inv_freq = 0.7 ** torch.arange(32)
    means = random(0, 2, 64).double(), torch.eye(64).double().expand(2, -1, -1)
    basis = fit_model_basis(Moments(*means, torch.eye(64).double().expand(4, -1, -1)), inv_freq)
    sketch = empty_page_sketch(k, 24)._asdict()
    kv, turns = {"k": k, "v": v}, {"turns": turns_of(inv_freq, 900)}
    slots = torch.arange(7, 90)
    written = {"slots": slots, "positions": slots + 2040}
    coded = {**kv, "encoder": basis.encoder, **turns, **sketch, **written}
    q, rows = token(), {"table": table, "lengths": lengths}
    first = {"q": q, **kv, "scorer": basis.scorer, **turns, **rows, "scale": 0.125, "softcap": 3.0}
    whole, facts, _, fixed_lse, scores, values = prepare_pages(**first)
    weights = {"whole": whole, "facts": facts}
    scan = {**weights, "fixed_lse": fixed_lse, "scores": scores, "values": values, **sketch, **rows}
    scan |= {"top_k": 60, "softcap": 3.0}
    shares, total, _, norm, middle, *_ = scan_pages(**scan)
    picks, cut = pick_tokens(shares, total, middle, top_k=60, lengths=lengths)
    attend = {"q": q, **kv, **weights, **sketch, "table": table, "picks": picks, "cut": cut}
    attend |= {"norm": norm, "scale": 0.125, "pieces": 2, "softcap": 3.0}
    step = first | sketch | {"top_k": 60, "sinks": SINKS}
    return {"encode": coded, "prepare": first, "scan": scan, "attend": attend, "step": step}


def paged_link(name: str) -> Callable[[], Iterator[Inputs]]:
    def cases() -> Iterator[Inputs]:
        case = paged_chain()[name]
        yield case
        plain = {key: value for key, value in case.items() if key not in ("sinks", "softcap")}
        if len(plain) < len(case):
            yield plain

    return cases


def sketch_host_decode() -> Iterator[Inputs]:
    for case in sketch_decode():
        if case["q"].shape[2] == 1:
            yield case | {"fixed": ops.FixedPart.empty(case["k"])}


# --- certified -------------------------------------------------------------------------------


def tier_of(kv: Inputs) -> ops.QuantizedKV:
    return ops.QuantizedKV.empty(2, 2, kv["k"].shape[2], 64, 16, "cpu")


def quantize_kv() -> Iterator[Inputs]:
    kv = keys(50)
    yield {**kv, "tier": tier_of(kv), **rows_of(50), "block": 16}
    yield {**kv, "tier": tier_of(kv), "block": 16}


def certified_attention() -> Iterator[Inputs]:
    kv = keys(70)
    tier = tier_of(kv)
    ops.quantize_kv(**kv, tier=tier, block=16)
    asked = {"q": token(), **kv, "tier": tier, "scale": 0.125, "block": 16, "k_max": 128}
    scratch = Scratch.empty(2, 2, 16, 16, 64, torch.float32, "cpu")
    scratch = scratch._replace(slots=torch.zeros(2, 2, 16, 16, 64))  # as on a GPU; a CPU needs none
    telemetry = torch.zeros(2, 2, 2, 18, dtype=torch.float64)
    yield asked | rows_of(70) | CAPPED | {"telemetry": telemetry, "scratch": scratch}
    yield asked
