"""`attnplug serve` in a process of its own, and a small model for it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

NEEDED = pytest.mark.skipif(not is_serve_available(), reason="pip install 'attnplug[serve]'")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}"
    "{% endif %}{{ m.content }}\n{% endfor %}"
)

HELLO = [dict(role="user", content="Hello")]

ENDS_WITHIN = 20  # seconds, on a machine that others use too


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("localhost", 0))
        return asked.getsockname()[1]


def make_checkpoint(folder: Path) -> Path:
    """`folder`, where a model now is with a token a byte, whose context is long enough to be at
    work for a while."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index + 1 for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": 0, **vocabulary}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
    config = LlamaConfig(
        vocab_size=300, max_position_embeddings=65536, eos_token_id=None, bos_token_id=None, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


class Server:
    """`attnplug serve` in a process of its own, without a cache of the hub."""

    def __init__(self, log: Path, model: str, *flags: str):
        self.port, self.log = free_port(), log
        command = [sys.executable, "-m", "attnplug", "serve", model, "--port", str(self.port)]
        command += ["--device", "cpu", "--dtype", "float32", "--cb-num-blocks", "160"]
        command += ["--cb-block-size", "32", "--cb-max-batch-tokens", "512", *flags]
        home = dict(HF_HOME=str(log.parent / "no-home"), HF_HUB_OFFLINE="1")
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | home)

    def wait(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(urllib.error.URLError, OSError):
                if self.ask("/health")[0] == 200:
                    return
            time.sleep(0.3)
        raise AssertionError(self.log.read_text())

    def ask(self, path: str, name: str = "", **body) -> tuple[int, str]:
        data = json.dumps(body).encode() if body else None
        where = f"http://localhost:{self.port}{path}"
        headers = {"Content-Type": "application/json"} | ({"X-Request-ID": name} if name else {})
        request = urllib.request.Request(where, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=400) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def chat(self, model: str, **more) -> tuple[int, str]:
        asked = dict(model=model, messages=HELLO, max_tokens=6, temperature=0) | more
        return self.ask("/v1/chat/completions", **asked)

    def end(self, how: int) -> float:
        """Seconds from the signal to the end of the process."""
        begin = time.monotonic()
        self.process.send_signal(how)
        self.process.wait(ENDS_WITHIN)
        return time.monotonic() - begin


@contextlib.contextmanager
def served(folder: Path, model: str, *flags: str):
    server = Server(folder / "log", model, *flags)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def counted(text: str, name: str, **labels: str) -> float:
    """A counter of /metrics, summed over what the labels leave open."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rpartition(" ")[2])
    return total


def attempt(server: Server, asked: dict) -> str:
    try:
        return str(server.chat(str(server.process.args[4]), **asked))
    except OSError as error:
        return repr(error)
