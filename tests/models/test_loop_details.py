"""Details of a call that stock and attnplug's loop have alike."""

import warnings
from contextlib import contextmanager

import pytest
import torch

import attnplug
from attnplug.models import decode_loop
from attnplug.models.generate import LOOP
from attnplug.testing import tiny_model

GATHER = "gather(k=16, block=16, sink=1, local=2, min_tokens=0)"  # all of these prompts


def test_prompts_of_int32_come_back_as_stock_has_them():
    model, ids = tiny_model(), torch.arange(3, 40, dtype=torch.int32)[None]
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    found = attnplug.apply(model, "dense").generate(ids, max_new_tokens=4, do_sample=False)
    assert found.dtype == wanted.dtype == torch.int64 and torch.equal(found, wanted)


@pytest.mark.parametrize("policy", ["gvr(k=1, sink=20, window=1, min_tokens=0)", "dense"])
def test_a_row_that_is_hidden_whole_begins_with_its_first_new_token(policy):
    """And not with the first slot: its sink is of tokens that it shows."""
    model = tiny_model()
    for weight in model.parameters():
        weight.data *= 3 if weight.dim() > 1 else 1  # so that what is read decides
    ids = torch.randint(3, 60, (2, 100), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0] = 0
    options = dict(attention_mask=mask, max_new_tokens=22, do_sample=False)
    wanted = model.generate(ids, **options)[0]
    assert torch.equal(attnplug.apply(model, policy).generate(ids, **options)[0], wanted)


def test_what_another_thread_says_of_its_call_changes_no_other(monkeypatch):
    model = attnplug.apply(tiny_model(), GATHER)
    ids = torch.arange(3, 60)[None]
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    loop = vars(model)[LOOP]
    served = []

    class Written(type(loop)):
        """The reason that another call writes as soon as this one has written its own."""

        def __setattr__(self, name, value):
            super().__setattr__(name, "of another call" if name == "why_not" else value)

    run = decode_loop.Decoding.run
    monkeypatch.setattr(decode_loop.Decoding, "run", lambda *a: served.append(1) or run(*a))
    monkeypatch.setattr(loop, "__class__", Written)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted) and served


@contextmanager
def refused_waits():
    """Within it an operation that waits for the GPU raises, in this process alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["dense", "momo+gather", "auto"])
def test_a_first_prompt_does_not_wait_for_the_gpu(policy):
    model = attnplug.apply(tiny_model(device="cuda"), policy)
    ids = torch.randint(4, 60, (1, 40), device="cuda")
    with torch.no_grad():
        model(ids, past_key_values=attnplug.make_cache(model, 64))  # compiles
        cache = attnplug.make_cache(model, 64)
        with refused_waits():
            model(ids, past_key_values=cache)
    assert int(cache.layers[0].cumulative_length) == 40
