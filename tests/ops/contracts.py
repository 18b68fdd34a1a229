"""Every registered op in one table: the function that reaches it, and small inputs that it takes.
`test_contracts.py` holds each to what torch and a user may expect of any op; what is special to an
op stands in its own file."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from cases import random
from paged_cases import make

from attnplug import ops
from attnplug.ops.certified.scratch import Scratch
from attnplug.ops.common.divide_rows import divide_rows
from attnplug.ops.gather.block_bounds import empty_bounds
from attnplug.ops.gather.gather_pieces import gather_pieces, merge_pieces
from attnplug.ops.gather.gather_rows import gather_rows
from attnplug.ops.gather.page_bounds import empty_page_bounds
from attnplug.ops.gvr.page_codes import empty_page_codes
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.ops.sketch.attend_pages import attend_pages
from attnplug.ops.sketch.attend_picks import attend_picks
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.encode_pages import encode_pages
from attnplug.ops.sketch.merge_sketch import merge_sketch
from attnplug.ops.sketch.model_basis import Moments, fit_model_basis
from attnplug.ops.sketch.pages import empty_page_sketch, turns_of
from attnplug.ops.sketch.pick_tokens import pick_tokens
from attnplug.ops.sketch.prepare_pages import prepare_pages
from attnplug.ops.sketch.prepare_query import prepare_query
from attnplug.ops.sketch.scan_pages import scan_pages
from attnplug.ops.sketch.scan_sketch import scan_sketch
from attnplug.ops.sketch.sketch_pages import sketch_pages
from attnplug.ops.sketch.state import Basis, Codes, empty_codes
from attnplug.policies import _prefill_op

Inputs = dict[str, Any]
FP8 = torch.float8_e4m3fn


class Contract(NamedTuple):
    """One function. `cases` makes its arguments: the first with everything that it takes at once,
    which is what the refusals are tried on."""

    call: Callable[..., Any]
    ops: tuple[str, ...]  # the registered ops that the cases reach
    cases: Callable[[], Iterator[Inputs]]
    names: tuple[str, ...]  # that its errors begin with one of
    ungraded: tuple[str, ...] = ()  # floating tensors that are state, or results of other ops
    reshaped: tuple[str, ...] = ()  # tensors that it takes in other shapes


def rows_of(size: int, *, mask: bool = True) -> Inputs:
    """Two rows of another length and beginning, and a mask."""
    rows = {"lengths": torch.tensor([size - 30, size]), "start": torch.tensor([0, 9])}
    return rows | ({"key_mask": torch.ones(2, size, dtype=torch.bool)} if mask else {})


def token(heads: int = 4) -> torch.Tensor:
    return random(0, 2, heads, 1, 64)


def keys(size: int) -> Inputs:
    return {name: random(seed, 2, 2, size, 64) for seed, name in enumerate("kv", 1)}


def new_token() -> tuple[torch.Tensor, torch.Tensor]:
    return random(3, 2, 2, 1, 64), random(4, 2, 2, 1, 64)


SINKS = random(2, 4)
CAPPED = {"softcap": 3.0, "sinks": SINKS}


# --- dense, common ---------------------------------------------------------------------------


def dense_decode() -> Iterator[Inputs]:
    plain = {"q": token(), **keys(50), "scale": 0.125}
    yield plain | rows_of(50) | CAPPED | {"window": 7}
    yield plain
    paged = {"q": token(), **pages_of(144), "scale": 0.125}
    yield paged | {"start": torch.tensor([0, 3]), "window": 5, **CAPPED}
    yield paged | {"lengths": None}


def pages_of(room: int, page: int = 16) -> Inputs:
    """k, v, table and lengths of two rows on pages."""
    pages = make(0, [room - 14, room // 2], page=page, room=room // page, layout="tokens first")
    k, v = pages.kv.nan_to_num_()
    return {"k": k, "v": v, "table": pages.table.clamp_(min=0), "lengths": pages.lengths}


def divided() -> Iterator[Inputs]:
    lengths = torch.tensor([5, 0, 300], dtype=torch.int32)
    made = {"near": lengths.clone(), "far": lengths.clone(), "chosen": torch.zeros(3).bool()}
    yield {"lengths": lengths, **made, "row": 100, "alone": 200, "steps": 2}


# --- gather ----------------------------------------------------------------------------------

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
    telemetry = torch.zeros(2, 2, 2, 16, dtype=torch.float64)
    yield asked | rows_of(70) | CAPPED | {"telemetry": telemetry, "scratch": scratch}
    yield asked


# --- momo, stream ----------------------------------------------------------------------------


def prompt(tokens: int, size: int) -> Inputs:
    return {"q": random(0, 2, 4, tokens, 64), **keys(size)}


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
        yield asked | rows_of(100) | more | {"search": search}
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


def call_prefill_rows(**asked: Any) -> torch.Tensor:
    return _prefill_op.prefill_rows(**asked)


def own(
    call: Callable[..., Any], cases: Callable[[], Iterator[Inputs]], *more: str, inner=(), **kept
) -> Contract:
    """The row of a function that is named as its op is, and reaches `more` ops. What it hands on to
    `inner` ops is checked there."""
    name = call.__name__
    return Contract(call, (name, *more), cases, (name, *inner), **kept)


def sketch(call: Callable[..., Any], name: str, *ungraded: str) -> Contract:
    return Contract(call, (f"sketch_{name}",), link(name), (f"sketch_{name}",), ungraded)


def paged_sketch(call: Callable[..., Any], name: str, op: str, *ungraded: str) -> Contract:
    return Contract(call, (op,), paged_link(name), (op, "pick_tokens"), ungraded)


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


PARTS = ("select_blocks", "gather_attention")
STEP = {
    "ungraded": ("encoder", "queries", "v_mean", "recent", "hint", "fixed"),
    "reshaped": ("lengths",),  # a cache's count has no dimension
}
CONTRACTS = (
    own(ops.dense_decode, dense_decode, "dense_decode_paged"),
    own(divide_rows, divided),
    own(ops.block_bounds, block_bounds, ungraded=("bounds",)),
    own(ops.page_bounds, page_bounds, ungraded=("bounds",)),
    own(ops.select_blocks, select_blocks, "select_blocks_paged", ungraded=("bounds",)),
    own(ops.gather_attention, gather_attention, "gather_attention_paged"),
    own(
        ops.gather_decode, gather_decode, "gather_decode_uncounted", "gather_decode_paged",
        inner=PARTS, ungraded=("bounds",),
    ),
    own(ops.tiered_decode, tiered_decode, inner=PARTS, ungraded=("bounds", "near")),
    own(gather_pieces, pieces, inner=PARTS, ungraded=("bounds",)),
    own(merge_pieces, merged_pieces, ungraded=("pieces",)),
    own(gather_rows, served_rows, inner=PARTS, ungraded=("bounds",)),
    own(ops.score_tokens, score_tokens, "score_tokens_paged", ungraded=("steps",)),
    own(ops.top_tokens, top_tokens, ungraded=("steps",)),
    own(ops.topk, topk),
    own(ops.page_codes, page_codes, ungraded=("scales",)),
    own(ops.gather_tokens_attention, gather_tokens_attention, "gather_tokens_attention_paged"),
    own(ops.encode_keys, encode_keys, ungraded=("encoder",)),
    sketch(prepare_query, "prepare", "queries"),
    sketch(scan_sketch, "scan"),
    sketch(pick_tokens, "pick"),
    sketch(attend_picks, "attend", "projected", "cut", "norm"),
    sketch(merge_sketch, "merge"),
    paged_sketch(encode_pages, "encode", "encode_pages", "encoder", "turns"),
    paged_sketch(prepare_pages, "prepare", "sketch_prepare_pages", "scorer", "turns"),
    paged_sketch(scan_pages, "scan", "sketch_scan_pages"),
    paged_sketch(
        attend_pages, "attend", "sketch_attend_pages", "facts", "cut", "norm"
    ),
    paged_sketch(sketch_pages, "step", "sketch_pages", "scorer", "turns"),
    own(ops.sketch_decode, sketch_decode, "sketch_decode_uncounted", **STEP),
    own(
        ops.sketch_host_decode, sketch_host_decode, "sketch_host_decode_uncounted",
        inner=("sketch_decode",), **STEP,
    ),
    own(ops.quantize_kv, quantize_kv, ungraded=("tier",)),
    own(ops.certified_attention, certified_attention, ungraded=("tier", "telemetry", "scratch")),
    own(ops.block_sparse_attention, block_sparse_attention),
    own(ops.query_sparse_attention, query_sparse_attention),
    own(ops.measure_blocks, measure_blocks),
    own(ops.merge_block_rows, merge_block_rows),
    own(ops.delta_correct, delta_correct),
    own(ops.stream_mask, stream_mask),
    own(ops.stream_edges, stream_edges),
    own(ops.index_topk, indexed),
    own(ops.pool_keys, pool_keys, ungraded=("pooled",)),
    own(ops.block_maxima, block_maxima),
    own(ops.latent_attention, latent),
    Contract(call_prefill_rows, ("prefill_rows",), prefill_rows, ("momo",)),
)  # fmt: skip
