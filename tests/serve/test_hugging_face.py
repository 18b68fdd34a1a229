"""`attnplug serve`: the policy is on the model that transformers' server answers with."""

import concurrent.futures
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_serve_available
from typer.testing import CliRunner

import attnplug
from attnplug.cli import app
from attnplug.serve import hugging_face

LOADED = """
import sys
from attnplug import api
from attnplug.serve import hugging_face
stock = hugging_face.apply
def applied(model, policy):
    print("APPLIED", policy, type(model).__name__, flush=True)
    return stock(model, policy)
hugging_face.apply = applied
hugging_face.run(sys.argv[1], sys.argv[2], sys.argv[3:])
"""


def test_batching_is_on_unless_told_otherwise():
    assert hugging_face.with_batching(["--port", "1"]) == ["--port", "1", "--continuous-batching"]
    for own in ("--continuous-batching", "--no-continuous-batching"):
        assert hugging_face.with_batching([own]) == [own]


def test_a_wrong_policy_does_not_wait_for_weights():
    result = CliRunner().invoke(app, ["serve", "nothing/here", "--policy", "gathr"])
    assert result.exit_code == 1 and "gathr" in result.output


@pytest.mark.skipif(is_serve_available(), reason="the server's packages are here")
def test_missing_packages_are_named():
    with pytest.raises(attnplug.UnsupportedCallError, match=r"attnplug\[serve\]"):
        hugging_face.run("smollm2-135m", "dense", [])


def test_the_policy_is_on_what_the_server_loads(tmp_path):
    manager = pytest.importorskip("transformers.cli.serving.model_manager").ModelManager
    sizes = dict(hidden_size=128, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).save_pretrained(tmp_path)
    stock = manager._load_model
    with hugging_face.policy_on_load("gather"):
        made = manager(device="cpu", dtype="float32")
        model = made._load_model(f"{tmp_path}@main")
        assert attnplug.report(model).policy == "gather"
    assert manager._load_model is stock


def ask(port: int, model: str, text: str) -> str:
    body = dict(
        model=model, messages=[dict(role="user", content=text)], max_tokens=8, temperature=0.0
    )
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.skipif(not is_serve_available(), reason="pip install 'attnplug[serve]'")
def test_clients_get_the_answers_of_generate(tmp_path):
    """Three at once, in a process of its own; a covering budget gives stock answers."""
    port, answers = 8177, {}
    texts = ["Name three rivers.", "Say hello.", "The quick brown fox jumps. " * 12 + "Who jumps?"]
    model = str(hugging_face.fetch("smollm2-135m"))
    for policy, batching in (("dense", "--no-continuous-batching"), ("gather", "")):
        flags = ["--device", "cpu", "--dtype", "float32", "--port", str(port), "--log-level"]
        flags += ["error", "--cb-num-blocks", "32", "--cb-block-size", "32"]
        flags += ["--cb-max-batch-tokens", "512", *([batching] if batching else [])]
        command = [sys.executable, "-c", LOADED, model, f"{policy}(min_tokens=0)"]
        command[-1] = policy if policy == "dense" else command[-1]
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen([*command, *flags], stdout=log, stderr=log, env=os.environ)
            try:
                wait_for(port, server)
                with concurrent.futures.ThreadPoolExecutor() as clients:
                    asked = [clients.submit(ask, port, model, text) for text in texts]
                    answers[policy] = [x.result() for x in asked]
            finally:
                server.terminate()
                server.wait(30)
        assert f"APPLIED {policy}" in (tmp_path / "log").read_text()
    assert answers["gather"] == answers["dense"] and all(answers["dense"])


def wait_for(port: int, server: subprocess.Popen) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError("no answer")
