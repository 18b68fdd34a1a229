"""What `attnplug report --steps` runs: some certified decode steps of a model, and a table of their
certificates."""

from importlib.resources import files

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnplug import api
from attnplug.policies import certificates
from attnplug.policies.certified import Certificates


@torch.no_grad()
def run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, steps: int
) -> Table:
    """Prefill `tokens` tokens of prose and decode `steps` more, on a model that has a policy."""
    text = (files("attnplug") / "eval/data/rust_book.txt").read_text(encoding="utf-8")
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt").input_ids[:, :tokens]
    ids = ids.to(model.device)
    cache = api.make_cache(model, ids.shape[1] + steps)
    logits = model(ids, past_key_values=cache).logits
    for _ in range(steps):
        logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
    return table(certificates(cache))


def table(rows: list[Certificates]) -> Table:
    """One row a layer; layers without a tier (small or foreign caches are dense) have none."""
    found = Table(title="certificates" if rows else "no certified layer: see the notes above")
    for column in (
        "layer", "head-steps", "exact", "E_key mean", "max", "E_val mean", "max", "rung 1",
        "rung 2", "rung 3", "rung 4", "saved", "link MiB", "tier MiB",
    ):  # fmt: skip
        found.add_column(column, justify="right")
    for row in rows:
        found.add_row(
            str(row.layer), str(row.head_steps), f"{row.exact:.3f}", f"{row.key_mean:.3g}",
            f"{row.key_max:.3g}", f"{row.value_mean:.3g}", f"{row.value_max:.3g}",
            str(row.expanded), str(row.values), str(row.head), str(row.row), str(row.saved),
            f"{row.link_bytes / 2**20:.2f}", f"{row.tier_bytes / 2**20:.2f}",
        )  # fmt: skip
    return found
