"""What launchers tell Triton's compilers of the tensors that they hand to kernels."""

import pytest
import torch

from attnplug.ops.common import Card, cache_of, token_of, views
from attnplug.ops.common.views import chosen_between

CPU = torch.device("cpu")


def amd(device):
    return Card.made("amd", (9, 4), 304, 65536)


def knows_the_size(tensor) -> bool:
    backend = pytest.importorskip("triton.backends.amd.compiler").HIPBackend
    return "S" in backend.get_tensor_specialization(tensor, align=True)


def test_amds_compiler_knows_no_size_of_what_a_kernel_chooses_between(monkeypatch):
    monkeypatch.setattr(views, "card", amd)
    cache = cache_of(torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16))
    token = token_of(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16))
    assert all(map(knows_the_size, (cache.k, cache.v, token.k, token.v)))
    for given in (cache, token):
        (found, _), same = chosen_between(CPU, given, torch.zeros(1)), type(given)
        assert type(found) is same and found[2:] == given[2:]
        assert not knows_the_size(found.k) and not knows_the_size(found.v)
        found.k.fill_(1.0)
        assert bool((given.k == 1).all())  # the same memory
    assert knows_the_size(cache.k)  # the caller's tensors are what they were


def test_other_tensors_stay_what_they_are(monkeypatch):
    cache, near = cache_of(torch.zeros(1, 1, 8, 16), None), torch.zeros(1)
    found = chosen_between(CPU, cache, near)  # the interpreter asks for no size
    assert found[0] is cache and found[1] is near
    monkeypatch.setattr(views, "card", amd)
    assert chosen_between(CPU, cache, None)[0] is cache  # there is no choice
