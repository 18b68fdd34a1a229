"""What a card is, and what a user reads where a kernel does not fit it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from attnplug import AttnplugError, CardError
from attnplug.ops.common import define, device
from attnplug.ops.common.device import INTERPRETED, Card

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda", 3)


@pytest.fixture
def seen(monkeypatch):
    """Has torch see a card of this capability and memory."""

    def see(capability, hip=None, **more):
        major, minor = capability
        found = SimpleNamespace(major=major, minor=minor, multi_processor_count=82, **more)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        monkeypatch.setattr(torch.version, "hip", hip)
        device.card.cache_clear()
        return device.card(GPU)

    yield see
    device.card.cache_clear()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_nvidia_cards_have_what_their_capability_says(seen, capability):
    card = seen(capability, shared_memory_per_block=49152, shared_memory_per_block_optin=101376)
    assert (card.vendor, card.processors, card.shared) == ("nvidia", 82, 101376)
    assert card.asm and card.precision == "tf32x3"
    assert card.mma == (capability[0] >= 8) and card.wgmma == (capability == (9, 0))
    assert card.pdl == card.tma == (capability[0] >= 9)
    assert card.limit(80) == {"maxnreg": 80} and card.limit(None) == {}
    assert device.early(GPU) == (card.pdl, {"launch_pdl": True} if card.pdl else {})


def test_a_cards_bandwidth_is_two_transfers_a_clock(seen):
    sizes = dict(shared_memory_per_block=49152, shared_memory_per_block_optin=101376)
    assert seen((8, 9), **sizes).bandwidth == 0  # torch does not say
    sizes |= dict(memory_clock_rate=10_501_000, memory_bus_width=384)  # kHz, bits: a 4090
    assert seen((8, 9), **sizes).bandwidth == pytest.approx(1008e9, rel=1e-3)
    assert seen((12, 1), is_integrated=True, **sizes).bandwidth == 0  # the host's memory
    assert seen((9, 4), hip="7.0", **sizes).bandwidth == 0


@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (11, 0)])  # MI250, MI300, RDNA 3
def test_amd_cards_have_nothing_of_nvidias(seen, capability):
    card = seen(capability, hip="7.0", shared_memory_per_block=65536)  # ROCm gives no other
    assert (card.vendor, card.shared, card.precision) == ("amd", 65536, "ieee")
    assert not (card.pdl or card.asm or card.mma or card.wgmma or card.tma)
    assert card.limit(80) == {} and device.early(GPU) == (False, {})


def test_the_interpreter_has_room_and_no_instructions_of_a_gpu():
    assert device.card(torch.device("cpu")) == INTERPRETED == Card.made("", (0, 0), 8, 1 << 30)
    assert not (INTERPRETED.pdl or INTERPRETED.asm or INTERPRETED.mma or INTERPRETED.wgmma)


def launched(monkeypatch, error):
    """The run of an op on a GPU whose launch raises."""

    def launch(q):
        raise error

    monkeypatch.setattr(torch.cuda, "device", lambda where: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "NVIDIA L4")
    return define._run_on_device("my_op", launch, repeats=False)


def test_a_launch_that_does_not_fit_names_op_card_and_bytes(monkeypatch):
    run = launched(monkeypatch, OutOfResources(104448, 101376, "shared memory"))
    with pytest.raises(CardError) as caught:
        run(torch.zeros(1))
    said = "my_op: a kernel wants 104,448 bytes of shared memory, and NVIDIA L4 allows 101,376. "
    assert str(caught.value).startswith(said) and "attnplug doctor" in str(caught.value)
    assert isinstance(caught.value, AttnplugError)
    assert isinstance(caught.value.__cause__, OutOfResources)
    run = launched(monkeypatch, OutOfResources(2048, 1024, "threads"))
    with pytest.raises(CardError, match=r"wants 2,048 threads, and NVIDIA L4 allows 1,024\."):
        run(torch.zeros(1))


def test_other_errors_of_a_launch_stay_what_they_are(monkeypatch):
    with pytest.raises(KeyError, match="maxnreg"):
        launched(monkeypatch, KeyError("maxnreg"))(torch.zeros(1))


# Triton compiles a step's kernel for a card with too little memory, and refuses to load it.
SMALL = """
import _ptx_gpu, torch
from _ptx_inputs import FP32, attention
_ptx_gpu.aim(_ptx_gpu.TARGETS["sm_86"]._replace(shared=10000))
_ptx_gpu.pretend()
torch.set_grad_enabled(False)
from attnplug import CardError, ops
try:
    ops.dense_decode(*attention(1, 4, 4, 1, 4096, 256, FP32), scale=0.1)
except CardError as error:
    print(error)
"""


def test_tritons_own_refusal_becomes_a_card_error(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    found = subprocess.run(
        [sys.executable, "-c", SMALL], env=env, check=True, capture_output=True, text=True
    )
    assert found.stdout.startswith("dense_decode: a kernel wants "), found
    assert "bytes of shared memory, and NVIDIA GeForce RTX 3090 allows 10,000." in found.stdout
