"""`attnplug serve`, several requests at once: each gets its own sampling, and one that is long,
hostile or left by its client takes nothing from the others."""

import asyncio
import concurrent.futures
import json
import random
import socket
import time
import types

import pytest
import torch
from transformers import GenerationConfig
from transformers.utils.import_utils import is_serve_available

if not is_serve_available():
    pytest.skip("pip install 'attnplug[serve]'", allow_module_level=True)

from hugging_face_cases import HELLO, counted, served

from attnplug.serve.hugging_face import clients, requests, sampling, server

TOKENS = 5


def rows(*asked: dict) -> list:
    """Requests as the batch hands them to its processors."""
    return [
        types.SimpleNamespace(
            state=types.SimpleNamespace(logit_processor_kwargs=kwargs, position_offset=7)
        )
        for kwargs in asked
    ]


def test_draws_have_the_probabilities_of_softmax():
    """A chi-square of 40,000 draws: 4 degrees of freedom exceed 23.5 once in 10,000."""
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]).repeat(40_000, 1)
    seeds = torch.tensor([sampling.step_seed(3, place) for place in range(len(scores))]).int()
    drawn = sampling.RowDraw()(scores, seeds).argmax(-1).bincount(minlength=TOKENS).double()
    expected = scores[0].double().softmax(-1) * len(scores)
    assert ((drawn - expected) ** 2 / expected).sum() < 23.5


def test_each_row_is_sampled_as_its_request_asks():
    asked = rows(
        dict(temperature=0.0, top_p=1.0, seed=1),
        dict(temperature=2.0, top_p=0.5, seed=1),
        dict(temperature=0.5, top_p=1.0, seed=2),
    )
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    heated = sampling.RowTemperature()
    args = heated.prepare_tensor_args(asked)
    given = heated(scores, args)
    assert torch.equal(given, scores / torch.tensor([1.0, 2.0, 0.5])[:, None])
    nucleus = sampling.RowTopP()
    left = nucleus(given, nucleus.prepare_tensor_args(asked)).isfinite()
    assert left[0].all() and left[2].all()
    probabilities, order = given[1].double().softmax(-1).sort(descending=True)
    kept = int((probabilities.cumsum(0) < 0.5).sum()) + 1
    assert left[1].nonzero().flatten().tolist() == sorted(order[:kept].tolist())
    draw = sampling.RowDraw()
    seeds = draw.prepare_tensor_args(asked)
    noisy = draw(scores, seeds)
    assert seeds[0] == sampling.GREEDY and torch.equal(noisy[0], scores[0])
    alone = draw(scores[2:], seeds[2:])  # neighbours and places in the batch change nothing
    assert torch.equal(alone[0], noisy[2]) and not torch.equal(noisy[2], scores[2])


@pytest.mark.parametrize(
    ("model", "body", "wanted"),
    [
        (dict(do_sample=False), dict(temperature=0.7), (0.7, 1.0)),
        (dict(do_sample=False), dict(top_p=0.9), (1.0, 0.9)),
        (dict(do_sample=False), dict(top_p=1.0), (0.0, 1.0)),
        (dict(do_sample=True, temperature=0.6, top_p=0.9), dict(), (0.6, 0.9)),
        (dict(do_sample=True, temperature=0.6), dict(temperature=0.0), (0.0, 1.0)),
        (dict(do_sample=True), dict(temperature=1e-300), (0.0, 1.0)),
    ],
)
def test_what_a_request_asks_decides_over_what_the_model_has(model, body, wanted):
    """A model's greedy config made transformers pass over a temperature in silence."""
    config = GenerationConfig(**model)
    for name in ("temperature", "top_p"):  # as transformers' handlers do
        if name in body:
            setattr(config, name, body[name])
    if body.get("temperature") == 0:
        config.do_sample = False
    seeds = random.Random(5)
    sampling.set_sampling(config, body, seeds)
    found = sampling.sampling_of(config)
    assert found[:2] == wanted and found.seed == random.Random(5).getrandbits(63)
    sampling.set_sampling(config, body | dict(seed=-3), seeds)
    assert sampling.sampling_of(config).seed == -3


def test_a_batch_begins_beside_the_loop_that_answers():
    """It waits for its pages, up to 30 seconds."""
    began = []

    class Batches:
        def is_ready(self):
            return bool(began)

        def begin(self, model):
            time.sleep(0.5)
            began.append(model)

    async def handle(body, name):
        return body

    state = types.SimpleNamespace(
        use_continuous_batching=lambda *_: True, get_manager=lambda *_, **__: Batches()
    )
    config = types.SimpleNamespace(max_position_embeddings=64, get_text_config=lambda: config)
    model = types.SimpleNamespace(config=config)
    handler = types.SimpleNamespace(
        _validate_request=None,
        _build_generation_config=None,
        _resolve_model=lambda body: ("x", model, None),
        handle_request=handle,
        generation_state=state,
        model_manager=types.SimpleNamespace(get_model_modality=lambda *_, **__: None),
    )
    server._adopt(handler, ["x"], "x", random.Random(0))

    async def both():
        asked = asyncio.ensure_future(handler.handle_request(dict(seed=None), "name"))
        ticks = 0
        while not asked.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, await asked

    ticks, body = asyncio.run(both())
    assert ticks > 10 and began == [model] and body == {}  # null is what was not asked


def test_texts_longer_than_a_model_reads_are_counted_no_further():
    counts = []

    def tokenizer(text):
        counts.append(len(text))
        return dict(input_ids=list(text))

    body = dict(messages=[dict(role="user", content="x" * 10_000_000)])
    assert requests.is_long(body) and not requests.is_long(dict(messages=HELLO))
    assert "more than the 300,000 tokens" in requests.texts_problem(body, tokenizer, 300_000)
    assert len(counts) == 3  # of 131,072 characters
    assert not requests.texts_problem(body, tokenizer, 10_000_004)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (dict(chat_template_kwargs=dict(tokenize=False)), "chat_template_kwargs is"),
        (dict(chat_template_kwargs=dict(messages=1)), "chat_template_kwargs is"),
        (dict(chat_template_kwargs=dict(chat_template="x")), "chat_template_kwargs is"),
        (dict(suffix=5), "suffix is 5, needs a string"),
        (dict(instructions=5), "instructions is 5, needs a string"),
        (dict(chat_template_kwargs=dict(enable_thinking=True)), ""),
    ],
)
def test_what_ended_in_an_internal_error_is_told(body, told):
    found = requests.problem_of(body)
    assert found.startswith(told) if told else not found


@pytest.mark.parametrize("text", ["{", "5", None])
def test_arguments_of_tools_are_an_object(text):
    calls = [dict(function=dict(name="add", arguments=text))]
    body = dict(messages=[dict(role="assistant", tool_calls=calls)])
    assert requests.messages_problem(body).startswith("messages[0].tool_calls needs")


def test_what_is_nested_without_end_is_told():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert "too deep" in requests.problem_of(dict(messages=deep))
    assert not requests.is_long(dict(messages=deep))
    text = "[" * 100_000
    told = requests.problem_of(dict(generation_config=text))
    assert told.startswith("generation_config is ") and "the JSON text of an object" in told


def send(port: int, **body) -> socket.socket:
    """A client that has asked and reads nothing yet."""
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client = socket.create_connection(("localhost", port))
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


@pytest.mark.slow
@pytest.mark.parametrize("batching", [True, False])
def test_requests_beside_each_other_get_their_own(tmp_path, checkpoint, batching):
    flags = [] if batching else ["--no-continuous-batching"]
    model = str(checkpoint)
    with served(tmp_path, model, "--policy", "dense", *flags) as running:

        def text(**asked) -> str:
            status, answer = running.chat(model, max_tokens=10, **asked)
            assert status == 200, answer
            return json.loads(answer)["choices"][0]["message"]["content"]

        kinds = [
            dict(temperature=0), dict(temperature=1.8, seed=3), dict(temperature=1.8, seed=4),
            dict(temperature=1.8, seed=3), dict(temperature=1.8, seed=5, top_p=1e-6),
            dict(temperature=1.8), dict(temperature=1.8), dict(temperature=0, seed=9),
        ]  # fmt: skip
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = [each.result() for each in [pool.submit(text, **kind) for kind in kinds]]
        greedy, third, fourth, again, narrow, free, freed, cold = answers
        assert greedy == narrow == cold == text(temperature=0)
        assert third == again == text(temperature=1.8, seed=3)
        assert len({greedy, third, fourth, free, freed}) == 5

        # A client that goes away takes its request along.
        asked = dict(model=model, messages=HELLO, temperature=0, max_tokens=20_000 // 5)
        left = [send(running.port, **asked, stream=stream) for stream in (False, True, False)]
        time.sleep(2)
        for each in left:
            each.close()
        begin = time.monotonic()
        text(temperature=0)
        assert time.monotonic() - begin < 10
        if batching:
            time.sleep(1)
            tokens = [
                counted(running.ask("/metrics")[1], "attnplug_generated_tokens_total")
                for _ in range(2)
                if not time.sleep(1)
            ]
            assert tokens[0] == tokens[1] < 4000

        for body in (b"{", b"[1]", b"", b'{"model": "\xff"}'):
            with socket.create_connection(("localhost", running.port)) as raw:
                head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
                raw.sendall(head.encode() + body)
                answer = b"".join(iter(lambda raw=raw: raw.recv(4096), b""))
            assert b" 400 " in answer and b'"message":' in answer
        with socket.create_connection(("localhost", running.port)) as raw:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: 99999999\r\n\r\n")
            for _ in range(clients.LONGEST // (1 << 20)):
                raw.sendall(b" " * (1 << 20))
            raw.sendall(b" ")
            assert b" 413 " in raw.recv(4096)
