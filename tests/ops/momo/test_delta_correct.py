"""delta_correct against its formula in fp64."""

import pytest
import torch
from cases import WIDTHS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from momo_cases import call_op

from attnplug.errors import ArgumentError
from attnplug.ops.momo import delta_correct as op
from attnplug.ops.momo.delta_correct import delta_correct


def call(
    device_path, out_sparse, out_rows, gamma, lengths=None, start=None, kv_length=None, weight=1.0
):
    options = dict(gamma=gamma, weight=weight, lengths=lengths, start=start, kv_length=kv_length)
    if device_path == ("cpu", "kernel"):
        options["kv_length"] = kv_length or out_sparse.shape[2]  # the launcher has no default
    ways = delta_correct, op._allocate, op.launch_delta_correct
    return call_op(device_path, *ways, (out_sparse, out_rows), options)


def oracle(out_sparse, out_rows, gamma, firsts, weight):
    """-> fp64 result, and per batch row the queries that are rows."""
    want = torch.zeros(out_sparse.shape, dtype=torch.float64)
    wide, rows = out_sparse.double(), out_rows.double()
    for b, first in enumerate(firsts):
        t = torch.arange(first, out_sparse.shape[2])
        row = (t - first) // gamma
        want[b, :, t] = wide[b, :, t] + weight * (rows[b, :, row] - wide[b, :, first + row * gamma])
        want[b, :, first::gamma] = rows[b, :, : len(t[::gamma])]
    return want


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dim=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    gamma=st.sampled_from([1, 4, 16]),
    weight=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    queries=st.integers(1, 70),
    extra=st.integers(0, 30),
    by_tensor=st.booleans(),
    begins=st.lists(st.integers(0, 90), min_size=2, max_size=2),
    seed=st.integers(0, 2**31),
)
def test_matches_fp64(
    device_path, dim, dtype, gamma, weight, queries, extra, by_tensor, begins, seed
):
    if device_path == ("cpu", "kernel") and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter truncates when it rounds to bfloat16
    generator = torch.Generator().manual_seed(seed)
    rows = -(-queries // gamma)
    out_sparse = torch.randn(2, 3, queries, dim, generator=generator).to(dtype)
    out_rows = torch.randn(2, 3, rows, dim, generator=generator).to(dtype)
    length = queries + extra
    where = dict(lengths=torch.tensor([length])) if by_tensor else dict(kv_length=length)
    where["weight"] = weight
    got = call(device_path, out_sparse, out_rows, gamma, start=torch.tensor(begins), **where)
    firsts = [min(max(0, begin - extra), queries) for begin in begins]
    want = oracle(out_sparse, out_rows, gamma, firsts, weight)
    assert got.dtype == dtype
    # fp32 arithmetic and one rounding.
    slack = 0.51 * torch.finfo(dtype).eps * want.abs() + 1e-6
    assert ((got.double() - want).abs() <= slack).all()
    for b, first in enumerate(firsts):
        assert (got[b, :, :first] == 0).all()
        count = len(range(first, queries, gamma))
        assert torch.equal(got[b, :, first::gamma], out_rows[b, :, :count])


def test_rows_are_exact_where_arithmetic_would_not_be(device_path):
    """1e8 + (1 - 1e8) is not 1 in fp32, inf + (1 - inf) is NaN, 0 + (-0) loses a sign: rows are
    copied."""
    out_sparse = torch.full((1, 1, 9, 64), 1e8)
    out_sparse[0, 0, 4] = torch.inf
    out_rows = torch.ones(1, 1, 3, 64)
    out_rows[..., 0] = -0.0
    got = call(device_path, out_sparse, out_rows, 4)
    assert torch.equal(got[:, :, ::4].view(torch.int32), out_rows.view(torch.int32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_not_finite_surfaces(device_path):
    out_sparse, out_rows = torch.zeros(1, 1, 12, 64), torch.zeros(1, 1, 3, 64)
    out_sparse[0, 0, 2, 5] = torch.nan
    out_rows[0, 0, 1, 6] = torch.inf
    out_sparse[0, 0, 8, 7] = torch.nan
    got = call(device_path, out_sparse, out_rows, 4)
    assert got.isnan().nonzero()[:, 2:].tolist() == [[2, 5], [9, 7], [10, 7], [11, 7]]
    assert got.isposinf().nonzero()[:, 2:].tolist() == [[4, 6], [5, 6], [6, 6], [7, 6]]


def test_padded_row_equals_row_alone(device_path):
    generator = torch.Generator().manual_seed(1)
    out_sparse = torch.randn(2, 2, 40, 64, generator=generator)
    out_rows = torch.randn(2, 2, 5, 64, generator=generator)
    got = call(device_path, out_sparse, out_rows, 8, start=torch.tensor([0, 13]))
    alone = call(device_path, out_sparse[1:, :, 13:], out_rows[1:, :, :4], 8)
    assert torch.equal(got[1:, :, 13:], alone)


def test_strides_are_honoured(device_path):
    generator = torch.Generator().manual_seed(2)
    out_sparse = torch.randn(2, 2, 40, 64, generator=generator)
    out_rows = torch.randn(2, 2, 5, 64, generator=generator)
    want = call(device_path, out_sparse, out_rows, 8)
    out_sparse = out_sparse.transpose(1, 2).contiguous().transpose(1, 2)
    out_rows = out_rows.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(call(device_path, out_sparse, out_rows, 8), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(out_rows=torch.zeros(1, 2, 4, 64)), r"out_rows has shape \(1, 2, 4, 64\)"),
        (dict(out_rows=torch.zeros(1, 2, 3, 64).half()), "out_rows is torch.float16"),
        (dict(out_sparse=torch.zeros(1, 2, 20, 64).long()), "out_sparse is torch.int64"),
        (dict(gamma=0), "gamma is 0"),
        (dict(weight=1.5), "weight is 1.5, needs 0 to 1"),
        (dict(start=torch.tensor([1, 2])), r"start has shape \(2,\)"),
        (dict(lengths=torch.tensor([1.0])), "lengths is torch.float32"),
    ],
)
def test_bad_arguments(change, message):
    good = dict(out_sparse=torch.zeros(1, 2, 20, 64), out_rows=torch.zeros(1, 2, 3, 64), gamma=8)
    with pytest.raises(ArgumentError, match=message):
        delta_correct(**(good | change))
