"""sketch's estimate of its own error: without bias, taken between steps, and told."""

import pytest
import torch
from step_cases import random

import attnplug
from attnplug import policies
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.encode_keys import encode_keys
from attnplug.ops.sketch.sketch_decode import sketch_decode
from attnplug.ops.sketch.state import empty_codes
from attnplug.policies import certificates
from attnplug.policies._sketch_audit import Asked, Audit, audit_step
from attnplug.testing import oracle_attention, tiny_model

TOKENS, SCALE = 1300, 0.125


def cache(seed: int):
    """Queries, keys and values of two rows; values that depend on their keys."""
    k, v = random(seed, 2, 2, 2, TOKENS, 64)
    return random(seed + 1, 2, 4, 60, 64) * 1.5, k, v + 0.5 * k.roll(1, -1)


@pytest.mark.parametrize(
    ("tail", "more"),
    [("regression", "plain"), ("regression", "capped"), ("drop", "padded"), ("drop", "capped")],
)
def test_its_mean_is_the_true_error(tail, more):
    """Over many draws, within five times the standard error of their mean. The step's own Z stands
    for that of dense, and so the true error is in these units, too."""
    q, k, v = cache(3)
    rows = {"lengths": torch.tensor([1290]), "start": None, "key_mask": None}
    asked = Asked(SCALE, 0.0, None, 60, tail)
    if more == "padded":
        mask = random(5, 2, TOKENS) > -1
        mask[1, :130], mask[:, 1289] = False, True
        start = mask.int().argmax(-1).to(torch.int32)
        rows |= {"start": start, "key_mask": mask}
    if more == "capped":
        asked = asked._replace(softcap=3.0, sinks=random(6, 4))
    basis = fit_basis(k, v, q, **rows)
    codes = empty_codes(k, 24)
    encode_keys(k, v, basis.encoder, *codes, **rows)
    options = {"scale": SCALE, "softcap": asked.softcap, "sinks": asked.sinks, **rows}
    query = q[:, :, -1:]
    out, lse = sketch_decode(query, k, v, *basis, *codes, top_k=60, tail=tail, **options)
    want, want_lse = oracle_attention(query, k, v, **options)
    if asked.sinks is not None:
        lse, want_lse = (torch.logaddexp(x, asked.sinks[None, :, None]) for x in (lse, want_lse))
    ratio = torch.exp(want_lse - lse)[..., 0]
    true = (out - want)[:, :, 0].square().sum(-1) * ratio.square()
    found = torch.stack(
        [audit_step(query, k, v, basis, codes, asked, **rows, seed=i)[0] for i in range(400)]
    )
    spread = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - true).abs() <= 5 * spread + 1e-9).all()
    assert (spread < true).any()  # not so wide that all would pass


def test_it_is_zero_where_all_is_read():
    q, k, v = cache(0)
    rows = {"lengths": torch.tensor([1290]), "start": None, "key_mask": None}
    basis = fit_basis(k, v, q, **rows)
    codes = empty_codes(k, 24)
    encode_keys(k, v, basis.encoder, *codes, **rows)
    asked = Asked(SCALE, 0.0, None, 2000, "regression")
    found, size = audit_step(q[:, :, -1:], k, v, basis, codes, asked, **rows, seed=1)
    assert not found.any()
    want, _ = oracle_attention(q[:, :, -1:], k, v, scale=SCALE, lengths=rows["lengths"])
    assert torch.allclose(size, want[:, :, 0].square().sum(-1), rtol=1e-4)


def test_what_is_not_finite_shows():
    q, k, v = cache(0)
    rows = {"lengths": torch.tensor([1290]), "start": None, "key_mask": None}
    basis = fit_basis(k, v, q, **rows)
    codes = empty_codes(k, 24)
    encode_keys(k, v, basis.encoder, *codes, **rows)
    asked = Asked(SCALE, 0.0, None, 60, "regression")
    query = q[:, :, -1:].clone()
    query[0, 1, 0, 3] = torch.nan
    found, _ = audit_step(query, k, v, basis, codes, asked, **rows, seed=1)
    assert found[0, 1].isnan() and found[1].isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("audit", [0, 8])
def test_generate_audits_between_steps_and_certificates_tell(audit):
    model = tiny_model()
    ids = torch.randint(2, 90, (2, 900), generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    with attnplug.applied(model, f"sketch(k=8, tail='drop', audit={audit}, min_tokens=0)"):
        cache = attnplug.make_cache(model, 940)
        mask = torch.ones_like(ids)
        options = {"attention_mask": mask, "max_new_tokens": 33, "do_sample": False}
        model.generate(ids, past_key_values=cache, **options)
        rows = certificates(cache)
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn from the user's own
    if audit == 0:
        assert rows == []
        return
    assert [row.layer for row in rows] == [0, 1]
    for row in rows:
        assert isinstance(row, Audit) and row.audits == 4  # of 32 steps
        assert row.error > 0 and 0 < row.relative < 2
    cache.reset()
    assert certificates(cache) == []


@torch.no_grad()
def test_an_audit_changes_no_output():
    model = tiny_model()
    ids = torch.randint(2, 90, (1, 900), generator=torch.Generator().manual_seed(0))
    found = []
    for audit in (0, 1):
        with attnplug.applied(model, f"sketch(k=8, audit={audit}, min_tokens=0)"):
            cache = attnplug.make_cache(model, 940)
            steps = [model(ids, past_key_values=cache).logits[:, -1:]]
            for _ in range(5):
                steps.append(model(steps[-1].argmax(-1), past_key_values=cache).logits)
        found.append(torch.cat(steps, 1))
    assert torch.equal(*found)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_an_audit_for_the_asking(padded):
    """By default nothing is audited; one call audits the last step of each layer that has made one,
    with the tokens that the mask leaves."""
    ids = torch.randint(2, 90, (2, 900), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 901, dtype=torch.long)
    if padded:
        mask[0, :40] = 0
    with attnplug.applied(tiny_model(), "sketch(k=8, tail='drop', min_tokens=0)") as model:
        cache = attnplug.make_cache(model, 940)
        assert policies.audit(cache) == []
        model(ids, attention_mask=mask[:, :900], past_key_values=cache)
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
        assert certificates(cache) == []
        state = torch.get_rng_state()
        rows = policies.audit(cache, mask)
        assert torch.equal(state, torch.get_rng_state())
    assert (
        [(row.layer, row.audits) for row in rows]
        == [(0, 1), (1, 1)]
        == [(row.layer, row.audits) for row in certificates(cache)]
    )
    assert all(0 < row.relative < 2 for row in rows)
