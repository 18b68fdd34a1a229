"""Ctrl-C at any line of attnplug's: what it has ended half way can be ended, and later calls are
right."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_regional import tokens_of

import attnplug
from attnplug.models.hook import hooks_of
from attnplug.testing.policy import tiny_model

ROOT = str(Path(attnplug.__file__).parent)
# Where a model is changed and changed back, and where its calls are counted.
FILES = ("api.py", "ledger.py", "generate.py", "hook.py", "instance_method.py", "running.py")
FILES += ("strangers.py", "switch.py", "turn.py")


def lines_of(act, stop=None, files=FILES):
    """How often `act` comes to each line of these files; it is interrupted at the one that `stop`
    names, at the time that it names."""
    seen = Counter()

    def on_line(frame, event, _):
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            seen[place] += 1
            if stop == (place, seen[place]):
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame, *_):
        name = frame.f_code.co_filename
        return on_line if name.startswith(ROOT) and Path(name).name in files else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


def first_and_last(seen):
    return [(place, time) for place, count in seen.items() for time in sorted({1, count})]


def leftovers(model):
    names = [name for each in model.modules() for name in vars(each) if "attnplug" in name]
    hooked = [each for each in model.modules() if hooks_of(each) or each._forward_pre_hooks]
    return names, hooked, {model.config._attn_implementation} - {"sdpa"}


NOTHING = [], [], set()


def own_step(model):
    """A method of the user's, which stands there before the policy."""
    stock = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: stock(*args, **kwargs)
    return vars(model)["prepare_inputs_for_generation"]


def test_an_interrupt_of_apply_leaves_the_model_as_it_was_or_a_policy_that_goes():
    model = tiny_model()
    attnplug.remove(attnplug.apply(model, "dense"))
    seen = lines_of(lambda: attnplug.apply(model, "dense"))
    attnplug.remove(model)
    for stop in ((place, count) for place, count in seen.items()):
        lines_of(lambda: attnplug.apply(model, "dense"), stop)
        if leftovers(model) != NOTHING:  # it came at the very end
            assert attnplug.report(model).policy == "dense"
            attnplug.remove(model)
        assert leftovers(model) == NOTHING, stop


def test_remove_goes_on_where_an_interrupt_has_ended_it():
    model = tiny_model()
    wanted, mine = tokens_of(model, tokens=12, new=4), own_step(model)
    attnplug.apply(model, "dense")
    stops = first_and_last(lines_of(lambda: attnplug.remove(model)))
    for stop in stops:
        attnplug.apply(model, "dense")
        lines_of(lambda: attnplug.remove(model), stop)
        if leftovers(model) != NOTHING:
            attnplug.remove(model)
        assert leftovers(model) == NOTHING, stop
        assert vars(model)["prepare_inputs_for_generation"] is mine, stop
    assert tokens_of(model, tokens=12, new=4) == wanted


@pytest.mark.parametrize("rows", [1, 2])
def test_an_interrupt_of_generate_ends_the_call(rows):
    model = attnplug.apply(tiny_model(), "dense")
    ids = torch.arange(2, 14).expand(rows, -1)

    def call():
        return model.generate(ids, max_new_tokens=3, do_sample=False).tolist()

    wanted = call()
    for stop in first_and_last(lines_of(call, files=("running.py", "turn.py", "generate.py"))):
        lines_of(call, stop)
        assert attnplug.remove(model) is model, stop
        attnplug.apply(model, "dense")
    assert call() == wanted
