"""Calls of generate that attnplug's decode loop serves."""

import torch
from transformers.generation.configuration_utils import CompileConfig

GATHER = "gather(k=16, block=16, sink=1, local=2, min_tokens=0)"  # all of these prompts

GVR = "gvr(k=64, min_tokens=0)"

ENDS = list(range(5, 40, 3))  # common enough that all rows end early

CALLS = {
    "greedy": {},
    "greedy-ends": dict(eos_token_id=ENDS),
    "sample": dict(do_sample=True),
    "sample-ends": dict(do_sample=True, eos_token_id=ENDS),
    "temperature": dict(do_sample=True, temperature=0.6),
    "top-k": dict(do_sample=True, top_k=7),
    "top-p": dict(do_sample=True, top_p=0.7, top_k=0),
    "min-p": dict(do_sample=True, min_p=0.05),
    "penalty": dict(repetition_penalty=1.3),
    "all": dict(
        do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
        typical_p=0.9, epsilon_cutoff=1e-3, eos_token_id=ENDS, min_new_tokens=4,
        suppress_tokens=[11], begin_suppress_tokens=[12], forced_eos_token_id=8,
        remove_invalid_values=True, renormalize_logits=True,
    ),
    "returns": dict(num_return_sequences=2, do_sample=True),
    "max-length": dict(max_new_tokens=None, max_length=33),
    "one": dict(max_new_tokens=1),
}  # fmt: skip


def prompt(rows: int = 3, tokens: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask with padding on the left of all rows but the first."""
    ids = torch.randint(41, 97, (rows, tokens), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 4 * row] = 0
    return ids, mask


def call(model, *, rows: int = 3, **options):
    """Sequences, tokens in the cache and the next random number of a call."""
    ids, mask = (x.to(model.device) for x in prompt(rows))
    torch.manual_seed(7)
    fields = dict(max_new_tokens=24, attention_mask=mask, return_dict_in_generate=True)
    out = model.generate(ids, **(fields | options))
    return out, int(out.past_key_values.get_seq_length()), torch.rand(1, device=model.device)


def assert_same(found, wanted):
    assert torch.equal(found[0].sequences, wanted[0].sequences)
    assert found[1:] == wanted[1:]


def compiling(backend: str = "eager") -> CompileConfig:
    config = CompileConfig(mode=None, backend=backend, fullgraph=True)
    config._compile_all_devices = True
    return config
