"""`attnplug vllm`: vLLM's server started with a policy, without vLLM."""

import os

import pytest
from typer.testing import CliRunner

import attnplug.serve.vllm as room
from attnplug.cli import app
from attnplug.errors import ArgumentError, PolicyError, ServeError
from attnplug.serve.vllm.command import server_command

MODEL = "Qwen/Qwen2.5-7B-Instruct"


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A vLLM of a version that is served, and its program on the PATH."""
    monkeypatch.setattr(room, "version", lambda: "0.33.0+cu130")
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return str(program)


def test_it_is_vllm_serve_with_our_options_and_then_the_users(installed, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    options = ["--max-model-len", "131072", "--kv-cache-dtype=auto", "-tp", "2"]
    result = CliRunner().invoke(app, ["vllm", MODEL, "--policy", "momo+gather(k=8)", *options])
    ours = ["--attention-backend", "CUSTOM", "--additional-config"]
    words = [installed, "serve", MODEL, *ours, '{"attnplug": "momo+gather(k=8)"}', *options]
    assert result.exit_code == 0, result.output
    assert started == [(installed, words, dict(os.environ))]
    assert " ".join(words[:4]) in result.stderr


def test_a_policy_that_traces_brings_what_vllm_needs_for_it(installed):
    words = server_command(MODEL, "momo+stream", []).words
    assert words[-2:] == ["--logits-processors", "attnplug.serve.vllm.requests:Requests"]


@pytest.mark.parametrize(
    "option",
    [
        "--attention-backend",
        "--additional-config.attnplug=x",
        "--additional_config",
        "--logits-processors=a",
    ],
)
def test_options_that_the_policy_sets_are_refused(installed, option):
    with pytest.raises(ArgumentError, match="is what --policy sets"):
        server_command(MODEL, "momo", [option])


def test_the_model_comes_before_vllms_options(installed, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: None)
    result = CliRunner().invoke(app, ["vllm", "--port", "8001", MODEL])
    assert result.exit_code == 1 and "name the model before --port" in result.stderr


def test_what_vllm_cannot_serve_is_refused_before_it_starts(installed, monkeypatch):
    with pytest.raises(ServeError, match="certified"):
        server_command(MODEL, "certified", [])
    with pytest.raises(PolicyError, match="Did you mean gather"):
        server_command(MODEL, "gathr", [])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServeError, match="no program vllm"):
        server_command(MODEL, "momo", [])


@pytest.mark.parametrize(
    ("found", "message"), [(None, "not installed"), ("0.19.0", "0.19.0 is not")]
)
def test_a_vllm_that_is_not_served_is_named(monkeypatch, found, message):
    monkeypatch.setattr(room, "version", lambda: found)
    result = CliRunner().invoke(app, ["vllm", MODEL])
    assert result.exit_code == 1 and message in result.stderr
