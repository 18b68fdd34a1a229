"""my_window computes what it says, and keeps attnplug's promises."""

import pytest
import torch
from attnplug_my_window import MyWindow

import attnplug
from attnplug.policies import AttentionCall
from attnplug.testing import check_policy, make_inputs, oracle_attention, tolerance


def test_a_step_is_attention_over_the_window():
    x = make_inputs(batch=2, heads_q=4, heads_kv=2, queries=1, keys=100)
    visible = (torch.arange(100, dtype=torch.int64, device=x.q.device) >= 100 - 32).expand(2, -1)
    wanted = oracle_attention(x.q, x.k, x.v, scale=x.scale, key_mask=visible)[0]
    found = MyWindow(window=32).attend(AttentionCall(x.q, x.k, x.v, scale=x.scale))
    allowed = tolerance(x.q, x.k, x.v, scale=x.scale, key_mask=visible)
    assert (found - wanted).abs().max() <= allowed


def test_it_keeps_the_promises():
    """`exact` is the method with a budget that covers every prompt of the check. `backend="eager"`
    looks for graph breaks alone; leave it out to compile with inductor."""
    check_policy(MyWindow(window=32), exact=MyWindow(window=4096), backend="eager")


def test_policy_strings_know_it():
    """By the entry point in pyproject.toml, where the package is installed."""
    assert "my_window" in attnplug.policies.names()
    assert str(attnplug.policies.parse("my_window(window=32)")) == "my_window(window=32)"


def test_a_window_below_1_is_refused():
    with pytest.raises(attnplug.PolicyError, match="window=0, needs an integer of at least 1"):
        MyWindow(window=0)
