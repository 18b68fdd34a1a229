"""Drafts, prompts and calls that the tests of exact share."""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from attnplug.models import pace, rounds
from attnplug.testing import tiny_model

SHORT = "gather(k=1, block=16, sink=1, local=1)"  # often wrong
FAR = "gather(k=0, block=16, sink=0, local=1)"  # a window of 16 tokens: nearly always wrong
GVR = "gvr(k=16, sink=1, window=1)"
SKETCH = "sketch(k=4, bytes=16, tail='drop')"
DRAFTS = ["gather", SHORT, FAR, GVR, SKETCH]
SAMPLED = dict(do_sample=True, temperature=0.8, top_p=0.9)
NEW = 24
ROWS = ["rows", "padded rows", "one padded row"]
HEAVY = pace.Costs(2.5, 3.0, 0.0)  # of caches that weigh three times what the weights do


def as_over_heavy_caches(monkeypatch):
    """Have m="auto" choose as if caches were heavy: over light ones its rounds have a draft."""
    monkeypatch.setattr(rounds, "costs_of", lambda *about: HEAVY)


def ids_of(tokens=150, rows=1, seed=1):
    return torch.randint(4, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def call(model, ids=None, new=NEW, **options):
    ids = ids_of() if ids is None else ids
    torch.manual_seed(11)
    options = dict(do_sample=False) | options
    out = model.generate(ids.to(model.device), max_new_tokens=new, **options)
    tokens = getattr(out, "sequences", out)
    return tokens[:, ids.shape[1] :].tolist(), out


def exact(draft, m, more=""):
    m = 8 if draft == SKETCH and m == 15 else m  # its ring has no more
    return f"{more}exact(draft={draft!r}, m={m!r}, min_tokens=0)"


def tally(model):
    return vars(model)["_attnplug_loop"].rounds.tally


def rows_of(what, model, tokens=150):
    """Prompts of several rows, and the options of their call."""
    ids, options = ids_of(tokens, rows=1 if what == "one padded row" else 3), {}
    if what != "rows":
        mask = torch.ones_like(ids)
        for row, padded in enumerate((9, 0, 40)[: len(ids)]):
            mask[row, :padded] = 0
        options["attention_mask"] = mask.to(model.device)
    return ids, options


def windowed(device):
    """Gemma 3 with windows of 32 tokens in every other layer."""
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=32, sliding_window_pattern=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).to(device).eval()


def padding_model(device: str):
    """A tiny model that knows what to pad with."""
    made = tiny_model(device=device)
    made.generation_config.pad_token_id = 0
    return made
