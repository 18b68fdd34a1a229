"""Where a method leaves a cache to dense, it costs what dense costs."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnplug
from attnplug.testing import tiny_model

FEW, MANY = 4, 12  # new tokens
METHODS = ["gather", "sketch", "gvr", "certified", "exact", "momo", "auto", "momo+gvr"]
METHODS += [f"exact(draft='{draft}')" for draft in ("gvr", "sketch(k=4, bytes=16)")]


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of_steps(model, policy: str) -> Counter[str]:
    """What a call of MANY new tokens runs more than one of FEW."""
    ids, options = torch.randint(4, 60, (1, 100)), {"do_sample": False, "disable_compile": True}
    found = []
    with attnplug.applied(model, policy):
        for new in (FEW, MANY):
            model.generate(ids, max_new_tokens=FEW, **options)  # what a first call does, is done
            with Ops() as seen:
                model.generate(ids, max_new_tokens=new, **options)
            found.append(seen.counts)
        assert {each.decode.split(" ")[0] for each in attnplug.report(model).last} == {"dense"}
    return found[1] - found[0]


@pytest.mark.parametrize("policy", METHODS)
def test_a_step_runs_the_ops_of_dense(policy):
    model = tiny_model()
    assert ops_of_steps(model, policy) == ops_of_steps(model, "dense")
