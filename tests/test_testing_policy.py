"""check_policy passes dense, and names the promise that a broken policy breaks."""

import dataclasses
import logging

import pytest
import torch

import attnplug
from attnplug.models.hook import PolicyHook
from attnplug.policies import AttentionCall
from attnplug.testing import check_policy, tiny_model

pytestmark = [
    # torch 2.13's inductor warns of its own use of torch.jit.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


@dataclasses.dataclass(frozen=True)
class Broken(attnplug.Dense):
    """Dense attention with one fault."""

    name = "broken"
    fault: str = "none"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self.fault == "mask":
            call = dataclasses.replace(call, key_mask=None, start=None)
        if self.fault == "places" and call.q.shape[2] == 1:
            seen = torch.ones(call.k.shape[0], call.k.shape[2], dtype=torch.bool)
            seen = seen if call.key_mask is None else call.key_mask.clone()
            seen[:, :8] = False  # counted from the cache's begin, where a padded row has no key
            call = dataclasses.replace(call, key_mask=seen)
        if self.fault == "nan":
            q, k, v = (torch.nan_to_num(x) for x in (call.q, call.k, call.v))
            call = dataclasses.replace(call, q=q, k=k, v=v)
        if self.fault == "graph":
            torch._dynamo.graph_break()
        if self.fault == "decode" and call.q.shape[2] == 1:
            raise RuntimeError("no decode here")
        out = super().attend(call)
        if self.fault == "scale":
            return out * 1.001
        if self.fault == "mates":
            return out + 1e-2 * out[:1]
        if self.fault == "spread":
            return out + 0 * out.sum()
        return out


def test_a_right_policy_passes():  # on every promise: tests/contract
    policy = Broken(fault="none")
    report = check_policy(policy, exact=policy, promises=(1, 2, 6, 8))
    assert [check.promise for check in report.checks] == [1, 1, 2, 2, 6, 8]
    assert all(check.passed for check in report.checks)


def test_transformers_remarks_on_its_own_code_stay_away():
    """Assisted decoding, which promise 5 has, passes options that transformers warns of."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logging.getLogger("transformers.generation.utils").warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        check_policy("dense", exact="dense", promises=(5,))
    finally:
        logger.removeHandler(handler)
    assert heard == []


def test_without_an_exact_setting_two_promises_are_not_asked():
    report = check_policy(Broken(fault="scale"), promises=(1, 5, 6))
    assert [check.passed for check in report.checks] == [None, None, None, True]
    assert "1. a budget large enough equals dense, prefill and decode: not asked" in str(report)


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("scale", 1),
        ("mask", 1),
        ("mask", 2),
        ("mates", 2),
        ("decode", 3),
        ("graph", 4),
        ("decode", 5),
        ("nan", 8),
        ("spread", 8),
    ],
)
def test_a_broken_policy_is_named(fault, promise):
    policy = Broken(fault=fault)
    with pytest.raises(AssertionError, match=rf"checks failed\n  {promise}\. .*: FAILED"):
        check_policy(policy, exact=policy, promises=(promise,), backend="aot_eager")


def test_a_decode_step_that_forgets_the_padding_is_found_by_its_own_check():
    """By the numbers, and not only where another token comes of it."""
    with pytest.raises(AssertionError) as found:
        check_policy(Broken(fault="places"), promises=(2,))
    said = str(found.value).partition("padding and batch mates do not change a row: ")[2]
    assert said.startswith("FAILED (decode, row of 36 tokens, padded by 34: off by ")


def test_a_remove_that_leaves_something_is_found(monkeypatch):
    monkeypatch.setattr(PolicyHook, "detach_hook", lambda self, module: module)
    with pytest.raises(AssertionError, match="_forward_pre_hooks"):
        check_policy("dense", promises=(7,))


def test_the_tiny_model_is_a_function_of_its_seed():
    ids = torch.tensor([[3, 4, 5]])
    logits = [tiny_model(seed=seed)(ids).logits for seed in (0, 0, 1)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert tiny_model(num_hidden_layers=1).config.num_hidden_layers == 1
