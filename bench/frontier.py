"""Quality at equal bytes and tokens: what a decode step loses by each way to choose what it reads.

    python bench/frontier.py gemma3-270m --tokens 32768 --device cuda

Every window of prose is prefilled once by dense attention. Its last 16 tokens are then read one at
a time (teacher forcing) by each policy: attnplug's own through their decode steps and caches, the
selectors of the literature as bench/_selectors.py emulates them, all beside the same first block
and last four. Of every layer with full attention, in every step: the share of dense attention over
what the step reads (`captured-attention`), and |out - dense| / |dense| over the layer's heads
(`output-error`), of the same queries and keys; and of the logits the KL divergence from dense's
(`kl`). A value is a mean over steps and layers, its interval a bootstrap over windows.

Adds quality rows of the study `frontier` to bench/results/frontier.json, one a policy and question,
after each window. With `--policy` they are of these decode methods in place of the list, anybody's
whose package is installed; what a method reads that this file does not know is not asked, so that
it has no `captured-attention`. Rows hold each window's value in `samples`, so that `--first 4` in
another call of the same commit adds windows to them. `bytes` is what is scanned for a token and KV
head, `read` the tokens that are read, `step_bytes` what one KV head's step reads of both in
bfloat16. bench/report.py draws them, with the time of a policy's step beside, where a row of the
same `policy` has one."""

import argparse
import copy
import dataclasses
import itertools
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from _results import run_of, write_rows
from _selectors import Selector, shares, valid

import attnplug
from attnplug import Dense, Gather, Gvr, Policy, Sketch
from attnplug.bench.rows import policy_name
from attnplug.eval.measure import compare_logits, prose_window
from attnplug.eval.stats import bootstrap_mean
from attnplug.models.layers import config_heads
from attnplug.models.names import CACHE
from attnplug.models.pretrained import load
from attnplug.ops import top_tokens
from attnplug.ops.sketch.state import BLOCK, COORDINATES
from attnplug.plan import read_tokens
from attnplug.policies import AttentionCall, Phase, parse
from attnplug.policies._gvr_layer import GvrLayer
from attnplug.policies._sketch_audit import _repeat
from attnplug.policies._sketch_layer import SketchLayer
from attnplug.policies.gather import INT8_FROM

STEPS = 16
FIXED = 5 * BLOCK  # tokens that selectors read beside those they choose
STUDY = "frontier"
RESULTS = Path(__file__).parent / "results" / f"{STUDY}.json"
DENSE = {"captured-attention": 1.0, "output-error": 0.0, "kl": 0.0}


class Case(NamedTuple):
    """A policy, its name in rows, bytes scanned a token and KV head, and all tokens read."""

    method: Phase
    name: str
    size: float
    read: int


def paged(pages: Gather, width: int) -> Case:
    """gather over a cache that is long enough for codes."""
    summaries = read_tokens(pages, INT8_FROM, INT8_FROM, width) - pages.kept
    return Case(pages, policy_name(pages), 4 * width * summaries / INT8_FROM, pages.kept)


def own(tokens: list[int], sizes: list[int], width: int) -> list[Case]:
    """attnplug's policies at these budgets, and gather's default."""
    cases = [paged(Gather(min_tokens=0), width)]
    for k in tokens:
        for scoring in ("bounds", "band"):
            cases.append(paged(Gather(k=k // 16, scoring=scoring, min_tokens=0), width))
        best = Gvr(k=k, min_tokens=0)
        cases.append(Case(best, policy_name(best), width + 4, best.kept))
        for size, tail in itertools.product(sizes, ("regression", "drop")):
            sketch = Sketch(bytes=size, k=k, tail=tail, min_tokens=0)
            silent = dataclasses.replace(sketch, audit=0)  # an audit is the host's, between steps
            cases.append(Case(silent, policy_name(sketch), size, sketch.kept))
    return cases


def named(texts: list[str]) -> list[Case]:
    """The decode methods of these policies; a method that says no budget cannot be placed."""
    cases = []
    for text in texts:
        method = parse(text).decode
        if not method.kept:
            raise SystemExit(f"{text}: {method.name} does not say how many keys a step reads")
        cases.append(Case(method, policy_name(text), 0.0, method.kept))
    return cases


def emulated(tokens: list[int], sizes: list[int]) -> list[Case]:
    """The literature's at the same budgets; fresh, as they keep what they know of a text."""
    cases = []
    for k in tokens:
        made = [Selector(kind, k, size) for size in sizes for kind in KINDS]
        made.append(Selector("exact", k))
        cases += [Case(method, str(method), method.size, FIXED + k) for method in made]
    return cases


KINDS = ("bounds", "mean", "double", "loki")
KNOWN = (Selector, Gather, Gvr, Sketch, Dense)  # methods whose reads `kept_by` can tell


@dataclasses.dataclass(frozen=True)
class Probe(Phase):
    """Decode by another method, and how far each step's output is from dense's."""

    inner: Phase
    found: list[tuple[float, float]] = dataclasses.field(default_factory=list, repr=False)

    name: ClassVar[str] = "probe"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})
    takes_pending: ClassVar[bool] = True
    keeps_queries: ClassVar[bool] = True

    def cache_layer(self, max_length: int) -> Any:
        return self.inner.cache_layer(max_length)

    def refusal(self, shape: Any) -> str | None:
        return self.inner.refusal(shape)

    def note_queries(self, call: AttentionCall) -> None:
        self.inner.note_queries(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if not self.inner.takes_pending:
            call.flush()
        out = self.inner.attend(call)
        dense, kept = Dense().attend(call), kept_by(self.inner, call)
        error = float((out - dense).float().norm() / dense.float().norm())
        mass = 1.0 if isinstance(self.inner, KNOWN) else math.nan
        if kept is not None:
            mass = float((shares(call) * kept[:, None]).sum(-1).mean())
        self.found.append((mass, error))
        return out


def kept_by(method: Phase, call: AttentionCall) -> torch.Tensor | None:
    """Which tokens the step that has just run has read, bool `[Hkv,n]`; None: all, or the method is
    not of KNOWN."""
    length, layer = valid(call), call.state
    if isinstance(method, Selector):
        return method.kept(call)
    read = torch.zeros(call.k.shape[1], call.k.shape[2] + 1, dtype=torch.bool, device=call.k.device)
    if isinstance(method, Gather) and (reads := method.reads(call)) is not None:
        blocks = reads.index[0, :: call.q.shape[1] // call.k.shape[1], 0].long()
        at = blocks[..., None] * method.block + torch.arange(method.block, device=blocks.device)
        at = torch.where(blocks[..., None] < 0, length, at).flatten(1).clamp(max=length)
        return read.scatter_(1, at, True)[:, :length]
    if isinstance(method, Gvr) and isinstance(layer, GvrLayer) and layer.codes is not None:
        kept = {"sink": method.sink, "window": method.window, "lengths": call.lengths}
        picks = top_tokens(call.q, layer.codes, layer.scales, method.k, **kept)[0]
        read[:, : method.sink], read[:, max(0, length - method.window) : length] = True, True
    elif isinstance(method, Sketch) and isinstance(layer, SketchLayer) and layer.is_fitted:
        assert layer.basis is not None and layer.codes is not None and layer.asked is not None
        rows = {"lengths": call.lengths, "start": None, "key_mask": None}
        asked = call.q, call.k, call.v, layer.basis, layer.codes, layer.asked, rows
        picks = _repeat(*asked).picks[0]
        near = max((length - 1) // BLOCK - 3, 1) * BLOCK
        read[:, :BLOCK], read[:, near:length] = True, True
    else:
        return None
    return read.scatter_(1, torch.where(picks < 0, read.shape[1] - 1, picks).long(), True)[
        :, :length
    ]


def steps(model: Any, cache: Any, ids: torch.Tensor, method: Phase) -> tuple[torch.Tensor, Probe]:
    """Logits `[STEPS,V]` of the last tokens, read one at a time into a prefilled cache."""
    probe, logits = Probe(method), []
    with attnplug.applied(model, Policy(decode=probe)):
        for token in ids[:, -STEPS:].split(1, 1):
            out = model(token, **{CACHE: cache}, use_cache=True)
            logits.append(out.logits[0, -1].float().cpu())
    return torch.stack(logits), probe


def prefilled(model: Any, ids: torch.Tensor, method: Phase) -> Any:
    """A cache with all but the last tokens."""
    with attnplug.applied(model, Policy(decode=Probe(method))):
        cache = attnplug.make_cache(model, ids.shape[1] + BLOCK)
        model(ids[:, :-STEPS], **{CACHE: cache}, logits_to_keep=1)
    return cache


@torch.inference_mode()
def window(
    model: Any, ids: torch.Tensor, cases: list[Case], literature: list[Case]
) -> dict[tuple[str, str], float]:
    """What each policy's steps give on one text, by its name and the question."""
    found: dict[tuple[str, str], float] = {}
    prompt = Selector("exact", 1)
    plain = prefilled(model, ids, prompt)
    dense, _ = steps(model, copy.deepcopy(plain), ids, Dense())
    for case in [*literature, *cases]:
        if isinstance(case.method, Selector):
            cache = copy.deepcopy(plain)  # a rolling window cannot be cropped
            for old, new in zip(plain.layers, cache.layers, strict=True):
                if id(old) in prompt.queries:
                    case.method.queries[id(new)] = prompt.queries[id(old)]
        else:
            cache = prefilled(model, ids, case.method)
        logits, probe = steps(model, cache, ids, case.method)
        mass, error = torch.tensor(probe.found).mean(0).tolist()
        values = (mass, error, compare_logits(dense, logits)["kl"])
        told = zip(DENSE, values, strict=True)
        found |= {(case.name, task): x for task, x in told if not math.isnan(x)}
        print(f"{case.name:48s} mass {mass:.4f} error {error:.4f} kl {values[2]:.5f}", flush=True)
        del cache
    return found


Samples = dict[tuple[str, str], dict[int, float]]  # by policy and question: window, value
KEY = ("task", "policy", "model", "n")


def add(samples: Samples, cases: dict[str, Case], about: dict[str, Any], path: Path) -> None:
    """Put rows into a file of results, in the place of those that answer the same; windows of the
    same commit that are there already count with them."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {tuple(row[x] for x in KEY): row for row in known}
    for (policy, task), values in samples.items():
        row = {"study": STUDY, "task": task, "policy": policy, "dense": DENSE[task]} | about
        before = rows.get(tuple(row[x] for x in KEY))
        if before is not None and before["commit"] == row["commit"]:
            values = {int(at): x for at, x in before["samples"].items()} | values
        mean, case = bootstrap_mean(list(values.values())), cases[policy]
        scanned = case.size * about["n"] if case.read < about["n"] else 0
        row |= {"trials": len(values), "value": mean.value, "low": mean.low, "high": mean.high}
        row |= {"bytes": case.size, "read": case.read, "samples": values}
        row |= {"step_bytes": scanned + 4 * about["head_dim"] * min(case.read, about["n"])}
        rows[tuple(row[x] for x in KEY)] = row
    write_rows(path, rows.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--read", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--bytes", type=int, nargs="+", default=[16, 24])
    parser.add_argument("--policy", action="append", default=[])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    model, tokenizer = load(options.model, device=options.device)
    model = model.bfloat16() if options.device == "cuda" else model.float()
    *_, width = config_heads(model.config)
    sizes = [size for size in options.bytes if sum(COORDINATES[size]) <= width]
    about = {"model": options.model, "n": options.tokens, "head_dim": width}
    about |= run_of(torch.device(options.device).type)
    samples: Samples = defaultdict(dict)
    for number in range(options.first, options.first + options.windows):
        ids = prose_window(tokenizer, options.tokens, number).to(options.device)
        both = own(options.read, sizes, width), emulated(options.read, sizes)
        if options.policy:
            both = named(options.policy), []
        for key, value in window(model, ids, *both).items():
            samples[key][number] = value
        add(samples, {case.name: case for part in both for case in part}, about, options.out)
        print(f"window {number}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
