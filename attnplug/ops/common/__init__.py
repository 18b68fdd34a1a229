"""What every family of ops stands on, and what an op of your own imports
(docs/extend/add-an-op.md).

Each file holds one subject, and at least two families call it. It imports nothing of attnplug but
the errors.
"""

from attnplug.ops.common.checks import (
    BLOCKS,
    DTYPES,
    HEAD_DIMS,
    WIDE_HEAD_DIMS,
    check_attention_inputs,
    check_sequence_inputs,
    check_sinks,
)
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import Card, card, early
from attnplug.ops.common.reference import reference_kept, reference_rows, sinks_on_cpu
from attnplug.ops.common.rows import NO_MASK, mask_bytes, row_span, row_step, rows_on_cpu, shown
from attnplug.ops.common.softmax import LN2, LOG2E, attend_tile, base_two, online_softmax, softcap
from attnplug.ops.common.splits import launch_merge, merge_splits, pieces_of, store_piece
from attnplug.ops.common.views import (
    Cache,
    Output,
    Query,
    Rows,
    RowSteps,
    Shape,
    Token,
    begin_of,
    cache_of,
    query_of,
    rows_of,
    shape_of,
    steps_of,
    token_of,
)

__all__ = [
    "BLOCKS",
    "DTYPES",
    "HEAD_DIMS",
    "LN2",
    "LOG2E",
    "NO_MASK",
    "WIDE_HEAD_DIMS",
    "Cache",
    "Card",
    "Output",
    "Query",
    "RowSteps",
    "Rows",
    "Shape",
    "Token",
    "attend_tile",
    "base_two",
    "begin_of",
    "cache_of",
    "card",
    "check_attention_inputs",
    "check_sequence_inputs",
    "check_sinks",
    "define_op",
    "early",
    "launch_merge",
    "mask_bytes",
    "merge_splits",
    "online_softmax",
    "pieces_of",
    "query_of",
    "reference_kept",
    "reference_rows",
    "refuse_gradients",
    "require",
    "row_span",
    "row_step",
    "rows_of",
    "rows_on_cpu",
    "shape_of",
    "shown",
    "sinks_on_cpu",
    "softcap",
    "steps_of",
    "store_piece",
    "token_of",
]
