"""transformers' own GenerationTesterMixin on tiny models of twelve families, under every policy.

    python bench/generation_suite.py CHECKOUT [--models M ..] [--policies P ..]
        [--only CASE] [--without CASE] [--rows rows.jsonl] [--tests VERSION] [--out counts.json]

Neither wheels nor sdists of transformers hold these tests: CHECKOUT is a checkout of its repository
at the tag nearest to the installed version, whose `parameterized` must be installed; `--tests` says
which it is. The mixin makes its models by `model_class(config).eval()`. Here `eval` also applies
the policy, with a budget that covers every token. "stock" is the same run without attnplug. A case
that stock fails as well, since the checkout is not of the installed version, is counted apart.

A case that asks for attention weights, which attnplug refuses, runs again without them. Where the
mixin says StaticCache, attnplug's cache is one as well: its layers are StaticLayers. What then
still fails and is no defect has its reason in EXPLAINED; the exit status is 1 where another fails.
Exports are left to tests/hostile/test_export.py, and the same cases in our own words to
tests/hostile/test_generation_cases.py.

`--rows` gets a line a case as it ends. Cases that the file has already are not run again, so that a
run that was cut goes on, and the cases that compile, most of the time, can be left for later.
"""

import argparse
import importlib
import inspect
import json
import os
import sys
import unittest
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RUN_SLOW", "1")

import torch
import transformers
from transformers import (
    Cohere2ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
    StaticCache,
)
from transformers.utils import logging

import attnplug
from attnplug.models.cache import PlugCache

POLICIES = {
    "stock": "",
    "dense": "dense",
    "momo": "momo(gamma=8, block=16, query_block=16, top_k=8, exact_k=8, min_tokens=0)",
    "gather": "gather(k=8, block=16, local=2, min_tokens=0)",
    "gather-host": "gather(k=8, block=16, local=2, min_tokens=0, kv='host', resident=9)",
    "sketch": "sketch(k=512, min_tokens=0)",
    "gvr": "gvr(k=512, sink=2, window=8, min_tokens=0)",
    "certified": "certified(block=16, coverage=1.0, k_min=64, v_tol=0.0, min_tokens=0)",
    "stream": "prefill=stream(top_k=8, block=16, query_block=16)",
}
# Windows are longer than what the mixin, which counts the shapes of caches, has for them.
HYBRID = {"layer_types": ["sliding_attention", "full_attention"]}
# A class, and what its config needs beside `Tester`'s sizes.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "gemma2": (Gemma2ForCausalLM, {}),
    "gemma3": (Gemma3ForCausalLM, HYBRID),
    "mistral": (MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3ForCausalLM, {}),
    "phi3": (Phi3ForCausalLM, {"sliding_window": None}),
    "olmo3": (Olmo3ForCausalLM, HYBRID),
    "cohere2": (Cohere2ForCausalLM, HYBRID),
    "granite": (GraniteForCausalLM, {"attention_multiplier": 0.1}),
    "smollm3": (SmolLM3ForCausalLM, {}),
    "gpt-oss": (GptOssForCausalLM, HYBRID | {"num_local_experts": 2, "num_experts_per_tok": 1}),
}
TESTS = "tests.generation.test_utils"
AS_STOCK = "fails in stock too"
WITHOUT_WEIGHTS = "passed without weights"
# Case, and what its message says: why it is no defect.
EXPLAINED = {
    ("generate_compile_model_forward_fullgraph", "False is not true"): "asks for a DynamicCache "
    "where no cache is chosen: generate prepares attnplug's",
    ("assisted_decoding", "torch.Size"): "equal up to here; the buffers of attnplug's cache "
    "have room for what a verification crops",
}


class Tester:
    """The config and the inputs that the mixin asks for. Heads of 64, which every policy serves."""

    batch_size, seq_length = 13, 7

    def __init__(self, model_class: Any, sizes: dict[str, Any]):
        self.config_class, self.sizes = model_class.config_class, sizes

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.config_class(
            vocab_size=99, hidden_size=128, intermediate_size=32, num_hidden_layers=2, head_dim=64,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, **self.sizes,
        )  # fmt: skip
        ids = torch.randint(0, 99, (self.batch_size, self.seq_length))
        return config, {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}


def suite(checkout: Path, model_class: Any, sizes: dict[str, Any]) -> type[Any]:
    """The mixin as a TestCase on one model class."""
    sys.path.insert(0, str(checkout))
    mixin = importlib.import_module(TESTS).GenerationTesterMixin

    class Suite(mixin, unittest.TestCase):
        all_model_classes = all_generative_model_classes = (model_class,)
        has_attentions = True

        def setUp(self) -> None:
            self.model_tester = Tester(model_class, sizes)

    return Suite


def cases(suite: type[Any], only: str) -> list[str]:
    """Names of tests, without those that `parameterized` has expanded."""
    names = [name for name in dir(suite) if name.startswith("test_") and only in name]
    return [n for n in names if inspect.isfunction(getattr(suite, n)) and "_export" not in n]


def plugged(policy: str) -> Callable[[Any], Any]:
    """An `eval` that also applies the policy."""

    def evaluate(model: Any) -> Any:
        model.train(False)
        if policy:
            with suppress(attnplug.AlreadyAppliedError):
                attnplug.apply(model, policy)
            # What the mixin looks for behind a compiled call, and transformers' loop then replaces:
            # attnplug's loop compiles a step of its own.
            model._compiled_call, model._last_compile_config = model.forward, None
        return model

    return evaluate


def run(suite: type[Any], name: str, *, weights: bool) -> tuple[str, str]:
    """One case: its outcome, and the reason or the last line of the error."""
    result = unittest.TestResult()
    with mock.patch.object(suite, "has_attentions", weights), torch.no_grad():
        suite(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    errors = result.errors + result.failures
    return ("failed", errors[0][1].strip().splitlines()[-1]) if errors else ("passed", "")


def outcome(suite: type[Any], name: str) -> tuple[str, str]:
    """The outcome of a case after the second try, and its explanation if there is one."""
    if getattr(suite, name).__name__ != name:  # `@is_flaky` for `@is_flaky()` returns a decorator
        return "empty", "the mixin never runs its body"
    found, text = run(suite, name, weights=True)
    if "output_attentions=True: attnplug" in text:
        found, text = run(suite, name, weights=False)
        found = WITHOUT_WEIGHTS if found == "passed" else found
    for (case, message), reason in EXPLAINED.items():
        if found == "failed" and case in name and message in text:
            return "explained", reason
    return found, text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--without", help="a part of names that are left out")
    parser.add_argument("--rows", type=Path, help="a line of JSON a case; what it has is not rerun")
    parser.add_argument("--tests", default="", help="the version of the checkout, to be written")
    parser.add_argument("--out", type=Path, help="write the counts of all rows as JSON")
    return parser.parse_args()


def counted(rows: list[dict[str, str]], tests: str) -> dict[str, Any]:
    """How many cases of each model and policy came to what, and what did not pass and why. A case
    that stock fails is no failure of a policy."""
    stock = {(row["model"], row["case"]) for row in rows if _failed(row) and not _policy(row)}
    counts: dict[str, dict[str, Counter[str]]] = {}
    told = []
    for row in rows:
        if _failed(row) and _policy(row) and (row["model"], row["case"]) in stock:
            row = row | {"found": AS_STOCK}
        here = counts.setdefault(row["model"], {}).setdefault(row["policy"], Counter())
        here[row["found"]] += 1
        if row["found"] in ("failed", "explained"):
            told.append(row)
    totals: dict[str, Counter[str]] = {}
    for policies in counts.values():
        for policy, here in policies.items():
            totals.setdefault(policy, Counter()).update(here)
    return {
        "transformers": transformers.__version__,
        "tests": tests,
        "torch": torch.__version__,
        "families": len(counts),
        "totals": totals,
        "counts": counts,
        "not passed": told,
    }


def _failed(row: dict[str, str]) -> bool:
    return row["found"] == "failed"


def _policy(row: dict[str, str]) -> bool:
    return row["policy"] != "stock"


def main() -> None:
    options = arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows: list[dict[str, str]] = []
    if options.rows and options.rows.exists():
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    done = {(row["model"], row["policy"], row["case"]) for row in rows}
    for model in options.models:
        model_class, sizes = MODELS[model]
        cases_of = suite(options.checkout.resolve(), model_class, sizes)
        shadow = mock.patch(f"{TESTS}.StaticCache", (StaticCache, PlugCache))
        names = cases(cases_of, options.only)
        names = [n for n in names if not (options.without and options.without in n)]
        for policy in options.policies:
            apply = mock.patch.object(model_class, "eval", plugged(POLICIES[policy]))
            with shadow, apply:
                for name in [n for n in names if (model, policy, n) not in done]:
                    found, text = outcome(cases_of, name)
                    rows.append(dict(model=model, policy=policy, case=name, found=found, why=text))
                    if options.rows:
                        with options.rows.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
            here = [row for row in rows if (row["model"], row["policy"]) == (model, policy)]
            print(model, policy, dict(Counter(row["found"] for row in here)), flush=True)
            for row in filter(_failed, here):
                print("   ", row["case"], row["why"], flush=True)
    facts = counted(rows, options.tests)
    print(json.dumps(facts["totals"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(any(_failed(row) and _policy(row) for row in facts["not passed"]))


if __name__ == "__main__":
    main()
