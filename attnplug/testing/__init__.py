"""Public test tools, the ones attnplug's own suite uses, for an op or a policy of your own.

`attention_inputs` is a hypothesis strategy of attention inputs. `oracle_attention` is attention in
fp64, and `dense_error` what plain low-precision attention loses against it. `check_op` holds an op
to its oracle, and `check_policy` a policy to the contract (docs/extend).
"""

from attnplug.testing.inputs import (
    KINDS,
    LAYOUTS,
    AttentionInputs,
    attention_inputs,
    make_inputs,
    odd_inputs,
)
from attnplug.testing.op import check_op
from attnplug.testing.oracle import dense_error, oracle_attention, plain_attention, tolerance
from attnplug.testing.policy import check_policy, tiny_model
from attnplug.testing.report import Check, CheckReport

__all__ = [
    "KINDS",
    "LAYOUTS",
    "AttentionInputs",
    "Check",
    "CheckReport",
    "attention_inputs",
    "check_op",
    "check_policy",
    "dense_error",
    "make_inputs",
    "odd_inputs",
    "oracle_attention",
    "plain_attention",
    "tiny_model",
    "tolerance",
]
