"""The shared argument checks: what they accept, what they refuse, and which argument they name."""

import pytest
import torch

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops.common import (
    DTYPES,
    HEAD_DIMS,
    WIDE_HEAD_DIMS,
    check_attention_inputs,
    check_sequence_inputs,
    check_sinks,
    refuse_gradients,
    require,
)

Q, K = torch.zeros(2, 4, 1, 64), torch.zeros(2, 2, 9, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_accepts_every_dtype_and_head_dimension(dtype, width):
    q, k = torch.zeros(1, 6, 3, width, dtype=dtype), torch.zeros(1, 2, 5, width, dtype=dtype)
    check_attention_inputs("op", q, k, k)


def test_accepts_heads_of_512_where_an_op_has_kernels_for_them():
    k = torch.zeros(1, 2, 5, 512)
    check_attention_inputs("op", k, k, k, head_dims=WIDE_HEAD_DIMS)
    with pytest.raises(ArgumentError, match="272 is neither a multiple of 16 from 16 to 256 nor"):
        check_attention_inputs("op", None, k[..., :272], head_dims=WIDE_HEAD_DIMS)


def test_accepts_an_op_without_q_or_v():
    check_attention_inputs("op", None, K)
    check_attention_inputs("op", None, K, K)
    check_attention_inputs("op", Q, K)


@pytest.mark.parametrize(
    "q, k, v, message",
    [
        (Q[0], K, K, r"q has 3 dimensions, needs \[B,H,S,D\]"),
        (None, K[0], None, r"k has 3 dimensions, needs \[B,H,S,D\]"),
        (Q, K, K[0], r"v has 3 dimensions"),
        (Q.double(), K, K, "q is torch.float64, needs float32, float16 or bfloat16"),
        (None, K.double(), None, "k is torch.float64, needs"),
        (Q, K.half(), K, "k is torch.float16 but q is torch.float32"),
        (None, K, K.half(), "v is torch.float16 but k is torch.float32"),
        (Q, K.to("meta"), K, "k is on meta but q is on cpu; move them to one device"),
        (None, K, K.to("meta"), "v is on meta but k is on cpu"),
        (Q, K, K[:, :, 1:], r"k \(2, 2, 9, 64\) and v \(2, 2, 8, 64\) differ in shape"),
        (Q[:1], K, K, "q has batch 1 but k has batch 2"),
        (torch.zeros(2, 4, 1, 80), K, K, "q has head dimension 80 but k has 64"),
        (None, K[..., :40], None, "head dimension 40 is not a multiple of 16 from 16 to 256"),
        (None, torch.zeros(2, 2, 9, 272), None, "head dimension 272 is not a multiple of 16"),
        (None, torch.zeros(2, 2, 9, 512), None, "head dimension 512 is not a multiple of 16"),
        (None, torch.zeros(2, 2, 9, 0), None, "head dimension 0 is not a multiple of 16"),
        (Q[:, :3], K, K, "3 query heads are not a multiple of 2 KV heads"),
    ],
)
def test_refuses_tensors_and_names_them(q, k, v, message):
    with pytest.raises(ArgumentError, match="^op: " + message) as raised:
        check_attention_inputs("op", q, k, v)
    assert q is not None or " q " not in str(raised.value)  # an op without q must not hear of it


def test_accepts_tensors_of_one_row_or_of_every_row():
    mask = torch.ones(2, 9, dtype=torch.bool)
    for q in (Q, None):
        check_sequence_inputs("op", q, K, None, None, None)
        check_sequence_inputs("op", q, K, torch.tensor([9]), torch.tensor([0, 3]).int(), mask)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": torch.tensor([1.0])}, "lengths is torch.float32, needs int32 or int64"),
        ({"lengths": torch.tensor(1)}, r"lengths has shape \(\), needs \[1\] or \[B\] = \[2\]"),
        ({"start": torch.tensor([1, 2, 3])}, r"start has shape \(3,\)"),
        (
            {"start": torch.zeros(2, dtype=torch.int64, device="meta")},
            "start is on meta, {} on cpu",
        ),
        ({"key_mask": torch.ones(2, 9)}, "key_mask is torch.float32, needs bool"),
        ({"key_mask": torch.ones(2, 8).bool()}, r"key_mask has shape \(2, 8\), needs \[B,S\]"),
        ({"key_mask": torch.ones(2, 9).bool().to("meta")}, "key_mask is on meta, {} on cpu"),
    ],
)
@pytest.mark.parametrize("q", [Q, None], ids=["with q", "without q"])
def test_refuses_rows_and_names_them(q, change, message):
    rows = {"lengths": None, "start": None, "key_mask": None} | change
    with pytest.raises(ArgumentError, match="^op: " + message.format("k" if q is None else "q")):
        check_sequence_inputs("op", q, K, **rows)


def test_refuses_sinks():
    check_sinks("op", Q, torch.zeros(4))
    for sinks, message in (
        (torch.zeros(3), r"sinks has shape \(3,\), needs \[Hq\] = \[4\]"),
        (torch.zeros(4, dtype=torch.int32), "sinks is torch.int32, needs a float dtype"),
        (torch.zeros(4, device="meta"), "sinks is on meta, q on cpu"),
    ):
        with pytest.raises(ArgumentError, match="^op: " + message):
            check_sinks("op", Q, sinks)


def test_refuses_gradients_only_where_autograd_records():
    leaf = torch.zeros(1, requires_grad=True)
    refuse_gradients("op", Q, None)
    with torch.no_grad():
        refuse_gradients("op", leaf)
    with pytest.raises(GradientError, match=r"^op: an input requires grad"):
        refuse_gradients("op", None, leaf)


def test_require_names_the_op():
    require(True, "op", "fine")
    with pytest.raises(ArgumentError, match=r"^op: wrong$"):
        require(False, "op", "wrong")
