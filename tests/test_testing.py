"""attnplug.testing finds what is wrong and passes what is right."""

import dataclasses
import math
import sys

import hypothesis
import pytest
import torch

from attnplug.errors import ArgumentError
from attnplug.testing import (
    AttentionInputs,
    Check,
    CheckReport,
    attention_inputs,
    check_op,
    dense_error,
    make_inputs,
    odd_inputs,
    oracle_attention,
    plain_attention,
    tolerance,
)

BF16 = torch.bfloat16

# torch 2.13's inductor warns of its own use of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def by_hand(x, window=0, softcap=0.0, sinks=None):
    """Attention written as sums over single keys."""
    batch, heads, queries, _ = x.q.shape
    out, lse = torch.zeros(x.q.shape).double(), torch.full((batch, heads, queries), -torch.inf)
    for b in range(batch):
        length = x.k.shape[2] if x.lengths is None else int(x.lengths.expand(batch)[b])
        first = 0 if x.start is None else int(x.start.expand(batch)[b])
        for h in range(heads):
            kv = h * x.k.shape[1] // heads
            for t in range(queries):
                pos = length - queries + t
                low = max(first, pos - window + 1) if window else first
                seen = [s for s in range(low, pos + 1) if x.key_mask is None or x.key_mask[b, s]]
                logits = [float(x.q[b, h, t].double() @ x.k[b, kv, s].double()) for s in seen]
                logits = [s * x.scale for s in logits]
                if softcap:
                    logits = [softcap * math.tanh(s / softcap) for s in logits]
                total = sum(math.exp(s) for s in logits)
                if logits:
                    lse[b, h, t] = math.log(total)
                total += 0 if sinks is None else math.exp(float(sinks[h]))
                for s, logit in zip(seen, logits, strict=True):
                    out[b, h, t] += math.exp(logit) / total * x.v[b, kv, s].double()
    return out, lse.double()


@hypothesis.given(
    attention_inputs(max_queries=5, max_keys=12, max_group=2, head_dims=(64,)),
    hypothesis.strategies.sampled_from([{}, {"window": 3}, {"softcap": 2.0}]),
)
def test_the_oracle_is_attention(x, more):
    found, wanted = oracle_attention(x.q, x.k, x.v, **x.options(), **more), by_hand(x, **more)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-6)


def test_the_oracle_knows_sinks():
    x = make_inputs(heads_q=4, heads_kv=2, queries=3, keys=5)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    found, wanted = (
        oracle_attention(x.q, x.k, x.v, scale=x.scale, sinks=sinks),
        by_hand(x, sinks=sinks),
    )
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-6)


def test_the_oracle_keeps_nan_to_those_who_see_it():
    x = make_inputs(queries=6, keys=6, heads_q=2, heads_kv=2)
    x.k[0, 0, 3, 0] = x.v[0, 1, 4, 7] = torch.nan
    lost = oracle_attention(x.q, x.k, x.v, scale=x.scale)[0].isnan().any(-1)[0]
    assert lost.tolist() == [[False] * 3 + [True] * 3, [False] * 4 + [True] * 2]


def test_a_query_without_keys_gives_zero():
    x = make_inputs(queries=4, keys=4)
    out, lse = oracle_attention(x.q, x.k, x.v, scale=x.scale, start=torch.tensor([2]))
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -torch.inf).all()
    assert (out[:, :, 2:] != 0).any() and torch.isfinite(lse[:, :, 2:]).all()


def test_dense_error_grows_as_precision_falls():
    errors = []
    for dtype in (torch.float64, torch.float32, torch.float16, BF16):
        x = make_inputs(queries=30, keys=50, dtype=dtype)
        errors.append(dense_error(x.q, x.k, x.v, scale=x.scale))
    assert errors[0] < 1e-14 and errors == sorted(errors) and 1e-4 < errors[3] < 1e-1
    assert tolerance(x.q, x.k, x.v, scale=x.scale) > 4 * errors[3]


@hypothesis.given(attention_inputs(dtypes=(torch.float32, BF16), max_keys=40))
def test_generated_inputs_are_valid(x):
    batch, heads_q, queries, dim = x.q.shape
    assert x.k.shape == x.v.shape and x.k.shape[0] == batch and x.k.shape[3] == dim
    assert heads_q % x.k.shape[1] == 0 and queries <= x.k.shape[2]
    assert x.q.dtype == x.k.dtype == x.v.dtype and torch.isfinite(x.q).all()
    lengths = torch.full((batch,), x.k.shape[2]) if x.lengths is None else x.lengths
    start = torch.zeros(batch) if x.start is None else x.start
    assert (lengths >= queries).all() and (lengths <= x.k.shape[2]).all()
    assert (start >= 0).all() and (start < lengths).all()
    for row in range(batch):
        assert torch.isfinite(x.k[row, :, : lengths[row]]).all()
        assert x.v[row, :, lengths[row] :].isnan().all()
    out = oracle_attention(x.q, x.k, x.v, **x.options())[0]
    assert torch.isfinite(out).all() and (out[:, :, -1] != 0).any()


def test_make_inputs_repeats_and_to_keeps_strides():
    made = [make_inputs(queries=3, keys=9, padding=True, layout="strided", seed=4) for _ in "ab"]
    assert torch.equal(made[0].k, made[1].k) and torch.equal(made[0].start, made[1].start)
    assert made[0].to("cpu").k.stride() == made[0].k.stride() != make_inputs(keys=9).k.stride()


def test_odd_inputs_hold_what_they_promise():
    cases = list(odd_inputs())
    assert {case.q.shape[3] for case in cases} == {16, 48, 64, 80, 128, 256}
    assert any(case.q.shape[2] == 1 for case in cases) and any(
        not c.q.is_contiguous() for c in cases
    )
    for name in ("lengths", "start", "key_mask"):
        assert any(getattr(case, name) is not None for case in cases)
        assert all(getattr(case, name) is None for case in odd_inputs(sequence=False))


def test_hypothesis_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.setitem(sys.modules, "hypothesis.strategies", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'attnplug\[test\]'"):
        attention_inputs()


# check_op, on an op of a third party


@torch.library.custom_op("attnplug_test::attention", mutates_args=())
def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    sequence = {"lengths": lengths, "start": start, "key_mask": key_mask}
    return oracle_attention(q, k, v, scale=scale, dtype=torch.float32, **sequence)[0].to(q.dtype)


@attention_op.register_fake
def _(q, k, v, scale, lengths, start, key_mask):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("attnplug_test::short_fake", mutates_args=())
def short_fake(q: torch.Tensor) -> torch.Tensor:
    return q + 1


@short_fake.register_fake
def _(q):
    return q.new_empty(q.shape[:-1])


def good(q, k, v, *, scale, lengths=None, start=None, key_mask=None):
    return attention_op(q, k, v, scale, lengths, start, key_mask)


def forgets_scale(q, k, v, *, scale, **sequence):
    return good(q, k, v, scale=1.02 * scale, **sequence)


def forgets_padding(q, k, v, *, start=None, **options):
    return good(q, k, v, **options)


def forgets_lengths(q, k, v, *, lengths=None, **options):
    return good(q, torch.nan_to_num(k), torch.nan_to_num(v), **options)


def hides_nan(q, k, v, **options):
    return good(torch.nan_to_num(q), torch.nan_to_num(k), torch.nan_to_num(v), **options)


def spreads_nan(q, k, v, **options):
    return good(q, k, v, **options) + 0 * q.sum()


def assumes_strides(q, k, v, **options):
    flat = torch.as_strided(q, q.shape, torch.empty(q.shape, device="meta").stride(), 0)
    return good(flat, k, v, **options)


def breaks_the_graph(q, k, v, **options):
    torch._dynamo.graph_break()
    return good(q, k, v, **options)


def unregistered(q, k, v, **options):
    return plain_attention(q, k, v, **options)[0]


def lies_about_its_shape(q, k, v, **options):
    return good(short_fake(q) - 1, k, v, **options)


def low_precision(q, k, v, *, scale, **sequence):
    return good(q.to(BF16), k.to(BF16), v.to(BF16), scale=scale, **sequence).to(q.dtype)


def few_inputs():
    yield make_inputs(queries=9, keys=20, heads_q=4, heads_kv=2, batch=2)
    yield make_inputs(queries=3, keys=20, padding=True, lengths=True, batch=2)


def test_check_op_passes_a_right_op():
    report = check_op(good, backend="aot_eager")
    assert len(report.checks) == len(list(odd_inputs())) + 8 and not report.failures
    assert "compile: ok" in str(report)
    check_op(good, inputs=[make_inputs(queries=9, keys=20, dtype=BF16)], backend="inductor")
    check_op(good, sequence=False, backend="aot_eager")


@pytest.mark.parametrize(
    ("op", "check"),
    [
        (forgets_scale, "oracle"),
        (forgets_padding, "oracle"),
        (forgets_lengths, "oracle"),
        (low_precision, "oracle"),
        (hides_nan, "NaN in k"),
        (spreads_nan, "NaN in q"),
        (assumes_strides, "layout heads_last"),
        (breaks_the_graph, "compile"),
        (unregistered, "opcheck"),
        (lies_about_its_shape, "opcheck"),
    ],
)
def test_check_op_finds_a_wrong_op(op, check):
    with pytest.raises(AssertionError, match=rf"(?s)check_op: .*\n  {check}.*FAILED"):
        check_op(op, inputs=few_inputs(), backend="aot_eager")


def test_check_op_compares_every_output_of_the_reference():
    def op(q, k, v, **options):
        return good(q, k, v, **options), torch.zeros(q.shape[:-1])

    with pytest.raises(AssertionError, match=r"output 1: .* elements are off"):
        check_op(op, inputs=few_inputs(), backend="aot_eager")
    check_op(op, lambda *a, **o: oracle_attention(*a, **o)[0], few_inputs(), backend="aot_eager")


@torch.library.custom_op("attnplug_testing::key_norms", mutates_args=())
def key_norms_op(k: torch.Tensor) -> torch.Tensor:
    return k.float().norm(dim=-1)


@key_norms_op.register_fake
def _(k):
    return k.new_empty(k.shape[:3], dtype=torch.float32)


def test_check_op_serves_an_op_without_q_or_v():
    def exact(k):
        return k.double().norm(dim=-1)

    def allowed(x):
        return 1e-5 * float(exact(x.k).nan_to_num().max())

    asked = dict(sequence=False, tensors="k", backend="aot_eager")
    report = check_op(key_norms_op, exact, allowed=allowed, **asked)
    assert report.checks[-1].name == "NaN in k"
    with pytest.raises(AssertionError, match="oracle"):
        check_op(key_norms_op, lambda k: 1.01 * exact(k), allowed=allowed, **asked)
    with pytest.raises(AssertionError, match="NaN in k"):
        check_op(lambda k: key_norms_op(k).nan_to_num(), exact, allowed=allowed, **asked)


def test_check_op_wants_names_and_a_tolerance_that_fit():
    with pytest.raises(ArgumentError, match="tensors is 'kq', needs names out of 'qkv'"):
        check_op(key_norms_op, tensors="kq")
    with pytest.raises(ArgumentError, match="allowed is None, but an op of 'k' needs its own"):
        check_op(key_norms_op, tensors="k")


def test_a_report_names_failures_and_what_was_not_asked():
    checks = (Check("one", True), Check("two", False, "because", 4), Check("three", None, "no"))
    report = CheckReport("subject", checks)
    assert [check.name for check in report.failures] == ["two"]
    assert str(report).splitlines() == [
        "subject", "  one: ok", "  4. two: FAILED (because)", "  three: not asked (no)"
    ]  # fmt: skip
    with pytest.raises(AssertionError, match=r"1 of 3 checks failed\n  4\. two: FAILED"):
        report.require()
    assert dataclasses.replace(report, checks=checks[:1]).require().subject == "subject"


def test_inputs_show_their_shapes():
    shown = repr(make_inputs(queries=2, keys=5, padding=True, key_mask=True))
    assert "q=(1, 2, 2, 64)" in shown and "start=" in shown and "holes" in shown
    assert isinstance(make_inputs(), AttentionInputs)
