"""A prefill's rows as one op, which compiled code calls: it does not look into an op, so that what
depends on a prompt's length there is no graph of its own.

    out = method._attend_rows(call),   the method by its text, such as "momo(gamma=16)"

It decides as traced code would: the host reads nothing."""

import functools
from typing import Any

from attnplug.call import AttentionCall
from attnplug.models.sync import without_sync
from attnplug.ops.common.checks import (
    WIDE_HEAD_DIMS,
    check_attention_inputs,
    check_sequence_inputs,
    check_sinks,
)
from attnplug.ops.common.define import define_composite, refuse_gradients
from attnplug.policies.base import Phase
from attnplug.policies.grammar import parse_policy

METHODS: dict[str, type[Phase]] = {}  # each method that has such rows adds itself


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    return parse_policy(text, METHODS).prefill


def _run(q, k, v, sinks, lengths, start, key_mask, scale, softcap, policy):
    _check(policy, q, k, v, sinks, lengths, start, key_mask)
    rows = dict(sinks=sinks, lengths=lengths, start=start, key_mask=key_mask)
    with without_sync():
        return _parsed(policy)._attend_rows(AttentionCall(q, k, v, scale, softcap, **rows))


def _allocate(q, k, v, sinks, lengths, start, key_mask, scale, softcap, policy):
    _check(policy, q, k, v, sinks, lengths, start, key_mask)
    return q.new_empty(q.shape)


def _check(policy, q, k, v, sinks, lengths, start, key_mask):
    refuse_gradients(policy, q, k, v, sinks)
    check_attention_inputs(policy, q, k, v, head_dims=WIDE_HEAD_DIMS)
    check_sequence_inputs(policy, q, k, lengths, start, key_mask)
    if sinks is not None:
        check_sinks(policy, q, sinks)


prefill_rows = define_composite(
    "prefill_rows(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? lengths, Tensor? start, "
    "Tensor? key_mask, float scale, float softcap, str policy) -> Tensor",
    allocate=_allocate,
    run=_run,
)
