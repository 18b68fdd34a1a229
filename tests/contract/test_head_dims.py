"""Head dimensions that kernels pad: every policy whose budget covers the text gives dense's tokens,
or says which width it has no kernels for."""

import pytest
import torch
from contract_cases import CASES

import attnplug
from attnplug.testing import tiny_model

IDS = torch.randint(4, 60, (2, 40), generator=torch.Generator().manual_seed(7))
ALONE = [name for name in CASES if "+" not in name]
FEW = "sketch: 24 bytes are 64 coordinates, the head 48"


def generate(model, device):
    ids = IDS.to(device)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
    )


@pytest.mark.parametrize("width", [48, 112])
@pytest.mark.parametrize("name", ALONE)
def test_a_covering_budget_gives_denses_tokens(name, width, device):
    model = tiny_model(head_dim=width, device=device)
    wanted = generate(model, device)
    with attnplug.applied(model, CASES[name].exact):
        refused = FEW if width == 48 and "sketch" in name else ""
        assert all(refused in layer.reason for layer in attnplug.report(model).layers)
        assert ("sdpa (dense)" in str(attnplug.report(model))) == bool(refused)
        assert torch.equal(generate(model, device), wanted)


@pytest.mark.parametrize("name", ["dense", "momo+gather", "gather in host memory"])
def test_heads_of_512_are_served_by_what_has_kernels_for_them(name, device):
    model = tiny_model(head_dim=512, device=device)
    wanted = generate(model, device)
    with attnplug.applied(model, CASES[name].exact):
        assert "sdpa (dense)" not in str(attnplug.report(model))
        assert torch.equal(generate(model, device), wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dense", "momo+gather"])
def test_heads_of_512_in_16_bits(name, device):
    model = tiny_model(head_dim=512, device=device, dtype=torch.bfloat16)
    ids = torch.randint(4, 60, (1, 120), generator=torch.Generator().manual_seed(8)).to(device)
    wanted = model(ids).logits
    with attnplug.applied(model, CASES[name].exact):
        found = model(ids).logits
        served = attnplug.report(model).last
    assert name.split("+")[0] in str(served)
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.gpu
@torch.no_grad()
def test_momo_leaves_float32_heads_of_512_to_dense_on_a_gpu_and_says_so():
    model = tiny_model(head_dim=512, device="cuda")
    ids = torch.randint(4, 60, (1, 300), device="cuda")
    wanted = model(ids).logits
    with attnplug.applied(model, CASES["momo"].exact):
        assert torch.allclose(model(ids).logits, wanted, rtol=1e-3, atol=1e-4)
        assert "heads of 512 in float32" in str(attnplug.report(model).last)


@pytest.mark.parametrize("name", ["gvr", "certified", "sketch", "prefill=stream"])
def test_heads_of_512_stay_dense_and_say_so_under_the_others(name, device):
    model = tiny_model(head_dim=512, device=device)
    method = name.removeprefix("prefill=")
    why = f"{method}: head dimension 512 is not a multiple of 16 from 16 to 256"
    with attnplug.applied(model, CASES[name].exact):
        for layer in attnplug.report(model).layers:
            assert layer.reason == why and layer.prefill == layer.decode == "sdpa (dense)"
