"""torch's default dtype and device are the user's: they change nothing of what a policy makes."""

import pytest
import torch
from contract_cases import CASES

import attnplug
from attnplug.testing.policy import tiny_model


def tokens(policy: str, device: str = "cpu") -> list[list[int]]:
    """The first tokens after two prompts, the second of them padded."""
    ids = torch.randint(2, 90, (2, 70), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    with attnplug.applied(tiny_model(device=device), policy) as model:
        options = dict(max_new_tokens=3, eos_token_id=3, do_sample=False, disable_compile=True)
        return model.generate(ids, attention_mask=mask, **options)[:, 70:].tolist()


@pytest.mark.parametrize("policy", [each.policy for each in CASES.values()], ids=list(CASES))
def test_a_default_dtype_changes_no_token(policy):
    wanted = tokens(policy)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tokens(policy) == wanted
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [each.policy for each in CASES.values()], ids=list(CASES))
def test_a_default_device_moves_nothing(policy):
    """The generator that draws a prompt is the CPU's, so that only the call has the default."""
    model, ids = tiny_model(device="cuda"), torch.full((2, 40), 5, device="cuda")
    attnplug.apply(model, policy)
    wanted = model.generate(ids, max_new_tokens=8, eos_token_id=3)
    torch.set_default_device("cuda")
    try:
        assert torch.equal(model.generate(ids, max_new_tokens=8, eos_token_id=3), wanted)
    finally:
        torch.set_default_device(None)
