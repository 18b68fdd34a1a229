"""Tensor parallelism as transformers does it, over two gloo processes: the tokens of one process,
and a report, a trace and a refusal that count a rank's heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_cases import CASES
from families import FAMILIES
from ranks import needs_gloo, run_ranks
from tensor_parallel_rank import picks_of, sampled_of, tokens_of

from attnplug.testing import tiny_model

pytestmark = needs_gloo
METHODS = ("dense", "momo", "gather", "gvr", "sketch", "certified", "momo+gather")
# Weights and biases less the buffers that hold them, in two layers: attention's, an MLP's.
JOINED = {"qwen2": 10, "olmo2": 2, "gpt-oss": 0, "phi3": 0, "mistral-sliding": 0}
WHOLE = {"phi3", "olmo2", "gpt-oss"}  # their plans gather the projections, or leave attention alone


def ask(folder: Path, models: dict[str, Any], asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What both ranks found about these models."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    (folder / "asked.json").write_text(json.dumps(asked))
    run_ranks("contract/tensor_parallel_rank.py", folder)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


POLICIES = ["", *(CASES[name].policy for name in METHODS)]
OF_FAMILIES = ["", CASES["momo+gather"].policy]


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    return {family.name: family.build() for family in FAMILIES}


@pytest.fixture(scope="module")
def found(tmp_path_factory, families) -> list[dict[str, Any]]:
    """What both ranks found about all models. Importing torch takes a process some seconds, so that
    two do all of it."""
    odd = tiny_model(hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    one_head = tiny_model(num_attention_heads=4, num_key_value_heads=1)
    models = {"tiny": tiny_model(), "odd": odd, "one-head": one_head} | families
    compiled = [CASES["gather"].policy]
    asked: dict[str, Any] = {"tiny": {"policies": POLICIES, "full": True, "compiled": compiled}}
    asked |= {name: {"policies": []} for name in ("odd", "one-head")}
    asked |= {name: {"policies": OF_FAMILIES, "fused": True} for name in families}
    asked["gemma2"]["options"] = {"attn_implementation": "eager"}
    return ask(tmp_path_factory.mktemp("ranks"), models, asked)


@pytest.mark.slow
def test_every_method_gives_the_tokens_of_one_process(found):
    model = tiny_model()
    wanted = {policy: tokens_of(model, policy) for policy in POLICIES}
    picked, sampled = picks_of(model), sampled_of(model)
    assert picked["heads"] == 4
    for each in found:
        assert each["tiny"]["sketch"] == picked | {"heads": 2}
        assert each["tiny"]["tokens"] == wanted
        assert each["tiny"]["sampled"] == sampled
        assert each["tiny"]["compiled"] == [True]
        assert each["tiny"]["trace"] == [2, 1]
        assert each["tiny"]["report"] == {
            "says": "tensor parallel: each of 2 ranks holds 2 of 4 query heads and 1 of 2 KV heads",
            "heads": [1, 1],
        }
        assert "6 query heads and 3 KV heads, which 2 ranks" in each["odd"]["report"]["says"]
        assert "4 query heads and 1 KV heads" in each["one-head"]["report"]["says"]
    assert len({str(tokens) for tokens in wanted.values()}) > 2  # budgets that choose
    lengths = [row.index(0) if 0 in row else len(row) for row in sampled["tokens"]]
    assert len(set(lengths)) == 2, sampled  # one row ended before the other


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU at most")
def test_two_gpus_give_the_tokens_of_one_and_sum_in_one_kernel(tmp_path):
    policies = ["", *(CASES[name].policy for name in ("dense", "gather", "gvr", "sketch"))]
    # transformers 5.17 splits the head's rows, and does not pad them.
    model = tiny_model(device="cuda", vocab_size=98)
    model.save_pretrained(tmp_path / "tiny")
    (tmp_path / "asked.json").write_text(json.dumps(policies))
    wanted = {policy: tokens_of(model, policy) for policy in policies}
    run_ranks("contract/two_gpus_rank.py", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["tokens"] == wanted
        # A prompt's sums are NCCL's: it is not compiled.
        assert all("one_shot_all_reduce" in each for each in found["sums"].values()), found


def test_every_family_gives_the_tokens_of_one_process(found, families):
    wanted = {n: {p: tokens_of(model, p) for p in OF_FAMILIES} for n, model in families.items()}
    for each in found:
        for name in families:
            assert each[name]["tokens"] == wanted[name], name
            whole = "the model's plan does not split attention" in each[name]["report"]["says"]
            assert whole == (name in WHOLE), name
            assert each[name]["report"]["heads"] == [2, 2] if whole else [1, 1], name
            fused = each[name]["fused"]
            assert fused["tokens"] == wanted[name][""] and fused["again"], name
            assert fused["restored"], name
            assert fused["joined"] == JOINED.get(name, 6), (name, fused["says"])
