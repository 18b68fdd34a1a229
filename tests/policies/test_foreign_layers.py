"""Where gather and gvr find no cache layer of their own they are dense."""

import dataclasses

import pytest
import torch
from gather_policy_cases import GATHER, SIZE, tokens
from step_cases import filled, step

from attnplug import Dense, Gvr

METHODS = [GATHER, Gvr(k=24, sink=4, window=20, min_tokens=0)]
each = pytest.mark.parametrize("method", METHODS, ids=["gather", "gvr"])


@each
def test_without_a_static_cache_it_is_dense(method, device):
    call = step(filled(method, tokens(0, 190, device=device)))
    call.state, call.lengths = None, None
    call.k, call.v = call.k[:, :, :190], call.v[:, :, :190]
    assert torch.equal(method.attend(call), Dense().attend(call))


@each
def test_another_layers_keys_are_not_read_by_what_this_one_keeps_of_its_own(method, device):
    """Gemma 3n's last layers attend to keys of a layer that is not the one they are handed."""
    call = step(filled(method, tokens(0, 190, device=device)))
    other = filled(method, tokens(9, 190, device=device))
    call.k, call.v = other.keys, other.values
    assert torch.equal(method.attend(call), Dense().attend(call))


@each
def test_a_small_cache_is_read_whole(method, device):
    call = step(filled(method, tokens(0, 190, device=device)))
    late = dataclasses.replace(method, min_tokens=SIZE + 1)
    assert torch.equal(late.attend(call), Dense().attend(call))
    early = dataclasses.replace(method, min_tokens=SIZE)
    assert not torch.equal(early.attend(call), Dense().attend(call))
