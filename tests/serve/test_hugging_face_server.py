"""`attnplug serve` as its clients see it: names, answers, counts, signals and ports."""

import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from hugging_face_cases import (
    ENDS_WITHIN,
    NEEDED,
    attempt,
    counted,
    served,
)
from transformers import GenerationConfig


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
