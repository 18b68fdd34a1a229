"""On a GPU a step whose launches are made again gives the bits of one that is checked, planned and
bound anew."""

import dataclasses

import pytest
import torch

import attnplug.ops.common.launches as launches
from attnplug.bench.quick import PLANS, Heads, decode_call, gaussian
from attnplug.policies import parse

HEADS, PLAN = Heads(), PLANS["cuda"]


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    "policy", ["dense", "gather(min_tokens=0)", "gvr(min_tokens=0)", "sketch(min_tokens=0)"]
)
def test_repeated_steps_give_the_same_bits(policy, queries, monkeypatch):
    method, found = parse(policy), []
    assert method.decode is not None
    for repeating in (False, True):
        monkeypatch.setattr(launches, "REPEATING", repeating)
        call, *_ = decode_call(HEADS, PLAN, 20000, method.decode, seed=0)
        asked = [gaussian(PLAN, seed)(1, HEADS.query, queries, HEADS.dim) for seed in range(6)]
        found.append([method.attend(dataclasses.replace(call, q=q)) for q in asked])
    assert all(map(torch.equal, *found))
