"""generate's own cache holds what gather and gvr keep beside keys and values."""

import pytest
import torch
from step_cases import stepped

import attnplug
from attnplug.testing import tiny_model

DECODES = {
    "gather": "gather(k=1, block=16, sink=1, local=1, min_tokens=0)",
    "gvr": "gvr(k=8, sink=2, window=4, min_tokens=0)",
}


@pytest.mark.parametrize("prefill", ["", "momo(gamma=8, block=16, top_k=2, exact_k=1)+"])
@pytest.mark.parametrize("decode", DECODES.values(), ids=DECODES)
def test_generate_runs_it_step_by_step(decode, prefill):
    """Its tokens are those of steps made by hand, and not dense's; chunked prefill changes
    nothing."""
    model = tiny_model()
    ids = torch.randint(2, 90, (2, 150), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    dense = model.generate(ids, **options)
    with attnplug.applied(model, prefill + decode):
        found = model.generate(ids, **options)
        chunked = model.generate(ids, prefill_chunk_size=40, **options)
        by_hand, _ = stepped(model, ids, 180)
    assert torch.equal(found, by_hand) and torch.equal(found, chunked)
    assert not torch.equal(found, dense)
