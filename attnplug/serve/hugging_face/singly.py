"""How a server without batches answers: one request after the other, by `generate`."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.cli.serving.utils import GenerateManager

from attnplug.serve.hugging_face.clients import Client, client_at_hand, until_gone
from attnplug.serve.hugging_face.sampling import seed_of

SEEDED: contextvars.ContextVar[int] = contextvars.ContextVar("seeded")


class Left(Exception):
    """Ends a call whose client went away."""


class Leaving:
    """A streamer that ends the call when the client has gone."""

    def __init__(self, client: Client):
        self.client = client

    def put(self, value: torch.Tensor) -> None:
        if self.client.gone:
            raise Left

    def end(self) -> None:
        pass


class Singly(GenerateManager):
    """Begins each request with the request's own seed, and ends it for a client that went away:
    transformers seeds when a request arrives, while others are computed."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        with _seeding(gen_config):
            found = super().generate_streaming(model, processor, inputs, gen_config, *more, **named)
        client_at_hand().when_gone(found[1].cancel)
        return found

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        if (gen_config.num_beams or 1) == 1:  # beams take no streamer
            inputs = {**inputs, "streamer": Leaving(client_at_hand())}
        made = super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        with _seeding(gen_config):
            answer = asyncio.ensure_future(made)
        return await until_gone(answer)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().submit(_seeded(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().async_submit(_seeded(fn), *args, **kwargs)


@contextlib.contextmanager
def _seeding(config: Any) -> Iterator[None]:
    token = SEEDED.set(seed_of(config))
    try:
        yield
    finally:
        SEEDED.reset(token)


def _seeded(fn: Callable[..., Any]) -> Callable[..., Any]:
    seed = SEEDED.get()

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(seed)
        return fn(*args, **kwargs)

    return run
