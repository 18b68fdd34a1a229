"""A trace beside a policy changes no bit, on every family; layers that cannot be traced say so."""

import pytest
import torch
from families import FAMILIES, VOCABULARY

import attnplug
from attnplug import PolicyError, trace

STREAM = "stream(top_k=2, block=16, query_block=16)"


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_trace_changes_no_bit(family, tmp_path):
    model = family.build()
    ids = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    options = dict(attention_mask=mask, max_new_tokens=3, do_sample=False)
    options |= dict(return_dict_in_generate=True, output_logits=True, disable_compile=True)
    with attnplug.applied(model, "dense"):
        wanted = model.generate(ids, **options)
    with attnplug.applied(model, STREAM):
        report = attnplug.report(model)
        traced = [layer.index for layer in report.layers if "traced by" in layer.reason]
        if not traced:
            reasons = [layer.reason for layer in report.layers if layer.prefill == "dense"]
            assert all("not traced: stream knows no softcap" in reason for reason in reasons)
            with pytest.raises(PolicyError, match="traces no layer"):
                with trace.record(model, tmp_path / "run"):
                    pass
            return
        with trace.record(model, tmp_path / "run"):
            found = model.generate(ids, **options)
    for a, b in zip(found.logits, wanted.logits, strict=True):
        assert torch.equal(a, b)
    file = trace.read(tmp_path / "run")
    assert file.layers == traced and len(file.meta["steps"]) == 3
    assert file.meta["tokens"] == [42, 29]
