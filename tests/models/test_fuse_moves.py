"""When weights move for fused projections, and what else may go on meanwhile: unasked, in threads,
in inference mode, where memory is short."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fuse_cases import FAMILIES, WHOLE, family, layer_of, tokens_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import attnplug
from attnplug.models import fuse
from attnplug.models.fuse import Fusion
from attnplug.models.generate import LOOP
from attnplug.testing.policy import tiny_model


@pytest.mark.parametrize("name", FAMILIES)
def test_unasked_a_gpu_fuses_from_the_first_call_on(name, device):
    model = family(name, device)
    before = [each.data_ptr() for each in model.parameters()]
    wanted = tokens_of(model)
    with attnplug.applied(model, "dense"):
        assert [each.data_ptr() for each in model.parameters()] == before
        assert attnplug.report(model).fused == ""
        assert tokens_of(model) == wanted
        moved = [each.data_ptr() for each in model.parameters()] != before
        assert moved == (device == "cuda")
        assert attnplug.report(model).fused == (WHOLE if moved else "")
    with attnplug.applied(model, "dense", fuse=False):
        before = [each.data_ptr() for each in model.parameters()]
        assert tokens_of(model) == wanted
        assert [each.data_ptr() for each in model.parameters()] == before


def test_memory_that_weights_leave_is_free():
    model = attnplug.apply(tiny_model(), "dense", fuse=True)
    tokens_of(model)
    left = StorageWeakRef(layer_of(model).q_proj.weight.untyped_storage())
    assert not left.expired()
    model.to(torch.bfloat16)
    gc.collect()
    assert left.expired()
    attnplug.remove(model)


def test_it_fuses_where_the_model_is_moved_to(monkeypatch):
    monkeypatch.setattr(fuse, "FASTER", {"cpu"})
    model = tiny_model()
    wanted = tokens_of(model)
    with attnplug.applied(model, "dense"):
        assert not vars(model)[LOOP].fusion.fused
        assert tokens_of(model) == wanted and attnplug.report(model).fused == WHOLE
    alone = (p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert all(alone)
    other = nn.Sequential(nn.Linear(3, 3))
    assert str(Fusion.of(other, asked=False)) == ""


def test_threads_that_share_a_model_get_their_own_tokens(monkeypatch):
    monkeypatch.setattr(fuse, "FASTER", {"cpu"})
    model, lengths = tiny_model(), range(20, 26)
    wanted = [tokens_of(model, tokens=length) for length in lengths]
    with attnplug.applied(model, "dense"), ThreadPoolExecutor(len(lengths)) as pool:
        for _ in range(4):
            found = list(pool.map(lambda length: tokens_of(model, tokens=length), lengths))
            assert found == wanted
        assert attnplug.report(model).fused == WHOLE


def test_another_threads_forward_is_its_own():
    """While steps fuse, somebody else calls the model: the last product is not of his input."""
    model = tiny_model()
    attnplug.apply(model, "dense", fuse=True)
    fusion, attention = vars(model)[LOOP].fusion, layer_of(model)
    one, other = torch.randn(2, 1, 3, 64).unbind()
    wanted = torch.nn.functional.linear(other, attention.k_proj.weight)
    with fusion.on():
        attention.q_proj(one)
        assert torch.equal(attention.k_proj(other), wanted)
        attention.q_proj(one)
        fusion.groups[0].close()  # the other thread's call has ended
        assert torch.equal(attention.k_proj(other), wanted)
        q = torch.nn.functional.linear(other, attention.q_proj.weight)
        assert torch.equal(attention.q_proj(other), q)


def test_weights_that_inference_mode_has_moved_train(monkeypatch):
    monkeypatch.setattr(fuse, "FASTER", {"cpu"})
    model, ids = tiny_model(), torch.arange(3, 20)[None]
    with torch.inference_mode(), attnplug.applied(model, "dense"):
        tokens_of(model)
        assert attnplug.report(model).fused == WHOLE
        inside = [each.is_inference() for each in model.parameters()]
    assert not any([*inside, *(each.is_inference() for each in model.parameters())])
    model(ids, labels=ids).loss.backward()
    assert all(each.grad is not None for each in model.parameters())


def test_weights_stay_where_there_is_no_room_to_move_them(monkeypatch):
    def full(tensors):
        raise torch.OutOfMemoryError

    model, stock = tiny_model(), tiny_model()
    with monkeypatch.context() as patched:
        patched.setattr(fuse, "_lay", full)
        attnplug.apply(model, "dense", fuse=True)
        assert tokens_of(model) == tokens_of(stock)
        assert attnplug.report(model).fused == (
            "not fused in 4 places: the device has no room to move weights to"
        )
    assert tokens_of(model) == tokens_of(stock) and attnplug.report(model).fused == WHOLE


@pytest.mark.gpu
def test_packing_takes_no_memory():
    model = tiny_model(device="cuda", hidden_size=2048, intermediate_size=4096)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    attnplug.apply(model, "dense", fuse=True)
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.memory_reserved() <= 1.1 * reserved
    attnplug.remove(model)
    assert torch.cuda.memory_allocated() <= before
