"""Old names work for one release, are the new things themselves, and warn with the new name."""

import dataclasses
import importlib
import pickle

import pytest
import torch

from attnplug import Momo, PolicyError
from attnplug.call import AttentionCall
from attnplug.deprecated import current_text
from attnplug.policies import parse

OLD = {
    "attnplug.policies.base.Policy": "attnplug.policies.policy.Policy",
    "attnplug.policies.base.parse_policy": "attnplug.policies.grammar.parse_policy",
    "attnplug.policies.base.Sink": "attnplug.call.EdgeWriter",
    "attnplug.policies.Sink": "attnplug.call.EdgeWriter",
    "attnplug.ops.Near": "attnplug.ops.ResidentBlocks",
}


def get(path: str):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_warns_with_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {OLD[old]};") as caught:
        assert get(old) is get(OLD[old])
    assert caught[0].filename == __file__


@pytest.mark.parametrize("module", sorted({old.rpartition(".")[0] for old in OLD}))
def test_a_name_that_never_was_is_missing(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nonesuch'"):
        get(f"{module}.Nonesuch")


OLD_OPTION = "momo's option topk is now selection"


def test_the_old_option_makes_the_same_method():
    with pytest.warns(DeprecationWarning, match=OLD_OPTION) as caught:
        old = Momo(topk="exact", gamma=8)  # pyright: ignore[reportCallIssue]
    assert caught[0].filename == __file__
    assert old == Momo(selection="exact", gamma=8) == pickle.loads(pickle.dumps(old))
    with pytest.warns(DeprecationWarning, match=OLD_OPTION):
        assert old.topk == "exact"  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(old, selection="joint") == Momo(gamma=8)


def test_the_old_option_is_read_and_the_new_one_written():
    with pytest.warns(DeprecationWarning, match=OLD_OPTION):
        policy = parse("momo(topk='estimated')+gather")
    assert str(policy) == "momo(selection='estimated')+gather"


def test_both_names_of_an_option_are_refused():
    with pytest.raises(PolicyError, match="topk is the old name of selection; give selection"):
        parse("momo(topk='exact', selection='joint')")


def test_the_text_of_an_older_result_is_brought_up_to_date():
    old = "momo(top_k=64, topk='exact', min_tokens=0)+gather"
    assert current_text(old) == "momo(top_k=64, selection='exact', min_tokens=0)+gather"
    assert current_text("momo(top_k=64)") == "momo(top_k=64)"


def test_the_old_names_of_a_call_still_work():
    x = torch.zeros(1, 1, 1, 64)
    call = AttentionCall(x, x, x, scale=1.0)
    with pytest.warns(DeprecationWarning, match="AttentionCall.sink is now trace_to"):
        assert call.sink is None
    with pytest.warns(DeprecationWarning, match="AttentionCall.settle is now flush"):
        call.settle()
