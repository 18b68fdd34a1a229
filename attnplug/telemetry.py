"""What `attnplug report --steps` runs: some decode steps of a model, and tables of what its cache
layers counted meanwhile: certificates, audits, picks, blocks found on the GPU."""

import dataclasses
from importlib.resources import files

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnplug import api
from attnplug.errors import ArgumentError
from attnplug.models.names import CACHE
from attnplug.policies import picks, residency
from attnplug.policies._certified_layer import Certificates, certified_layers
from attnplug.policies._gather_layers import Residency
from attnplug.policies._gvr_layer import Picks
from attnplug.policies._sketch_audit import Audit
from attnplug.policies._sketch_layer import audit


@dataclasses.dataclass(frozen=True)
class Counted:
    """What layers counted, a row a layer: blocks found on the GPU, picks, certificates, audits."""

    residency: list[Residency]
    picks: list[Picks]
    certificates: list[Certificates]
    audits: list[Audit]

    def tables(self) -> list[Table]:
        """A table of each kind that was counted; certificates have two."""
        found = [residents(self.residency)] if self.residency else []
        found += [picked(self.picks)] if self.picks else []
        found += certified(self.certificates) if self.certificates else []
        return found + ([audited(self.audits)] if self.audits else [])


@torch.no_grad()
def run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, steps: int
) -> Counted:
    """Prefill `tokens` tokens of prose and decode `steps` more, on a model that has a policy: what
    its layers counted meanwhile. Raises ArgumentError where the prose is shorter."""
    text = (files("attnplug") / "eval/data/rust_book.txt").read_text(encoding="utf-8")
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ArgumentError(f"tokens is {tokens}, needs at most {ids.shape[1]}, the whole prose")
    ids = ids.to(model.device)
    cache = api.make_cache(model, ids.shape[1] + steps)
    logits = model(ids, **{CACHE: cache}).logits
    for _ in range(steps):
        logits = model(logits[:, -1:].argmax(-1), **{CACHE: cache}).logits
    return Counted(residency(cache), picks(cache), certified_layers(cache), audit(cache))


def _numbers(title: str, *columns: str) -> Table:
    found = Table(title=title)
    for column in columns:
        found.add_column(column, justify="right")
    return found


def residents(rows: list[Residency]) -> Table:
    """One row a layer that gather keeps in host memory."""
    found = _numbers(
        "blocks on the GPU, of a cache in host memory",
        "layer",
        "wanted",
        "found",
        "hit rate",
        "link MiB",
        "GPU MiB",
        "host MiB",
    )
    for row in rows:
        sizes = (row.link_bytes, row.device_bytes, row.host_bytes)
        found.add_row(
            str(row.layer),
            str(row.wanted),
            str(row.found),
            f"{row.hit_rate:.3f}",
            *(f"{size / 2**20:.2f}" for size in sizes),
        )
    return found


def picked(rows: list[Picks]) -> Table:
    """One row a layer of gvr's."""
    found = _numbers(
        "tokens that the last step read",
        "layer",
        "tokens",
        "density",
    )
    for row in rows:
        found.add_row(str(row.layer), str(row.tokens), f"{row.density:.3f}")
    return found


def audited(rows: list[Audit]) -> Table:
    """One row a layer of sketch's that had an audit."""
    found = _numbers(
        "errors of outputs, root mean square, estimated from unread tokens",
        "layer",
        "audits",
        "error",
        "of the output",
    )
    for row in rows:
        found.add_row(str(row.layer), str(row.audits), f"{row.error:.2g}", f"{row.relative:.2g}")
    return found


def certified(rows: list[Certificates]) -> list[Table]:
    """Bounds, and what was done for them: one row a layer; layers without a tier (small or foreign
    caches are dense) have none. Two tables, as one does not fit a terminal of 80 columns."""
    bounds = _numbers(
        "certificates: share of heads recomputed, bounds of the others and of all",
        "layer",
        "head\nsteps",
        "exact",
        "E_key mean",
        "max",
        "E_val mean",
        "max",
        "all",
    )
    work = _numbers(
        "how often a rung was climbed, hits in the scratch cache, MiB",
        "layer",
        "rung 1",
        "rung 2",
        "rung 3",
        "rung 4",
        "saved",
        "hits",
        "link",
        "tier",
    )
    for row in rows:
        bounds.add_row(
            str(row.layer),
            str(row.head_steps),
            f"{row.exact:.3f}",
            f"{row.key_mean:.2g}",
            f"{row.key_max:.2g}",
            f"{row.value_mean:.2g}",
            f"{row.value_max:.2g}",
            f"{row.layer_max:.2g}",
        )
        work.add_row(
            str(row.layer),
            str(row.needed),
            str(row.values),
            str(row.head),
            str(row.row),
            str(row.saved),
            f"{row.hit_rate:.2f}",
            f"{row.link_bytes / 2**20:.1f}",
            f"{row.tier_bytes / 2**20:.1f}",
        )
    return [bounds, work]
