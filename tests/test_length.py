"""What a model can read, by its config, and what is said of methods that begin behind it."""

import logging

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MambaConfig, Qwen2Config
from typer.testing import CliRunner

import attnplug
from attnplug import plan, plan_map
from attnplug.cli import app
from attnplug.models.layers import positions
from attnplug.plan_answer import Asked, notes
from attnplug.testing import tiny_model

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (LlamaConfig(max_position_embeddings=8192), 8192),
        (LlamaConfig(
            max_position_embeddings=131072,
            rope_scaling=LLAMA3 | dict(original_max_position_embeddings=8192),
        ), 131072),
        (Qwen2Config(
            max_position_embeddings=32768, rope_scaling=dict(rope_type="yarn", factor=4.0)
        ), 131072),
        (LlamaConfig(
            max_position_embeddings=4096, rope_scaling=dict(type="linear", factor=4.0)
        ), 16384),
        # a rope for each kind of layer: the positions are those with the scaling
        (Gemma3TextConfig(
            max_position_embeddings=131072, rope_scaling=dict(rope_type="linear", factor=8.0)
        ), 131072),
        (MambaConfig(), None),
    ],
    ids=["plain", "llama3", "yarn", "linear", "gemma3", "none"],
)  # fmt: skip
def test_a_config_says_how_much_a_model_reads(config, tokens):
    assert positions(config) == tokens


def lengths_of(policy: str, tokens: int, caplog) -> str:
    model = tiny_model(max_position_embeddings=tokens)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "attnplug"), attnplug.applied(model, policy):
        report = attnplug.report(model)
        assert (report.length in caplog.text) and bool(report.length) == bool(caplog.records)
        assert report.length in str(report)
    return report.length


def test_a_method_that_begins_behind_the_model_is_said_to_never_serve(caplog):
    told = lengths_of("momo+sketch", 8192, caplog)
    assert told.startswith("length: this model reads 8,192 tokens")
    assert "momo never serves here, as it needs prompts of 65,536" in told
    assert "sketch never serves here, as it needs caches of 524,288" in told
    assert told.count("never") == 2  # once, not once a layer


def test_what_can_serve_is_not_spoken_of(caplog):
    assert "sketch" not in lengths_of("momo+sketch", 1 << 19, caplog)
    assert lengths_of("momo+sketch", 1 << 19, caplog) == ""
    assert lengths_of("momo(min_tokens=0)+gather(min_tokens=99)", 128, caplog) == ""
    assert "gather never" in lengths_of("gather(min_tokens=129)", 128, caplog)
    assert lengths_of("dense", 8, caplog) == ""
    # that certified waits to be asked has nothing to do with the model
    assert lengths_of("certified", 128, caplog) == ""


def test_what_serves_batches_alone_is_told_with_their_rows(caplog, monkeypatch):
    monkeypatch.setattr(attnplug.Gather, "measured_crossover", lambda *_: 1000)
    monkeypatch.setattr(attnplug.Gather, "measured_row_crossover", lambda *_: 100)
    told = lengths_of("gather", 400, caplog)  # a row saves 300 of the price of 900
    assert "never serves a single row, as it needs caches of 1,000; batches of 3 rows" in told
    assert "gather never serves here" in lengths_of("gather", 100, caplog)


def test_plan_prints_no_speedup_behind_what_the_model_reads(tmp_path):
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=90)
    LlamaConfig(max_position_embeddings=32768, **sizes).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert result.exit_code == 0 and "32,768" in result.output
    assert "131,072" not in result.output and "1,048,576" not in result.output
    words = " ".join(result.output.split())
    assert "The model reads 32,768 tokens: gather never serves it" in words
    shape = plan.shape_of(str(tmp_path))
    assert "never" not in notes(Asked(shape, plan.H200, attnplug.Gather(min_tokens=32768)))
    gains = plan_map.gains(shape, plan.H200, attnplug.Gather(min_tokens=0))
    last = plan.CONTEXTS.index(32768)
    assert (gains[:, : last + 1] > 0).all() and (gains[:, last + 1 :] != gains[:, last + 1 :]).all()
