"""The server of `attnplug serve`: transformers' handlers and continuous batching behind routes and
checks of its own, from loading the model to an orderly end."""

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from transformers.utils.import_utils import is_serve_available

from attnplug.api import PolicyLike, apply, report
from attnplug.errors import ArgumentError, AttnplugError, UnsupportedCallError
from attnplug.models.device import read_device
from attnplug.models.layers import positions
from attnplug.models.pretrained import WEIGHTS, fetch
from attnplug.serve.hugging_face.requests import (
    MOST,
    input_problem,
    is_long,
    is_object,
    length_problem,
    messages_problem,
    problem_of,
    prompt_problem,
    texts_problem,
    vocabulary_problem,
)

NEW_TOKENS = 1024  # where a request does not say how many, as transformers' server has it
ENDING = signal.SIGINT, signal.SIGTERM
GRACE = 3.0  # seconds that each part of the server has for its end
# Routes of transformers' server that load, drop and list models, of which this server has one, and
# routes that answer with something else than text.
DROPPED = frozenset(
    {"/load_model", "/reset", "/v1/models", "/v1/systemone", "/v1/audio/transcriptions"}
)
ALLOWED = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "quantization": ("bnb-4bit", "bnb-8bit"),
    "reasoning": ("on", "off", "auto"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
}
RANGES = {
    "port": (0, 65_535),
    "cb_block_size": (1, 1 << 40),
    "cb_num_blocks": (1, 1 << 40),
    "cb_max_batch_tokens": (1, 1 << 40),
    "default_seed": (-(1 << 63), (1 << 64) - 1),  # as torch takes it
}


@dataclass(frozen=True)
class Options:
    """How to serve; a field of None is transformers' own choice. `served_model_name`: by which name
    clients may ask for the model, beside the one that it was loaded by. The fields from `device` on
    are those of transformers' `Serve`."""

    served_model_name: str | None = None
    host: str = "localhost"
    port: int = 8000
    continuous_batching: bool = True
    device: str | None = None
    dtype: str | None = None
    cb_block_size: int | None = None
    cb_num_blocks: int | None = None
    cb_max_batch_tokens: int | None = None
    cb_max_memory_percent: float | None = None
    quantization: str | None = None
    trust_remote_code: bool | None = None
    reasoning: str | None = None
    chat_template_kwargs: str | None = None
    default_seed: int | None = None
    enable_cors: bool | None = None
    log_level: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ArgumentError(f"serve: {name} is {value!r}, needs {' or '.join(allowed)}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ArgumentError(f"serve: {name} is {value}, needs {least} to {most}")
        share = self.cb_max_memory_percent
        if share is not None and not 0 < share <= 1:
            raise ArgumentError(f"serve: cb_max_memory_percent is {share}, needs more than 0, to 1")
        if not _is_host(self.host):
            raise ArgumentError(f"serve: host is {self.host[:99]!r}, needs a name or an address")
        if self.device not in (None, "auto"):
            read_device(self.device)
        if self.chat_template_kwargs is not None and not is_object(self.chat_template_kwargs):
            raise ArgumentError("serve: chat_template_kwargs needs the JSON text of an object")

    def given(self) -> dict[str, Any]:
        """What transformers is to be told."""
        told = asdict(self)
        del told["served_model_name"]
        return {name: value for name, value in told.items() if value is not None}


def run(model: str, policy: PolicyLike, options: Options | None = None) -> None:
    """Serve a model until SIGINT or SIGTERM. `model` is one of `pretrained.names()`, a folder or a
    hub id. Raises UnsupportedCallError where packages of the server are missing, ArgumentError
    where it cannot listen, and what `apply` raises for the model.

    Where a step of the model still runs after the grace, or another signal comes before, the
    process ends without it.
    """
    options = options or Options()
    if not (is_serve_available() and importlib.util.find_spec("prometheus_client")):
        raise UnsupportedCallError(
            "the server needs FastAPI, Uvicorn and prometheus-client: pip install 'attnplug[serve]'"
        )
    from transformers.cli.serve import Serve

    source = str(fetch(model)) if model in WEIGHTS else model
    names = list(dict.fromkeys(filter(None, (options.served_model_name, model))))

    class Loaded(Serve):
        """Begins when it is told to, and not with an interrupt in its thread's first moments."""

        def start_server(self) -> None:
            pass

    with _own_app(names, source, policy, Random(options.default_seed)):
        serve = Loaded(force_model=source, non_blocking=True, **options.given())
    with _heeding_signals() as told:
        Serve.start_server(serve)
        _wait(serve, told, names, options)
        if not _stop(serve):
            text = "attnplug serve: a step was still running; it was not waited for"
            print(text, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # a thread of the model's would hold the process for as long as it likes


@contextlib.contextmanager
def _own_app(names: list[str], source: str, policy: PolicyLike, seeds: Random) -> Iterator[None]:
    """Within it, transformers' server puts the policy on the model that it loads, and gets routes
    and checks of attnplug's."""
    from transformers.cli.serving import server
    from transformers.cli.serving.model_manager import ModelManager

    from attnplug.serve.hugging_face.clients import Clients
    from attnplug.serve.hugging_face.metrics import Metrics

    metrics = Metrics()
    load, build = ModelManager._load_model, server.build_server

    def load_with_policy(manager: Any, *args: Any, **kwargs: Any) -> Any:
        model = apply(load(manager, *args, **kwargs), policy)
        print(report(model), flush=True)
        metrics.watch(model)
        return model

    def build_own(*handlers: Any, **more: Any) -> Any:
        app = build(*handlers, **more)
        for handler in (*handlers, *more.values()):
            if hasattr(handler, "_resolve_model"):
                _adopt(handler, names, source, seeds)
        _add_routes(app, names, metrics)
        app.add_middleware(Clients)
        return app

    loader: Any = ModelManager
    loader._load_model, server.build_server = load_with_policy, build_own
    try:
        yield
    finally:
        loader._load_model, server.build_server = load, build


def _adopt(handler: Any, names: list[str], source: str, seeds: Random) -> None:
    """Have one of transformers' handlers know the model by the server's names, answer by the first
    of them, and refuse what it would not serve."""
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    from attnplug.serve.hugging_face.batches import adopt_managers, batch_problem
    from attnplug.serve.hugging_face.failures import is_of_template, told_to_the_end
    from attnplug.serve.hugging_face.sampling import set_floats, set_sampling

    checks: dict[str, Callable[[Any], str]] = {
        "ChatCompletionHandler": messages_problem,
        "CompletionHandler": prompt_problem,
        "ResponseHandler": input_problem,
    }
    check = checks.get(type(handler).__name__, lambda body: "")
    validate, resolve = handler._validate_request, handler._resolve_model
    handle, build = handler.handle_request, handler._build_generation_config
    state = handler.generation_state

    def is_batched(loaded: Any, processor: Any) -> bool:
        kind = handler.model_manager.get_model_modality(loaded, processor=processor)
        return state.use_continuous_batching(loaded, kind)

    def validate_request(body: dict[str, Any]) -> None:
        problem = problem_of(body) or check(body)
        if problem:
            raise HTTPException(400, problem)
        if "logit_bias" in body:  # whole numbers, or none, are errors to transformers
            biases = {token: float(by) for token, by in body.pop("logit_bias").items()}
            body |= {"logit_bias": biases} if biases else {}
        validate(body)

    def resolve_model(body: dict[str, Any]) -> tuple[Any, ...]:
        asked = body.get("model")
        if asked is not None and asked not in names:
            raise HTTPException(404, f"no model {asked!r} here, which serves {' and '.join(names)}")
        _, loaded, *rest = resolve({**body, "model": source})
        tokens = loaded.config.get_text_config(decoder=True).vocab_size
        problem = length_problem(body, positions(loaded.config)) or vocabulary_problem(body, tokens)
        if is_batched(loaded, rest[0]):
            problem = problem or batch_problem(body)
        if problem:
            raise HTTPException(400, problem)
        return names[0], loaded, *rest

    def build_config(body: dict[str, Any], defaults: Any, *args: Any, **kwargs: Any) -> Any:
        # without the seed, which transformers would set for all requests
        config = build({**body, "seed": None}, defaults, *args, **kwargs)
        set_floats(config, defaults)
        if config.max_new_tokens is None:  # of a request's own config, which does not say
            config.max_new_tokens = NEW_TOKENS
        set_sampling(config, body, seeds)
        return config

    async def handle_request(body: dict[str, Any], *args: Any) -> Any:
        for name in [name for name, value in body.items() if value is None]:
            del body[name]
        _, loaded, processor = resolve({"model": source})
        if is_long(body):  # in a thread, while others are answered
            tokenizer = getattr(processor, "tokenizer", processor)
            reads = positions(loaded.config) or MOST
            problem = await asyncio.to_thread(texts_problem, body, tokenizer, reads)
            if problem:
                raise HTTPException(400, problem)
        if is_batched(loaded, processor):
            batches = state.get_manager(names[0], use_cb=True)
            if not batches.is_ready():
                await asyncio.to_thread(batches.begin, loaded)
        try:
            answer = await handle(body, *args)
        except BaseException as error:
            if isinstance(error, Exception) and is_of_template(error):
                told = f"{type(error).__name__}: {error}"
                raise HTTPException(400, f"the chat template fails for it: {told}") from error
            raise
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = told_to_the_end(answer.body_iterator)
        return answer

    adopt_managers(state)
    handler.handle_request = handle_request
    handler._validate_request, handler._resolve_model = validate_request, resolve_model
    handler._build_generation_config = build_config


def _add_routes(app: Any, names: list[str], metrics: Any) -> None:
    """/v1/models and /metrics, errors in OpenAI's form, and a count of the answers."""
    from fastapi import Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from transformers.cli.serving.utils import CBWorkerDeadError

    from attnplug.serve.hugging_face.clients import refusal
    from attnplug.serve.hugging_face.failures import FAILED

    created = int(time.time())
    app.router.routes[:] = [x for x in app.router.routes if x.path not in DROPPED]

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        about = {"object": "model", "created": created, "owned_by": "attnplug"}
        return {"object": "list", "data": [{"id": name} | about for name in names]}

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def told(_: Request, error: HTTPException) -> JSONResponse:
        return refusal(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def misread(_: Request, error: RequestValidationError) -> JSONResponse:
        told = "; ".join(f"{each['msg']} at {each['loc']}" for each in error.errors())
        return refusal(400, f"the request is no JSON object: {told}")

    @app.exception_handler(CBWorkerDeadError)
    async def ended(_: Request, error: CBWorkerDeadError) -> JSONResponse:
        return refusal(503, str(error))

    @app.exception_handler(AttnplugError)
    async def unserved(_: Request, error: AttnplugError) -> JSONResponse:
        return refusal(400, str(error))

    @app.exception_handler(Exception)
    async def failed(request: Request, _: Exception) -> JSONResponse:
        if request.method == "POST":
            metrics.requests.labels(500).inc()  # `count` sees no answer
        return refusal(500, FAILED)  # the error goes on, into Uvicorn's log

    @app.middleware("http")
    async def count(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        if request.method == "POST":
            metrics.requests.labels(response.status_code).inc()
        return response


@contextlib.contextmanager
def _heeding_signals() -> Iterator[threading.Event]:
    """Within it a signal that asks for the end sets the event. Another ends the process at once: an
    exception would leave it to wait for its threads, one of which may be in a long step."""
    told = threading.Event()

    def heed(*_: object) -> None:
        told.set()
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.signal(each, heed) for each in ENDING}
    try:
        yield told
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _wait(serve: Any, told: threading.Event, names: list[str], options: Options) -> None:
    """Return when a signal asks for the end. Raises ArgumentError where the server cannot begin."""
    while not serve.server.started and serve._thread.is_alive() and not told.wait(0.05):
        pass
    if serve.server.started:
        host = f"[{options.host}]" if ":" in options.host else options.host
        where = f"http://{host}:{_port(serve.server)}"
        print(f"{' and '.join(names)} at {where}/v1; {where}/metrics counts", flush=True)
    elif not told.is_set():
        raise ArgumentError(
            f"serve: nothing can listen on {options.host}, port {options.port}; see above"
        )
    while serve._thread.is_alive() and not told.wait(0.2):
        pass


def _is_host(name: str) -> bool:
    """Whether this is an address or may be a machine's name; "" is every address of the machine."""
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        pass
    try:
        return bool(re.fullmatch(rb"[\w-]+(\.[\w-]+)*\.?", name.encode("idna")))
    except UnicodeError:
        return False


def _port(server: Any) -> int:
    """On which port a server listens: of 0 the system makes one that is free."""
    return server.servers[0].sockets[0].getsockname()[1]


def _stop(serve: Any) -> bool:
    """End requests, batches and the server; False where some thread is still at work."""
    serve.server.should_exit = True
    batches = serve._generation_state._cb_manager
    manager = None if batches is None else batches._cb
    if manager is not None:
        manager.stop(block=True, timeout=GRACE, hard_stop=True)
    serve._thread.join(GRACE)
    serve.server.force_exit = True  # an answer that is still being made is given up
    serve._thread.join(GRACE)
    singly = serve._generation_state._generate_managers.values()
    # Without batches generate runs on a daemon thread, which nothing can stop in mid-step.
    busy = serve._thread.is_alive() or any(each.is_at_work for each in singly)
    return not busy and not (manager is not None and manager.is_running())
