"""`attnplug serve`: transformers' own OpenAI-compatible server, `transformers serve`, with a policy
on every model that it loads. Requests are batched continuously unless told otherwise."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from transformers.utils.import_utils import is_serve_available

from attnplug.api import PolicyLike, apply
from attnplug.errors import UnsupportedCallError
from attnplug.models.pretrained import WEIGHTS, fetch

BATCHING = "--continuous-batching"


def run(model: str, policy: PolicyLike, arguments: Sequence[str]) -> None:
    """Serve a model until interrupted. `model` is one of `pretrained.names()`, a folder or a hub
    id; `arguments` are flags of `transformers serve`. Raises UnsupportedCallError where packages of
    the server are missing, and what `apply` raises for the model."""
    if not is_serve_available():
        raise UnsupportedCallError(
            "transformers' server needs FastAPI and Uvicorn: pip install 'attnplug[serve]'"
        )
    from transformers.cli.serve import Serve

    source = str(fetch(model)) if model in WEIGHTS else model
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name="attnplug serve MODEL --")(Serve)
    command = typer.main.get_command(app)
    with policy_on_load(policy):
        command.main([source, *with_batching(arguments)], standalone_mode=False)


def with_batching(arguments: Sequence[str]) -> list[str]:
    """The arguments, with continuous batching where they do not speak of it."""
    spoken = {BATCHING, BATCHING.replace("--", "--no-", 1)}
    return [*arguments, *([] if spoken & {*arguments} else [BATCHING])]


@contextlib.contextmanager
def policy_on_load(policy: PolicyLike) -> Iterator[None]:
    """Within it, transformers' server applies a policy to each model that it loads: in one method,
    whatever asks for the model."""
    from transformers.cli.serving.model_manager import ModelManager

    stock = ModelManager._load_model

    def load(manager: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(stock(manager, *args, **kwargs), policy)

    loader: Any = ModelManager
    loader._load_model = load
    try:
        yield
    finally:
        loader._load_model = stock
