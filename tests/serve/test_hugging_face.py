"""`attnplug serve`: the policy is on the model that answers, which goes by the names that it was
given; bad requests are told, and a signal ends the process."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available
from typer.testing import CliRunner

import attnplug
from attnplug.cli import app
from attnplug.serve import hugging_face
from attnplug.serve.hugging_face.requests import (
    input_problem,
    length_problem,
    messages_problem,
    problem_of,
    vocabulary_problem,
)

NEEDED = pytest.mark.skipif(not is_serve_available(), reason="pip install 'attnplug[serve]'")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}"
    "{% endif %}{{ m.content }}\n{% endfor %}"
)
HELLO = [dict(role="user", content="Hello")]
ENDS_WITHIN = 20  # seconds, on a machine that others use too


def test_a_wrong_policy_does_not_wait_for_weights():
    result = CliRunner().invoke(app, ["serve", "nothing/here", "--policy", "gathr"])
    assert result.exit_code == 1 and "gathr" in result.output


def test_the_usage_names_attnplugs_own_flags():
    shown = re.sub(r"\x1b\[[\d;]*m", "", CliRunner().invoke(app, ["serve", "--help"]).output)
    assert "force_model" not in shown and "attnplug serve [OPTIONS]" in shown
    for flag in ("--served-model-name", "--host", "--port", "--policy"):
        assert flag in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(reasoning="maybe"), "reasoning is 'maybe', needs on or off or auto"),
        (dict(dtype="int3"), "dtype is 'int3', needs auto or float32"),
        (dict(chat_template_kwargs="[1]"), "needs the JSON text of an object"),
        (dict(port=65536), "port is 65536, needs 0 to 65535"),
        (dict(port=-1), "port is -1, needs 0"),
        (dict(port=10**20), "needs 0 to 65535"),
        (dict(host=""), "host is '', needs a name or an address"),
        (dict(host="a..b"), "needs a name or an address"),
        (dict(host="a" * 300), "needs a name or an address"),
        (dict(host="\udcff"), "needs a name or an address"),
        (dict(device="meta"), "device is 'meta', needs cpu or cuda"),
        (dict(device=""), "device is '', needs cpu or cuda"),
        (dict(device="cuda:99"), "device is 'cuda:99' but torch sees"),
        (dict(default_seed=1 << 64), "default_seed is 18446744073709551616, needs"),
        (dict(cb_block_size=0), "cb_block_size is 0, needs 1 to"),
        (dict(cb_num_blocks=-1), "cb_num_blocks is -1, needs 1 to"),
        (dict(cb_max_batch_tokens=0), "cb_max_batch_tokens is 0, needs 1 to"),
        (dict(cb_max_memory_percent=float("nan")), "cb_max_memory_percent is nan, needs more"),
        (dict(cb_max_memory_percent=1.5), "cb_max_memory_percent is 1.5, needs more than 0"),
    ],
)
def test_wrong_options_are_told_before_the_weights(options, message):
    with pytest.raises(attnplug.ArgumentError, match=message):
        hugging_face.Options(**options)


@pytest.mark.skipif(is_serve_available(), reason="the server's packages are here")
def test_missing_packages_are_named():
    with pytest.raises(attnplug.UnsupportedCallError, match=r"attnplug\[serve\]"):
        hugging_face.run("smollm2-135m", "dense")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (dict(temperature=-3), "temperature is -3, needs a number from 0 to 2"),
        (dict(temperature="hot"), 'temperature is "hot", needs'),
        (dict(temperature=True), "temperature is true, needs"),
        (dict(top_p=0), "top_p is 0, needs"),
        (dict(n=2), "n=2 is not served here; leave it out or give 1"),
        (dict(logprobs=True), "logprobs=true is not served here"),
        (dict(response_format={"type": "json_object"}), "response_format="),
        (dict(max_tokens=0), "max_tokens is 0, needs an integer of at least 1"),
        (dict(max_completion_tokens=2.5), "max_completion_tokens is 2.5"),
        (dict(stop=[""]), "stop is"),
        (dict(logit_bias={"a": 1}), "logit_bias is"),
        (dict(generation_config="{"), "generation_config is"),
        (dict(generation_config='{"max_new_tokens": -1}'), "generation_config: max_new_tokens is"),
        (
            dict(generation_config='{"compile_config": {"backend": 3, "x": 1}}'),
            "generation_config:",
        ),
        (dict(frequency_penalty=-1), "frequency_penalty is -1"),
        (dict(logit_bias={"\u00b2": 1}), "logit_bias is"),
        (dict(seed=2**64), "seed is 18446744073709551616, needs an integer of 64 bits"),
        (dict(seed=-(2**63) - 1), "seed is -9223372036854775809, needs"),
        (dict(temperature=10**400), "temperature is 1000"),
        (dict(logit_bias={"70": -(10**400)}), "logit_bias is"),
        (dict(stop="\ud800"), "the request has a lone surrogate"),
        (dict(messages=[dict(role="user", content="\ud800")]), "the request has a lone surrogate"),
    ],
)
def test_what_is_not_served_is_told(body, told):
    assert problem_of(body).startswith(told)


@pytest.mark.parametrize("calls", [5, [5], [{}], [dict(function={})], [dict(function=3)]])
def test_calls_of_tools_without_a_name_are_told(calls):
    message = dict(role="assistant", tool_calls=calls)
    assert messages_problem(dict(messages=[message])).startswith("messages[0].tool_calls needs")
    message["tool_calls"] = [dict(function=dict(name="add", arguments="{}"))]
    assert not messages_problem(dict(messages=[message]))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_more_tokens_than_a_model_reads_are_told(name):
    """A client that goes away would leave a row in the batch that never ends."""
    assert length_problem({name: 1025}, 1024).startswith(f"{name} is 1025, and the model reads 1,0")
    assert length_problem({name: 10**30}, None) and not length_problem({name: None}, 1024)
    assert not length_problem({name: 1024}, 1024) and not length_problem({name: 1025}, None)
    config = dict(generation_config='{"max_new_tokens": 1025}')
    assert length_problem(config, 1024).startswith("max_new_tokens is 1025, and the model reads")


def test_what_changes_nothing_is_served():
    asked = dict(n=1, temperature=0, top_p=1, logprobs=False, stop=None, presence_penalty=0.0)
    asked |= dict(user="me", stream_options={"include_usage": True}, max_tokens=3, seed=-1)
    assert problem_of(asked | dict(response_format={"type": "text"}, logit_bias={"3": -1})) == ""
    assert messages_problem(dict(messages=HELLO)) == input_problem(dict(input="Hello")) == ""
    parts = [dict(role="user", content=[dict(type="text", text="Hello")])]
    assert messages_problem(dict(messages=parts)) == input_problem(dict(input=parts)) == ""


CONFIGS = [
    (dict(num_beams=10**6), "num_beams is 1000000, needs an integer from 1 to 16"),
    (dict(num_return_sequences=2), "num_return_sequences is not served here"),
    (dict(return_dict_in_generate=True), "return_dict_in_generate is not"),
    (dict(cache_implementation="quantized"), "cache_implementation is not"),
    (dict(max_cache_len=10**9), "max_cache_len is not"),
    (dict(prompt_lookup_num_tokens=10**9), "prompt_lookup_num_tokens is not"),
    (dict(bad_words_ids=[[]]), "bad_words_ids is [[]], needs a list of lists of tokens"),
    (dict(suppress_tokens=3), "suppress_tokens is 3, needs a list of tokens"),
    (dict(penalty_alpha=0.6), "penalty_alpha is not"),
    (dict(validate=5), "validate is not"),
    (dict(eos_token_id="x"), 'eos_token_id is "x", needs'),
    (dict(repetition_penalty=0), "repetition_penalty is 0, needs"),
    (dict(temperature=10**400), "temperature is 1000"),
]


@pytest.mark.parametrize(("config", "told"), CONFIGS, ids=lambda each: next(iter(each), ""))
def test_what_a_generation_config_must_not_ask_is_told(config, told):
    """A million beams end the process for want of memory; others ended in internal errors."""
    assert problem_of(dict(generation_config=json.dumps(config))).startswith(
        f"generation_config: {told}"
    )


def test_a_generation_config_written_by_transformers_is_served():
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=9,
        num_beams=2, repetition_penalty=1.1, eos_token_id=[3, 4], length_penalty=2.0,
        suppress_tokens=[5], bad_words_ids=[[6, 7]],
    )  # fmt: skip
    for diff in (True, False):
        body = dict(generation_config=config.to_json_string(use_diff=diff))
        assert problem_of(body) == ""
        assert "beams are not streamed" in problem_of(body | dict(stream=True))


@pytest.mark.parametrize("name", ["logit_bias", "suppress_tokens", "bad_words_ids"])
def test_tokens_that_the_model_has_not_are_told(name):
    def asks(token):
        config = {"suppress_tokens": [3, token], "bad_words_ids": [[3], [4, token]]}
        if name == "logit_bias":
            return {name: {str(token): 1}}
        return {"generation_config": json.dumps({name: config[name]})}

    told = f"{name} has the token 300, and the model has 300 tokens"
    assert vocabulary_problem(asks(300), 300) == told and problem_of(asks(300)) == ""
    assert vocabulary_problem(asks(299), 300) == vocabulary_problem({}, 300) == ""


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("localhost", 0))
        return asked.getsockname()[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A model with a token a byte, whose context is long enough to be at work for a while."""
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
    folder = tmp_path_factory.mktemp("served") / "tiny"
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


@NEEDED
@pytest.mark.slow
def test_it_answers_to_its_names_tells_bad_requests_counts_and_ends(tmp_path, checkpoint):
    model, policy = str(checkpoint), "gather(k=1, sink=1, local=1, min_tokens=40)"
    with served(tmp_path, model, "--policy", policy, "--served-model-name", "tiny") as server:
        log = server.log.read_text()
        assert f"policy {policy}" in log and "layers 0-1 (full)" in log
        assert "dense in caches below 40 tokens" in log
        status, answer = server.chat("tiny")
        assert status == 200 and json.loads(answer)["model"] == "tiny"
        assert server.chat(model)[1].count('"tiny"') == 1
        status, answer = server.chat("another")
        assert status == 404 and "serves tiny and" in json.loads(answer)["error"]["message"]
        status, answer = server.ask("/v1/models")
        assert [entry["id"] for entry in json.loads(answer)["data"]] == ["tiny", model]
        bad = [
            dict(messages=[]), dict(messages="Hello"), dict(messages=[dict(content="Hello")]),
            dict(temperature=-3), dict(n=2), dict(messages=[dict(role="robot", content="Hi")]),
            dict(max_tokens=10**9), dict(seed=2**64), dict(stop="\ud800"), dict(stop="x"),
            dict(logit_bias={"70": 100}), dict(frequency_penalty=1), dict(tools=[1]),
            dict(chat_template_kwargs=5), dict(max_tokens=6000), dict(max_tokens=6000, stream=True),
            dict(messages=[dict(role="user", content="x" * 6000)]),
        ]  # fmt: skip
        for body in bad:
            status, answer = server.chat("tiny", **body)
            assert status == 400 and json.loads(answer)["error"]["message"], body
        assert server.ask("/v1/completions", model="tiny", prompt="")[0] == 400
        assert server.ask("/v1/responses", model="tiny", input=[])[0] == 400
        assert server.ask("/load_model", model="gpt2")[0] == 404

        with concurrent.futures.ThreadPoolExecutor() as clients:
            begun = [clients.submit(server.chat, "tiny", name="same") for _ in range(3)]
            assert [each.result()[0] for each in begun] == [200] * 3

        before = server.ask("/metrics")[1]
        long = dict(messages=[dict(role="user", content="x" * 99)], max_tokens=9)
        assert server.chat("tiny", **long)[0] == 200  # a prompt of 100 tokens
        # A step's tokens go to the client first, and are counted by the loop's thread behind it.
        wanted, until = counted(before, "attnplug_generated_tokens_total") + 9, time.time() + 20
        after = server.ask("/metrics")[1]
        while counted(after, "attnplug_generated_tokens_total") < wanted and time.time() < until:
            after = server.ask("/metrics")[1]

        def more(name: str, **labels: str) -> float:
            return counted(after, name, **labels) - counted(before, name, **labels)

        calls = "attnplug_attention_calls_total"
        assert more("attnplug_prompt_tokens_total") == 100
        assert more("attnplug_generated_tokens_total") == 9
        assert more(calls, phase="decode", served_by="gather") == 16  # 8 steps of 2 layers
        assert more(calls, phase="decode", served_by="dense") == 0
        assert more(calls, phase="prefill", served_by="dense") == 2
        assert counted(before, calls, phase="decode", served_by="dense") == 50  # of 6 tokens each
        assert more("attnplug_time_to_first_token_seconds_count") == 1
        assert more("attnplug_requests_total", status="200") == 1
        assert counted(before, "attnplug_requests_total", status="400") == len(bad) + 2
        server.end(signal.SIGINT)
        assert server.process.returncode == 0


@NEEDED
def test_a_worker_that_failed_is_followed_by_another(monkeypatch):
    """Stock's answers all later requests by 503."""
    from attnplug.serve.hugging_face import batches as served_batches

    class Worker:
        def __init__(self, fatal_error):
            self.background_thread_status = types.SimpleNamespace(fatal_error=fatal_error)
            self.batch_processor, self.stopped, self.started = object(), False, 0

        def start(self):
            self.started += 1

        def stop(self, block, timeout):
            self.stopped = True

    failed, fresh = Worker("no pages"), Worker(None)
    model = types.SimpleNamespace(
        generation_config=GenerationConfig(), init_continuous_batching=lambda **_: fresh
    )
    for name in ("sample_by_rows", "_take_sampling"):
        monkeypatch.setattr(served_batches, name, lambda worker: None)
    batches = served_batches.Batches()
    batches._cb = failed
    batches.begin(model)
    assert batches._cb is fresh and failed.stopped and batches.is_ready()
    batches.init_cb(model, None)
    assert batches._cb is fresh and not fresh.stopped and fresh.started == 1


@NEEDED
@pytest.mark.slow
@pytest.mark.parametrize(("how", "batching"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_ends_it_with_requests_in_flight(tmp_path, checkpoint, how, batching):
    flags = [] if batching else ["--no-continuous-batching"]
    with served(tmp_path, str(checkpoint), "--policy", "dense", *flags) as server:
        with concurrent.futures.ThreadPoolExecutor() as clients:
            asked = dict(max_tokens=4000)
            kinds = [dict(stream=True), dict()]
            found = [
                clients.submit(attempt, server, asked | kind)
                for kind in (kinds if batching else kinds[1:])
            ]
            time.sleep(4)
            assert not any(each.done() for each in found)
            seconds = server.end(how)
        assert server.process.returncode == 0 and seconds < ENDS_WITHIN
        assert threading.active_count() < 20


@NEEDED
@pytest.mark.slow
def test_requests_alone_are_biased_and_what_a_policy_refuses_is_told(tmp_path, checkpoint):
    """Clients give whole numbers, for which transformers raises."""
    with served(tmp_path, str(checkpoint), "--no-continuous-batching") as server:
        status, answer = server.chat(str(checkpoint), logit_bias={"70": 100}, max_tokens=4)
        content = json.loads(answer)["choices"][0]["message"]["content"]
        assert status == 200 and len(content) == 4 and len(set(content)) == 1
        config = json.dumps(dict(output_attentions=True, return_dict_in_generate=True))
        status, answer = server.chat(str(checkpoint), generation_config=config)
        assert status == 400 and "output_attentions" in json.loads(answer)["error"]["message"]
        assert server.chat(str(checkpoint), logit_bias={"300": 1})[0] == 400
        config = json.dumps(dict(num_beams=2, repetition_penalty=1.2))
        long = [dict(role="user", content="x" * 60)]  # beyond generate's own default of max_length
        asked = dict(generation_config=config, messages=long, max_tokens=None)
        status, answer = server.chat(str(checkpoint), **asked)
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 1024
        server.end(signal.SIGINT)
        assert server.process.returncode == 0 and "still running" not in server.log.read_text()


def attempt(server: Server, asked: dict) -> str:
    try:
        return str(server.chat(str(server.process.args[4]), **asked))
    except OSError as error:
        return repr(error)


@NEEDED
@pytest.mark.slow
def test_a_port_that_is_taken_is_told(tmp_path, checkpoint):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "attnplug", "serve", str(checkpoint), "--device", "cpu"]
        found = subprocess.run(
            [*command, "--port", str(port)], capture_output=True, text=True, timeout=240
        )
    assert found.returncode == 1
    assert f"nothing can listen on localhost, port {port}" in found.stderr


@NEEDED
@pytest.mark.slow
@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", r"\[::1\]")])
def test_it_says_by_which_url_it_is_reached(host, shown, checkpoint):
    """Also where the system chose the port, and where the address has colons of its own."""
    command = [sys.executable, "-m", "attnplug", "serve", str(checkpoint), "--device", "cpu"]
    command += ["--host", host, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "/v1;" in line)
        found = re.search(rf"at http://{shown}:(\d+)/v1; ", line)
        process.send_signal(signal.SIGINT)
        assert found is not None and int(found[1]) > 0, line


@NEEDED
@pytest.mark.slow
def test_clients_get_the_answers_of_generate(tmp_path):
    """Three at once, in a process of its own; a covering budget gives stock answers. By the name
    that the server was given, though the weights lie in attnplug's cache."""
    answers, name = {}, "smollm2-135m"
    texts = ["Name three rivers.", "Say hello.", "The quick brown fox jumps. " * 12 + "Who jumps?"]
    for policy, flags in (("dense", ["--no-continuous-batching"]), ("gather(min_tokens=0)", [])):
        with served(tmp_path, name, "--policy", policy, *flags) as server:
            with concurrent.futures.ThreadPoolExecutor() as clients:
                asked = [
                    clients.submit(
                        server.chat, name, messages=[dict(role="user", content=text)], max_tokens=8
                    )
                    for text in texts
                ]
                found = [json.loads(each.result()[1]) for each in asked]
            answers[policy] = [each["choices"][0]["message"]["content"] for each in found]
            assert {each["model"] for each in found} == {name}
            assert counted(server.ask("/metrics")[1], "attnplug_generated_tokens_total") == sum(
                each["usage"]["completion_tokens"] for each in found
            )
    assert answers["gather(min_tokens=0)"] == answers["dense"] and all(answers["dense"])


def test_pages_of_older_transformers_tell_their_room():
    """5.17 has no allocators of kinds of layers, and one size of pages for all."""
    from attnplug.serve.hugging_face.batches import room_of

    assert room_of(types.SimpleNamespace(num_blocks=3, block_size=16)) == 48
