"""`attnplug serve`: what is the request's fault gets a 400 and a sentence, what is not a 500 in
OpenAI's form, also in a stream that has begun."""

import asyncio
import concurrent.futures
import json
import random
import signal
import time
import types

import pytest
import torch
from transformers import GenerationConfig
from transformers.utils.import_utils import is_serve_available

if not is_serve_available():
    pytest.skip("pip install 'attnplug[serve]'", allow_module_level=True)

from fastapi import FastAPI
from fastapi.testclient import TestClient
from hugging_face_cases import HELLO, attempt, counted, served
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.utils.chat_template_utils import render_jinja_template

from attnplug.errors import UnsupportedCallError
from attnplug.serve.hugging_face import failures, requests, sampling, server, singly
from attnplug.serve.hugging_face.metrics import Metrics

FAULTS = ("{{ 'id ' + 1 }}", "{{ 1 / 0 }}", "{{ range(10**9) }}", "{{ a.b.c }}")


@pytest.mark.parametrize("template", FAULTS)
def test_what_a_template_raises_is_the_templates(template):
    with pytest.raises(Exception) as found:
        render_jinja_template(conversations=[HELLO], chat_template=template)
    assert failures.is_of_template(found.value)
    assert not failures.is_of_template(ValueError("another"))


@pytest.mark.parametrize("name", sampling.FLOATS)
def test_numbers_are_floats_where_transformers_takes_no_others(name):
    asked, unasked = GenerationConfig(**{name: 2}), GenerationConfig(**{name: None})
    for config in (asked, unasked):
        sampling.set_floats(config, GenerationConfig(**{name: 2}))
        assert type(getattr(config, name)) is float and getattr(config, name) == 2


@pytest.mark.parametrize("cold", [0.0, 1e-40])
@pytest.mark.parametrize("of_the_model", [False, True])
def test_a_temperature_of_a_config_is_as_cold_as_one_of_a_body(cold, of_the_model):
    given, plain = GenerationConfig(do_sample=True, temperature=cold), GenerationConfig()
    config, defaults = (plain, given) if of_the_model else (given, plain)
    sampling.set_floats(config, defaults)
    sampling.set_sampling(config, {}, random.Random(0))
    assert not config.do_sample and sampling.sampling_of(config).temperature == 0


def asks(**config) -> dict:
    return {"generation_config": json.dumps(config)}


@pytest.mark.parametrize(
    "config",
    [
        dict(suppress_tokens=[0, 1], begin_suppress_tokens=[2, 3, 1]),
        dict(suppress_tokens=[0, 1, 2], eos_token_id=3, min_new_tokens=1),
        dict(suppress_tokens=[0], eos_token_id=[1, 2, 3], min_new_tokens=1),
    ],
)
def test_a_request_that_leaves_out_all_tokens_is_told(config):
    assert "leaves out each of the model's 4 tokens" in requests.vocabulary_problem(
        asks(**config), 4
    )
    assert not requests.vocabulary_problem(asks(**config), 5)


def test_beams_without_a_token_to_go_on_by_are_told():
    every = dict(eos_token_id=[0, 1, 2, 2])
    assert requests.vocabulary_problem(asks(num_beams=2, **every), 4).startswith("eos_token_id has")
    assert not requests.vocabulary_problem(asks(**every), 4)
    assert not requests.vocabulary_problem(asks(num_beams=2, **every), 5)


def test_a_step_that_no_token_is_left_to_is_refused():
    """On a GPU a draw from it would end all draws of the process."""
    prompt, none = torch.zeros((2, 3), dtype=torch.int64), torch.full((2, 4), float("-inf"))
    with pytest.raises(UnsupportedCallError, match="no token to choose after 3"):
        singly.Choice()(prompt, none)
    one = none.clone()
    one[1, 2] = 0.0  # the other beam is at its end
    assert singly.Choice()(prompt, one) is one
    assert singly.Choice()(prompt, none * 0).isnan().all()  # a model's own trouble stays in sight


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (dict(logit_bias={"3": 1e308}), "logit_bias is"),
        (asks(repetition_penalty=1e-40), "generation_config: repetition_penalty is 1e-40, needs"),
        (dict(chat_template_kwargs=dict(conversations=1)), "chat_template_kwargs is"),
        (dict(chat_template_kwargs=dict(load_audio_from_video=1)), "chat_template_kwargs is"),
        (dict(parallel_tool_calls="x"), 'parallel_tool_calls is "x", needs true or false'),
    ],
)
def test_what_ended_in_an_internal_error_is_told(body, told):
    assert requests.problem_of(body).startswith(told)


def test_an_input_of_another_type_than_a_message_is_told():
    item = dict(type="reasoning", role="assistant", content="x")
    assert requests.input_problem(dict(input=[item])).startswith(
        'input[0] has the type "reasoning"'
    )
    assert not requests.input_problem(dict(input=[item | dict(type="message")]))


async def failing(*parts: str):
    for part in parts:
        yield part
    raise ZeroDivisionError


def test_a_stream_that_fails_says_so_in_its_last_event():
    found = []

    async def read():
        async for event in failures.told_to_the_end(failing("data: 1\n\n")):
            found.append(event)

    with pytest.raises(ZeroDivisionError):  # for the log
        asyncio.run(read())
    assert found[0] == "data: 1\n\n" and len(found) == 2
    error = json.loads(found[1].removeprefix("data: "))["error"]
    assert error == {"message": failures.FAILED, "type": "server_error"}


def test_an_error_that_transformers_streams_is_made_readable():
    text = 'no "token"\nleft'

    async def stock():
        yield f'data: 1\n\ndata: {{"error": "{text}"}}\n\n'

    async def read():
        return [event async for event in failures.told_to_the_end(stock())]

    (event,) = asyncio.run(read())
    first, last = event.split("\n\n", 1)
    assert first == "data: 1" and json.loads(last[6:])["error"]["message"] == text


def test_a_stream_of_generate_leaves_its_error_in_the_log(caplog):
    def generate(**asked):
        raise asked["error"]

    model = singly.Logged(types.SimpleNamespace(generate=generate, has_talker=True))
    assert model.has_talker
    with pytest.raises(RuntimeError, match="its log says why"):
        model.generate(error=ZeroDivisionError("of the model"))
    assert "of the model" in caplog.text and "Traceback" in caplog.text
    caplog.clear()
    with pytest.raises(UnsupportedCallError):
        model.generate(error=UnsupportedCallError("told"))
    assert not caplog.text


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ZeroDivisionError("secret"), 500, failures.FAILED),
        (CBWorkerDeadError("the batch"), 503, "the batch"),
        (UnsupportedCallError("not this"), 400, "not this"),
    ],
)
def test_every_error_has_openais_form(error, status, told):
    app, metrics = FastAPI(), Metrics()

    @app.post("/fail")
    def fail():
        raise error

    server._add_routes(app, ["tiny"], metrics)
    answer = TestClient(app, raise_server_exceptions=False).post("/fail")
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert answer.status_code == status
    assert answer.json() == {"error": {"message": told, "type": kind}}
    counts = metrics.text().decode()
    assert counted(counts, "attnplug_requests_total", status=str(status)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("batching", [True, False])
def test_what_is_the_requests_fault_is_no_internal_error(
    tmp_path,
    checkpoint,
    batching,
):
    template = checkpoint / "chat_template.jinja"
    before = template.read_text()
    template.write_text(
        "{% if messages[0].role == 'div' %}{{ 1 / 0 }}{% elif messages[0].role != 'void' %}"
        f"{before}{{% endif %}}"
    )
    flags = [] if batching else ["--no-continuous-batching"]
    model = str(checkpoint)
    try:
        with served(tmp_path, model, "--policy", "dense", *flags) as running:

            def asked(**more) -> tuple[int, str]:
                status, answer = running.chat(model, max_tokens=3, **more)
                return status, answer if status == 200 else json.loads(answer)["error"]["message"]

            for stream in (False, True):
                messages = [dict(role="div", content="x")]
                status, told = asked(messages=messages, stream=stream)
                assert status == 400 and "ZeroDivisionError: division by zero" in told
            assert asked(logit_bias={})[0] == 200
            status, told = asked(messages=[dict(role="void", content="x")])
            assert status == 400 and "comes to no tokens" in told
            if batching:
                return
            floats = dict.fromkeys(sampling.FLOATS, 1) | dict(min_p=0, temperature=2)
            floats |= dict(epsilon_cutoff=0, eta_cutoff=0, repetition_penalty=2, do_sample=True)
            assert asked(**asks(**floats))[0] == 200
            assert asked(**asks(do_sample=True, temperature=1e-40))[0] == 200
            status, told = asked(**asks(do_sample=True, suppress_tokens=[*range(300)]))
            assert status == 400 and "leaves out each of the model's 300 tokens" in told
            words = asks(do_sample=True, bad_words_ids=[[token] for token in range(300)])
            status, told = asked(**words)
            assert status == 400 and "leaves no token to choose after 6" in told
            status, told = asked(**words, stream=True)
            last = json.loads(told.strip().rpartition("data: ")[2])
            assert status == 200 and "no token to choose" in last["error"]["message"]
    finally:
        template.write_text(before)


@pytest.mark.slow
def test_a_second_signal_waits_for_no_step(tmp_path, checkpoint):
    """Uvicorn asks for a second Ctrl-C, and waits for a client whose prompt takes its time."""
    flags = ["--policy", "dense", "--no-continuous-batching"]
    with served(tmp_path, str(checkpoint), *flags) as server:
        long = [dict(role="user", content="x" * 60_000)]
        with concurrent.futures.ThreadPoolExecutor() as clients:
            asked = clients.submit(attempt, server, dict(messages=long))
            time.sleep(4)
            assert not asked.done()
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert server.end(signal.SIGINT) < 1
        assert server.process.returncode == -signal.SIGINT
