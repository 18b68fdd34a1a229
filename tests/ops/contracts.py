"""Every registered op in one table: the function that reaches it, and small inputs that it takes.
`test_contracts.py` holds each to what torch and a user may expect of any op; what is special to an
op stands in its own file."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from contract_gather import (
    block_bounds,
    dense_decode,
    divided,
    gather_attention,
    gather_decode,
    merged_pieces,
    page_bounds,
    pieces,
    select_blocks,
    served_rows,
    tiered_decode,
)
from contract_inputs import Inputs
from contract_prompts import (
    block_maxima,
    block_sparse_attention,
    delta_correct,
    indexed,
    latent,
    measure_blocks,
    merge_block_rows,
    pool_keys,
    prefill_rows,
    query_sparse_attention,
    stream_edges,
    stream_mask,
)
from contract_tokens import (
    certified_attention,
    encode_keys,
    gather_tokens_attention,
    link,
    page_codes,
    paged_link,
    quantize_kv,
    score_tokens,
    sketch_decode,
    sketch_host_decode,
    top_tokens,
    topk,
)

from attnplug import ops
from attnplug.ops.common.divide_rows import divide_rows
from attnplug.ops.gather.gather_pieces import gather_pieces, merge_pieces
from attnplug.ops.gather.gather_rows import gather_rows
from attnplug.ops.sketch.attend_pages import attend_pages
from attnplug.ops.sketch.attend_picks import attend_picks
from attnplug.ops.sketch.encode_pages import encode_pages
from attnplug.ops.sketch.merge_sketch import merge_sketch
from attnplug.ops.sketch.pick_tokens import pick_tokens
from attnplug.ops.sketch.prepare_pages import prepare_pages
from attnplug.ops.sketch.prepare_query import prepare_query
from attnplug.ops.sketch.scan_pages import scan_pages
from attnplug.ops.sketch.scan_sketch import scan_sketch
from attnplug.ops.sketch.sketch_pages import sketch_pages
from attnplug.policies import _prefill_op


class Contract(NamedTuple):
    """One function. `cases` makes its arguments: the first with everything that it takes at once,
    which is what the refusals are tried on."""

    call: Callable[..., Any]
    ops: tuple[str, ...]  # the registered ops that the cases reach
    cases: Callable[[], Iterator[Inputs]]
    names: tuple[str, ...]  # that its errors begin with one of
    ungraded: tuple[str, ...] = ()  # floating tensors that are state, or results of other ops
    reshaped: tuple[str, ...] = ()  # tensors that it takes in other shapes


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
    paged_sketch(attend_pages, "attend", "sketch_attend_pages", "facts", "cut", "norm"),
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
