"""A policy comes and goes between calls of the model, never within: in whatever thread, from a hook
or a streamer."""

import threading
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnplug
from attnplug.models import running

PROMPT = torch.arange(2, 42)[None]
POLICY = "gather(k=2, sink=1, local=1, min_tokens=0, block=16)"
REFUSED = "a call of this model is running"


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=1, num_hidden_layers=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, eos_token_id=None, **sizes)).eval()


def generate(model, **more):
    return model.generate(PROMPT, do_sample=False, max_new_tokens=6, pad_token_id=0, **more)


class Streamer:
    """Calls `act` with the second token and keeps what it raises."""

    def __init__(self, act):
        self.act, self.puts, self.error = act, 0, None

    def put(self, value):
        self.puts += 1
        if self.puts == 3:
            try:
                self.act()
            except attnplug.UnsupportedCallError as error:
                self.error = str(error)

    def end(self):
        pass


def in_a_thread(act):
    """`act` in another thread, as a function; raises what it raised."""
    found = []

    def run():
        try:
            act()
        except attnplug.AttnplugError as error:
            found.append(error)

    def call():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if found:
            raise found[0]

    return call


@pytest.mark.parametrize("wrap", [lambda act: act, in_a_thread], ids=["here", "thread"])
def test_a_policy_does_not_go_during_a_call(model, wrap):
    attnplug.apply(model, POLICY)
    wanted = generate(model)
    streamer = Streamer(wrap(lambda: attnplug.remove(model)))
    assert torch.equal(generate(model, streamer=streamer), wanted)
    assert REFUSED in streamer.error and streamer.puts == 7
    attnplug.remove(model)


@pytest.mark.parametrize("wrap", [lambda act: act, in_a_thread], ids=["here", "thread"])
@pytest.mark.parametrize("by_forward", [False, True])
def test_a_policy_does_not_come_during_a_call(model, wrap, by_forward):
    """Nobody counts the calls of a model without a policy."""
    wanted = model(PROMPT).logits if by_forward else generate(model)
    streamer = Streamer(wrap(lambda: attnplug.apply(model, POLICY)))
    if by_forward:
        streamer.puts = 2
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: streamer.put(None))
        assert torch.equal(model(PROMPT).logits, wanted)
        handle.remove()
    else:
        assert torch.equal(generate(model, streamer=streamer), wanted)
    assert REFUSED in streamer.error
    attnplug.apply(model, POLICY)


def test_a_call_that_failed_does_not_run_any_more(model):
    attnplug.apply(model, POLICY)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, streamer=Streamer(stop))
    attnplug.remove(model)


def test_a_call_that_waited_while_the_policy_went_is_stocks(model):
    wanted = generate(model)
    attnplug.apply(model, POLICY)
    late = vars(model)["generate"]  # looked up before, called after
    found = []
    with running.between_calls(model, "remove"):
        thread = threading.Thread(
            target=lambda: found.append(late(PROMPT, max_new_tokens=6, pad_token_id=0))
        )
        thread.start()
        time.sleep(0.2)
        assert not found
        attnplug.remove(model)
    thread.join()
    assert torch.equal(found[0], wanted)


def test_calls_of_other_models_are_not_in_the_way(model):
    other = LlamaForCausalLM(model.config)
    streamer = Streamer(lambda: attnplug.remove(attnplug.apply(other, POLICY)))
    attnplug.apply(model, POLICY)
    generate(model, streamer=streamer)
    assert streamer.error is None and streamer.puts == 7
