"""attnplug's decode loop gives the tokens, cache and random state of transformers' loop, or leaves
the call to it and says why."""

import copy
import functools
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GenerationMixin, LogitsProcessor
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.streamers import BaseStreamer

import attnplug
from attnplug.models import decode_loop, loop_calls
from attnplug.models.decode_step import argmax
from attnplug.models.generate import LOOP
from attnplug.ops.common import first_call
from attnplug.testing.policy import tiny_model

GATHER = "gather(k=16, block=16, sink=1, local=2, min_tokens=0)"  # all of these prompts
GVR = "gvr(k=64, min_tokens=0)"
ENDS = list(range(5, 40, 3))  # common enough that all rows end early
CALLS = {
    "greedy": {},
    "greedy-ends": dict(eos_token_id=ENDS),
    "sample": dict(do_sample=True),
    "sample-ends": dict(do_sample=True, eos_token_id=ENDS),
    "temperature": dict(do_sample=True, temperature=0.6),
    "top-k": dict(do_sample=True, top_k=7),
    "top-p": dict(do_sample=True, top_p=0.7, top_k=0),
    "min-p": dict(do_sample=True, min_p=0.05),
    "penalty": dict(repetition_penalty=1.3),
    "all": dict(
        do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
        typical_p=0.9, epsilon_cutoff=1e-3, eos_token_id=ENDS, min_new_tokens=4,
        suppress_tokens=[11], begin_suppress_tokens=[12], forced_eos_token_id=8,
        remove_invalid_values=True, renormalize_logits=True,
    ),
    "returns": dict(num_return_sequences=2, do_sample=True),
    "max-length": dict(max_new_tokens=None, max_length=33),
    "one": dict(max_new_tokens=1),
}  # fmt: skip


def prompt(rows: int = 3, tokens: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask with padding on the left of all rows but the first."""
    ids = torch.randint(41, 97, (rows, tokens), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 4 * row] = 0
    return ids, mask


def call(model, *, rows: int = 3, **options):
    """Sequences, tokens in the cache and the next random number of a call."""
    ids, mask = (x.to(model.device) for x in prompt(rows))
    torch.manual_seed(7)
    fields = dict(max_new_tokens=24, attention_mask=mask, return_dict_in_generate=True)
    out = model.generate(ids, **(fields | options))
    return out, int(out.past_key_values.get_seq_length()), torch.rand(1, device=model.device)


def assert_same(found, wanted):
    assert torch.equal(found[0].sequences, wanted[0].sequences)
    assert found[1:] == wanted[1:]


def compiling(backend: str = "eager") -> CompileConfig:
    config = CompileConfig(mode=None, backend=backend, fullgraph=True)
    config._compile_all_devices = True
    return config


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


def test_methods_that_were_replaced_before_stay():
    model, calls = tiny_model(), []
    stock = model.generate

    def mine(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    model.generate = mine
    with attnplug.applied(model, "dense"):
        assert "generate was replaced" in attnplug.report(model).loop
        call(model)
    assert calls == [1]
    assert model.generate is mine


class Halve(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores / 2


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


UNSERVED = {
    "Halve": lambda: dict(logits_processor=[Halve()]),
    "streamer": lambda: dict(streamer=Silent()),
    "beam_search": lambda: dict(num_beams=2),
    "assisted": lambda: dict(prompt_lookup_num_tokens=3, rows=1),
    "assistant_model": lambda: dict(assistant_model=tiny_model(seed=3), rows=1),
    "output_scores": lambda: dict(output_scores=True),
    "output_logits": lambda: dict(output_logits=True),
    "MaxTimeCriteria": lambda: dict(max_time=60.0),
    "NoRepeatNGram": lambda: dict(no_repeat_ngram_size=3),
    "DynamicCache": lambda: dict(cache_implementation="dynamic"),
    "custom_generate": lambda: dict(custom_generate=GenerationMixin._sample),
}


@pytest.mark.parametrize("make", UNSERVED.values(), ids=UNSERVED)
def test_other_calls_keep_the_stock_loop_and_the_report_says_why(make, request):
    model, options = tiny_model(), make()
    wanted = call(model, **options)
    with attnplug.applied(model, "dense"):
        found = call(model, **options)
        report = attnplug.report(model)
        assert request.node.callspec.id in report.loop
        assert report.loop in str(report).splitlines()
        call(model)
        assert attnplug.report(model).loop == ""
    assert torch.equal(found[0].sequences, wanted[0].sequences)


def test_the_mode_is_that_of_the_call_and_its_configs():
    model = attnplug.apply(tiny_model(), "dense")
    model.generation_config.num_beams = 2
    call(model)
    assert "beam_search" in attnplug.report(model).loop
    call(model, num_beams=1)
    assert attnplug.report(model).loop == ""
    given = copy.deepcopy(model.generation_config)
    given.update(num_beams=3, max_new_tokens=4, return_dict_in_generate=True)
    ids, mask = prompt()
    model.generate(ids, attention_mask=mask, generation_config=given)
    assert "beam_search" in attnplug.report(model).loop


def test_a_model_with_methods_of_its_own_keeps_the_stock_loop():
    model = tiny_model()
    kind = type(model)

    class Own(kind):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    wanted = call(model)
    model.__class__ = Own
    with attnplug.applied(model, "dense"):
        assert "Own has its own prepare_inputs_for_generation" in attnplug.report(model).loop
        assert_same(call(model), wanted)
    model.__class__ = kind
    attnplug.apply(model, "dense")
    stock = model.prepare_inputs_for_generation
    model._update_model_kwargs_for_generation = model._update_model_kwargs_for_generation
    call(model)
    assert "was replaced" in attnplug.report(model).loop
    assert model.prepare_inputs_for_generation == stock


@pytest.mark.parametrize("where", ["a class of its own", "GenerationMixin"])
def test_a_loop_that_somebody_replaced_after_apply_is_run(where, monkeypatch):
    model = attnplug.apply(tiny_model(), "dense")
    whole = call(model)[0].sequences
    stock = GenerationMixin._sample

    @functools.wraps(stock)
    def shorter(self, *args, **kwargs):
        out = stock(self, *args, **kwargs)
        out.sequences = out.sequences[:, :-2]
        return out

    if where == "GenerationMixin":
        monkeypatch.setattr(GenerationMixin, "_sample", shorter)
    else:
        model.__class__ = type("Own", (type(model),), {"_sample": shorter})
    assert torch.equal(call(model)[0].sequences, whole[:, :-2])
    assert "_sample" in attnplug.report(model).loop


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


@pytest.mark.parametrize(
    "ranks, shares, served", [(2, True, False), (1, True, True), (2, False, True)]
)
def test_processes_that_share_weights_keep_transformers_loop(ranks, shares, served, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(loop_calls.STOCK, "is_fsdp_managed_module", lambda model: shares)
    why = loop_calls.unserved_arguments(tiny_model(), {})
    assert why == ("" if served else "several processes that share each weight generate together")


def test_a_device_that_was_not_tried_keeps_transformers_loop(monkeypatch):
    monkeypatch.setattr(loop_calls, "DEVICES", set())
    model = attnplug.apply(tiny_model(), "dense")
    call(model)
    assert "has not been verified on cpu yet" in attnplug.report(model).loop


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
