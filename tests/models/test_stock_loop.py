"""Calls that attnplug's decode loop leaves to transformers', and what the report says of them."""

import copy
import functools

import pytest
import torch
from loop_cases import assert_same, call, prompt
from transformers import GenerationMixin, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import attnplug
from attnplug.models import loop_calls
from attnplug.testing.policy import tiny_model


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
