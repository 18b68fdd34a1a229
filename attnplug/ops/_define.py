"""The old place of `define_op` and the checks, kept for one release: import them from
`attnplug.ops`."""

import warnings

from attnplug.ops.common.checks import (
    DTYPES,
    HEAD_DIMS,
    check_attention_inputs,
    check_sequence_inputs,
)
from attnplug.ops.common.define import LIBRARY, define_op, refuse_gradients, require
from attnplug.ops.common.reference import sinks_on_cpu
from attnplug.ops.common.rows import mask_bytes, row_step, rows_on_cpu

__all__ = [
    "DTYPES",
    "HEAD_DIMS",
    "LIBRARY",
    "check_attention_inputs",
    "check_sequence_inputs",
    "define_op",
    "mask_bytes",
    "refuse_gradients",
    "require",
    "row_step",
    "rows_on_cpu",
    "sinks_on_cpu",
]

warnings.warn(
    "attnplug.ops._define has moved: import define_op and the checks from attnplug.ops.common; "
    "this module goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
