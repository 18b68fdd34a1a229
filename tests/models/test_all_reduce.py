"""Sums over the ranks are one kernel's only where all of them can have it, and NCCL's elsewhere.
tests/contract/test_tensor_parallel.py runs it on two GPUs."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import _symmetric_memory as memory

from attnplug.models import all_reduce

ON = {"_collective.auto_select": True}


class Split(SimpleNamespace):
    """What is asked of a model that two ranks of this host share, the second of which this is."""

    def __init__(self, **fields):
        group = SimpleNamespace(group_name="pair")
        mesh = SimpleNamespace(ndim=1, size=lambda: 2, get_group=lambda: group)
        given = dict(_tp_size=2, _device_mesh=mesh, dtype=torch.bfloat16)
        super().__init__(**(given | {"device": torch.device("cuda", 1)} | fields))


@pytest.fixture
def host(monkeypatch):
    """A host of two GPUs that reach each other: what its ranks do is noted, and goes well."""
    done = SimpleNamespace(opened=0, error=None, others=1, reach=True)

    def rendezvous(tensor, group):
        done.opened += 1
        if done.error:
            raise done.error

    def all_reduce_min(worked, op, group):
        worked.fill_(min(int(worked), done.others))

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(all_reduce, "SHARES_MEMORY", {})
    monkeypatch.setattr(all_reduce.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(all_reduce.dist, "all_reduce", all_reduce_min)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: done.reach)
    monkeypatch.setattr(memory, "enable_symm_mem_for_group", lambda name: None)
    monkeypatch.setattr(memory, "empty", lambda size, dtype, device: None)
    monkeypatch.setattr(memory, "rendezvous", rendezvous)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda value, device=None, dtype=None: tensor(value))
    return done


def test_ranks_that_reach_each_other_ask_once(host):
    assert all_reduce.one_shot_options(Split()) == ON
    assert all_reduce.one_shot_options(Split()) == ON
    assert host.opened == 1


@pytest.mark.parametrize(
    "fields",
    [
        dict(_tp_size=1),
        dict(dtype=torch.float16),
        dict(device=torch.device("cpu")),
    ],
    ids=str,
)
def test_other_models_keep_nccl(host, fields):
    assert all_reduce.one_shot_options(Split(**fields)) == {}
    assert host.opened == 0


def test_other_hosts_keep_nccl(host, monkeypatch):
    host.reach = False
    assert all_reduce.one_shot_options(Split()) == {}
    host.reach = True
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank sees its own GPU only
    assert all_reduce.one_shot_options(Split()) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other rank is on another host
    assert all_reduce.one_shot_options(Split()) == {}
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert all_reduce.one_shot_options(Split()) == {}
    assert host.opened == 0


def test_what_a_container_forbids_is_said_and_agreed_on(host, caplog):
    host.error = RuntimeError("pidfd_getfd: Operation not permitted\nsome stack")
    assert all_reduce.one_shot_options(Split()) == {}
    assert "NCCL sums over the ranks of a decode step: pidfd_getfd" in caplog.text


def test_what_another_rank_cannot_do_this_one_does_not(host):
    host.others = 0
    assert all_reduce.one_shot_options(Split()) == {}
