"""topk on the scores of real decode steps, one after the other, with the last picks as hint."""

from importlib.resources import files

import pytest
import torch
from real_models import real_model
from topk_cases import PLANS, call, op
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# The kernels mean to overflow: a range that is infinite is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STEPS = 400


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def decode_scores(request):
    """Scores of STEPS consecutive decode steps and the one before, [heads, STEPS + 1, key]: per KV
    head the best of its group's q . k, in three layers of a model that reads what topk is. Later
    keys are NaN."""
    model, tokenizer = real_model(request.param)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 30
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    wanted = {full[0], full[len(full) // 2], full[-1]}
    seen = []

    def attention(module, query, key, value, attention_mask, **options):
        if module.layer_idx in wanted:
            group = query.shape[1] // key.shape[1]
            query_of = query[:, :, -STEPS - 1 :].unflatten(1, (-1, group))
            seen.append((query_of @ key[:, :, None].mT).amax(2)[0])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("test_topk", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("test_topk", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("test_topk")
    text = files("attnplug.eval").joinpath("data/rust_book.txt").read_text(encoding="utf-8")
    tokens = tokenizer(text[:40_000], return_tensors="pt").input_ids[:, : STEPS + 65]
    with torch.no_grad():
        model.model(tokens)
    scores = torch.cat(seen)
    future = torch.ones(scores.shape[1:]).triu(scores.shape[2] - scores.shape[1] + 1).bool()
    return scores.masked_fill(future, torch.nan)


def test_real_decode_steps(device_path, decode_scores):
    """Every one of 400 steps equals the stable sort, with the picks of the step before it as the
    hint."""
    k, size = 64, decode_scores.shape[2]
    few = device_path == ("cpu", "kernel")  # the interpreter takes its time
    scores = decode_scores[:2, -4:] if few else decode_scores
    picks = torch.stack([stable_picks(step, k) for step in scores.unbind(1)], 1)
    before, want = picks[:, :-1].flatten(0, 1), picks[:, 1:].flatten(0, 1)
    same = torch.stack([torch.isin(a, b).float().mean() for a, b in zip(want, before, strict=True)])
    assert same.mean() > 0.3  # the steps do resemble each other
    rows = scores[:, 1:].flatten(0, 1)
    assert few or len(rows) >= 3 * STEPS
    lengths = torch.arange(size - scores.shape[1] + 2, size + 1).repeat(len(scores))
    indices, _, ways = call(
        device_path, rows, k, before.int(), lengths, plan=PLANS["programs"]
    )  # fmt: skip
    assert torch.equal(indices.long().sort(1).values, want)
    if device_path == ("cpu", "reference"):  # the paper: 94.8% of its rows within three passes
        found = ways[:, 0] == op.GVR
        assert found.float().mean() > 0.98
        assert (ways[found, 1] <= 3).float().mean() > 0.9


def stable_picks(scores, k):
    x = torch.where(scores.isnan(), -torch.inf, scores)
    return x.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
