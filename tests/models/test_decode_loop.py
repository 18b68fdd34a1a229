"""attnplug's decode loop gives the tokens, cache and random state of transformers' loop."""

import copy
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from loop_cases import CALLS, ENDS, GATHER, GVR, assert_same, call, compiling, prompt
from torch._dynamo.utils import counters

import attnplug
from attnplug.models import decode_loop
from attnplug.models.decode_step import argmax
from attnplug.models.generate import LOOP
from attnplug.ops.common import first_call
from attnplug.testing.policy import tiny_model


@pytest.mark.parametrize("policy", ["dense", GATHER], ids=["dense", "gather"])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_tokens_cache_and_random_state_are_stocks(options, policy, device):
    model = tiny_model(device=device)
    wanted = call(model, disable_compile=True, **options)
    with attnplug.applied(model, policy):
        assert_same(call(model, disable_compile=True, **options), wanted)
        assert attnplug.report(model).loop == ""


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_padding_decode_without_a_mask(rows, device, monkeypatch):
    model = tiny_model(device=device)
    ids = prompt(rows)[0].to(device)
    masks = []
    keep = decode_loop.decode_step

    def step(model, cache, token, position, slot, mask, *rest):
        masks.append(mask)
        return keep(model, cache, token, position, slot, mask, *rest)

    monkeypatch.setattr(decode_loop, "decode_step", step)
    options = dict(max_new_tokens=5, disable_compile=True)
    wanted = model.generate(ids, **options)
    with attnplug.applied(model, "dense"):
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(found, wanted)
    assert masks == [None] * 4


@pytest.mark.parametrize(
    ("policy", "sampled"),
    [("dense", False), ("dense", True), (GATHER, False), (GVR, True)],
    ids=["dense", "dense, sampled", "gather", "gvr, sampled"],
)
def test_steps_past_the_end_leave_no_trace(policy, sampled, monkeypatch):
    """Compiled steps run ahead of what the host knows; here they do so on a CPU."""
    monkeypatch.setitem(decode_loop.LAG, "cpu", 3)
    model = tiny_model()
    options = dict(eos_token_id=ENDS, do_sample=sampled)
    wanted = call(model, **options)
    prompt_length = prompt()[0].shape[1]
    assert prompt_length + 1 < wanted[0].sequences.shape[1] < prompt_length + 20  # it ended early
    with attnplug.applied(model, policy):
        found = call(model, compile_config=compiling(), **options)
        assert_same(found, wanted)
        more = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(5))
        turns = []
        for out in (wanted[0], found[0]):
            ids = torch.cat([out.sequences, more], 1)
            mask = torch.cat([prompt()[1], torch.ones_like(ids[:, 20:])], 1)
            turns.append((ids, mask, out.past_key_values))
        ids, mask, cache = turns[1]
        fields = dict(max_new_tokens=9, do_sample=False)
        second = model.generate(ids, attention_mask=mask, past_key_values=cache, **fields)
    ids, mask, cache = turns[0]
    assert torch.equal(
        second, model.generate(ids, attention_mask=mask, past_key_values=cache, **fields)
    )


def test_steps_ahead_end_with_the_length(monkeypatch):
    """The last look at rows that end with the last tokens is not forgotten."""
    model = tiny_model()
    cases = [dict(max_new_tokens=n, eos_token_id=ENDS, do_sample=True) for n in range(1, 9)]
    wanted = [call(model, **options) for options in cases]
    with attnplug.applied(model, "dense"):  # once: each compiles anew
        for lag in range(1, 6):
            monkeypatch.setitem(decode_loop.LAG, "cpu", lag)
            for options, of_stock in zip(cases, wanted, strict=True):
                assert_same(call(model, compile_config=compiling(), **options), of_stock)


def test_a_step_is_fed_once_for_each_token():
    model = attnplug.apply(tiny_model(), "dense")
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    out, _, _ = call(model, eos_token_id=ENDS)
    assert len(passes) == out.sequences.shape[1] - prompt()[0].shape[1]


def test_invalid_probabilities_are_refused_as_multinomial_does():
    """On a CPU; on a GPU either loop's assertion ends the CUDA context, and all that is in it."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with attnplug.applied(model, "dense"), pytest.raises(RuntimeError, match="probability tensor"):
        call(model, do_sample=True, disable_compile=True)


def test_remove_takes_the_loop_off():
    model = tiny_model()
    before = set(vars(model))
    with attnplug.applied(model, "dense"):
        call(model, compile_config=compiling())
    assert set(vars(model)) == before
    assert model.generate.__func__ is type(model).generate
    attnplug.apply(model, "dense")
    del model.prepare_inputs_for_generation  # by someone who wrapped it for a while
    attnplug.remove(model)
    assert set(vars(model)) == before


def test_a_copy_decodes_with_its_own_weights():
    model = attnplug.apply(tiny_model(), "dense")
    call(model, compile_config=compiling())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    found = call(twin, compile_config=compiling())[0].sequences
    assert attnplug.report(twin).loop == ""
    attnplug.remove(twin)
    assert torch.equal(found, call(twin)[0].sequences)


def test_buffers_are_those_of_the_last_call_unless_it_still_runs():
    loop = decode_loop.DecodeLoop()
    key = (2, 1, 64, 0, 3, torch.device("cpu"))
    first, second = loop.take(*key), loop.take(*key)
    assert first is not second
    loop.give_back(first, *key)
    loop.give_back(second, *key)
    assert loop.take(*key) is second
    loop.give_back(second, *key)
    assert loop.take(3, *key[1:]).token.shape == (3, 1)


def test_a_turn_on_a_cache_feeds_its_own_tokens_only():
    model = attnplug.apply(tiny_model(), "dense")
    fed = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    out, _, _ = call(model, max_new_tokens=5)
    ids = torch.cat([out.sequences, prompt()[0][:, :7]], 1)
    mask = torch.cat([prompt()[1], torch.ones_like(ids[:, 20:])], 1)
    cache = out.past_key_values
    del fed[:]
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=30)
    assert fed == [8] + [1] * 29  # the last token of a call is not in its cache


EVERY = {
    "dense": "dense",
    "gather": GATHER,
    "gather-default": "gather",
    "gvr": "gvr(k=16, sink=2, window=8, min_tokens=0)",
    "sketch": "sketch(min_tokens=0)",
    "certified": "certified(block=16, min_tokens=0)",
}


@pytest.mark.parametrize(
    ("name", "padding"),
    [("dense", 0), ("gather", 0), ("sketch", 0),
     ("dense", 5), ("gather-default", 5), ("gvr", 5), ("certified", 5)],
)  # fmt: skip
def test_one_compilation_serves_all_lengths(name, padding):
    torch._dynamo.reset()
    model = attnplug.apply(tiny_model(), EVERY[name])
    for tokens in (70, 90, 200, 50):  # no buffer has a size of 1, which torch compiles for itself
        ids, mask = prompt(1, tokens)
        mask[:, :padding] = 0
        with torch._dynamo.config.patch(error_on_recompile=tokens != 70):
            options = dict(max_new_tokens=6, compile_config=compiling())
            model.generate(ids, attention_mask=mask, **options)
        assert attnplug.report(model).loop == ""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
@pytest.mark.parametrize("options", [CALLS["greedy-ends"], CALLS["sample-ends"]], ids=str)
@pytest.mark.parametrize("policy", ["dense", GATHER], ids=["dense", "gather"])
def test_compiled_steps_are_cuda_graphs_and_run_ahead(policy, options):
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model(device="cuda")
    wanted = call(model, disable_compile=True, **options)
    with attnplug.applied(model, policy):
        vars(model)[LOOP].compile_soon()
        for _ in range(4):  # warm, captured, replayed; and the buffers of the last call
            assert_same(call(model, **options), wanted)
        assert attnplug.report(model).loop == ""
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("size", [97, 512, 49152, 152064])
def test_the_largest_logit_is_found_in_pieces(size):
    random = torch.Generator().manual_seed(size)
    logits = torch.randint(0, 40, (64, size), generator=random).float()  # many are equal
    logits[3, size // 2] = torch.nan
    logits[5] = -torch.inf
    assert torch.equal(argmax(logits), logits.argmax(-1))


@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("policy", ["dense", GATHER], ids=["dense", "gather"])
def test_calls_in_inference_mode_and_outside_share_what_is_kept(policy, compiled, device):
    model = tiny_model(device=device)
    ids = torch.arange(2, 42, device=device)[None]
    options = dict(max_new_tokens=8, do_sample=False)
    options |= dict(compile_config=compiling()) if compiled else {}
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    with attnplug.applied(model, policy):
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                assert torch.equal(model.generate(ids, **options), wanted)
            assert attnplug.report(model).loop == ""


def test_a_long_first_call_says_what_it_does(monkeypatch, caplog):
    model = attnplug.apply(tiny_model(), "dense")
    monkeypatch.setattr(first_call, "SILENT_S", 0.05)
    monkeypatch.setattr(first_call, "SAID", threading.Event())
    slow = model.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    call(model, max_new_tokens=2)
    assert "is compiling, once" in caplog.text and "attnplug.warm" in caplog.text
    caplog.clear()
    first_call.SAID.clear()
    call(model, max_new_tokens=2)
    assert caplog.text == ""
    slow.remove()
    monkeypatch.setattr(first_call, "SILENT_S", 60)
    attnplug.remove(model)
    attnplug.apply(model, "dense")
    call(model)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "policy, ahead",
    [("dense", True), (GATHER, True), (GVR, True),
     ("sketch(min_tokens=0)", True), ("certified(min_tokens=0)", False)],
)  # fmt: skip
def test_steps_of_a_cache_that_is_seen_again_run_ahead_where_crops_are_exact(
    policy, ahead, monkeypatch
):
    monkeypatch.setitem(decode_loop.LAG, "cpu", 3)
    waits = []
    ended = decode_loop.Decoding._ended

    def noted(self, buffers, lag):
        waits.append(self.lag)
        return ended(self, buffers, lag)

    monkeypatch.setattr(decode_loop.Decoding, "_ended", noted)
    with attnplug.applied(tiny_model(), policy) as model:
        call(model, compile_config=compiling(), max_new_tokens=3)
    assert set(waits) == {3 if ahead else 0}


FORKED = """
import os, threading, torch
import attnplug
from attnplug.testing.policy import tiny_model
torch.set_num_threads(1)
model = attnplug.apply(tiny_model(), "dense")
ids = torch.arange(3, 23)[None]
wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
inside, free = threading.Event(), threading.Event()
def wait(*_):
    inside.set()
    free.wait(60)
def call():
    model.generate(ids, max_new_tokens=4, do_sample=False)
handle = model.lm_head.register_forward_hook(wait)
thread = threading.Thread(target=call)
thread.start()
inside.wait(60)
handle.remove()
pid = os.fork()
if pid == 0:
    found = model.generate(ids, max_new_tokens=4, do_sample=False)
    os._exit(0 if torch.equal(found, wanted) else 3)
print(os.waitpid(pid, 0)[1])
free.set()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_child_forked_in_another_threads_call_generates():
    """numba's layer there is one that forked children may use."""
    environment = os.environ | {"NUMBA_THREADING_LAYER": "workqueue"}
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
