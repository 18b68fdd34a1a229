"""Liger's fused norms, rotary embedding and MLPs beside a policy, put on before it or after."""

import pytest
import torch
from batching_cases import llama

import attnplug

liger = pytest.importorskip("liger_kernel.transformers", reason="needs liger-kernel")
pytestmark = pytest.mark.gpu  # its kernels do not run in Triton's interpreter
PROMPT, NEW = 700, 24


def fuse(model):
    liger._apply_liger_kernel_to_instance(model=model)


def tokens_of(model, rows):
    ids = torch.randint(
        model.config.vocab_size, (rows, PROMPT), generator=torch.Generator().manual_seed(rows)
    )
    with torch.no_grad():
        return model.generate(ids.cuda(), max_new_tokens=NEW, do_sample=False)


@pytest.mark.parametrize("first", ["liger", "policy"])
@pytest.mark.parametrize(
    "policy",
    ["dense", "momo(top_k=512, min_tokens=0)+gather(k=64, block=16, min_tokens=0)"],
)
def test_tokens_are_those_of_the_fused_model(first, policy):
    stock = llama().cuda()
    fuse(stock)
    model = llama().cuda()
    if first == "liger":
        fuse(model)
    model = attnplug.apply(model, policy=policy)
    if first == "policy":
        fuse(model)
    for rows in (1, 3, 1):  # a later call replays captured steps
        assert torch.equal(tokens_of(model, rows), tokens_of(stock, rows))
    served = attnplug.report(model).last
    assert policy.split("(")[0] in str(served)
