"""Plans of score_tokens: tokens or heads as a product's rows, float16 for bfloat16, and tiles that
are read without a mask."""

import pytest
import torch
from gvr_cases import random

from attnplug.ops.gvr import score_tokens as op

NEW = {"keys_first": True, "halves": True, "whole": True}
PLANS = [
    op.Plan(64, 2, 4, 1, **NEW),
    op.Plan(64, 2, 4, 1, halves=True),
    op.Plan(32, 4, 4, 1, keys_first=True, halves=True),
]
# batch, query heads, KV heads, tokens, lengths, start
SHAPES = [
    (1, 7, 1, 512, None, None),
    (2, 4, 2, 512, [500, 300], [3, 130]),
    (1, 9, 1, 300, [290], None),
]


def case(batch, heads, kv_heads, size, lengths, start, device):
    """The arguments of launch_score_tokens but for scores, and the reference's scores."""
    q = random(0, batch, heads, 1, 64).bfloat16()
    codes, steps = op.quantize_keys(random(1, batch, kv_heads, size, 64))
    lengths, start = (x if x is None else torch.tensor(x) for x in (lengths, start))
    options = {"sink": 4, "window": 9, "lengths": lengths, "start": start}
    wanted = op.score_tokens(q, codes, steps, **options)
    args = [x if x is None else x.to(device) for x in (q, codes, steps)]
    rows = [x if x is None else x.to(device) for x in (lengths, start)]
    return [*args, 4, 9, *rows, None], wanted


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores(device, plan, shape):
    args, wanted = case(*shape, device)
    found = torch.empty(wanted.shape, device=device)
    op.launch_score_tokens(*args, found, plan=plan)
    found, seen = found.cpu(), wanted.isfinite()
    assert torch.equal(found.isfinite(), seen)
    torch.testing.assert_close(found[seen], wanted[seen], rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_query_scores_all_highest(device):
    args, wanted = case(*SHAPES[0], device)
    args[0][0, 2, 0, 5] = torch.nan
    found = torch.empty(wanted.shape, device=device)
    op.launch_score_tokens(*args, found, plan=PLANS[0])
    assert torch.equal(found.cpu() == torch.inf, wanted.isfinite())


def assert_like_the_reference(args, device):
    """The kernel's scores of these arguments, infinite ones among them, are the reference's."""
    q, codes, steps, sink, window, lengths, start, _ = args
    options = {"sink": sink, "window": window, "lengths": lengths, "start": start}
    wanted = op.score_tokens(*(x.cpu() for x in (q, codes, steps)), **options)
    found = torch.empty(wanted.shape, device=device)
    op.launch_score_tokens(*args, found, plan=PLANS[0])
    largest = wanted[wanted.isfinite()].abs().max().item()
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_infinite_query_leaves_the_other_heads_scores(device):
    """It is -inf at many tokens, whose best score is another head's."""
    args, _ = case(*SHAPES[0], device)
    args[0][0, 2, 0, 5] = torch.inf
    assert_like_the_reference(args, device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_scores_are_finite_where_the_references_are(device, size):
    """Small queries with large keys, and the reverse."""
    args, _ = case(*SHAPES[0], device)
    args[0], args[2] = (args[0] * size).bfloat16(), args[2] * (1e36 if size < 1 else 1e-36)
    assert_like_the_reference(args, device)
