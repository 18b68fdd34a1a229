"""How a server without batches answers: one request after the other, by `generate`."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fastapi import HTTPException
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled

from attnplug.errors import AttnplugError, UnsupportedCallError
from attnplug.serve.hugging_face.clients import Client, client_at_hand, until_gone
from attnplug.serve.hugging_face.failures import FAILED
from attnplug.serve.hugging_face.requests import tokens_problem
from attnplug.serve.hugging_face.sampling import seed_of

LOG = logging.getLogger("attnplug")
# What of a generation config can leave a step without a token.
FORBIDDING = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "no_repeat_ngram_size")
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


class Choice(LogitsProcessor):
    """Refuses a step that no token is left to, from which a GPU could not draw and go on. Of beams,
    one that is left suffices."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool((scores == float("-inf")).all()):
            raise UnsupportedCallError(
                f"the generation config leaves no token to choose after {input_ids.shape[1]:,}"
            )
        return scores


class Logged:
    """A model whose errors are in the log: a stream of transformers' tells their text alone."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **asked: Any) -> Any:
        try:
            return self._model.generate(**asked)
        except (AttnplugError, _GenerationCancelled):
            raise
        except BaseException as error:
            LOG.exception("a stream failed")
            if isinstance(error, Exception):
                raise RuntimeError(FAILED) from error  # whose text the client is told
            raise


class Singly(GenerateManager):
    """Begins each request with the request's own seed, and ends it for a client that went away:
    transformers seeds when a request arrives, while others are computed."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        inputs, model = _checked(inputs, gen_config), Logged(model)
        with _seeding(gen_config):
            found = super().generate_streaming(model, processor, inputs, gen_config, *more, **named)
        client_at_hand().when_gone(found[1].cancel)
        return found

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        inputs = _checked(inputs, gen_config)
        if (gen_config.num_beams or 1) == 1:  # beams take no streamer
            inputs = {**inputs, "streamer": Leaving(client_at_hand())}
        made = super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        with _seeding(gen_config):
            answer = asyncio.ensure_future(made)
        return await until_gone(answer)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().submit(self._seeded(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().async_submit(self._seeded(fn), *args, **kwargs)

    def _seeded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        seed = SEEDED.get()

        def run(*args: Any, **kwargs: Any) -> Any:
            self.is_at_work = True
            try:
                torch.manual_seed(seed)
                return fn(*args, **kwargs)
            finally:
                self.is_at_work = False

        return run


def _checked(inputs: Any, config: Any) -> dict[str, Any]:
    """What generate is to be given, with `Choice` where the config can leave no token."""
    if problem := tokens_problem(inputs["input_ids"]):
        raise HTTPException(400, problem)
    forbids = any(getattr(config, name, None) for name in FORBIDDING)
    return {**inputs, "logits_processor": LogitsProcessorList([Choice()])} if forbids else inputs


@contextlib.contextmanager
def _seeding(config: Any) -> Iterator[None]:
    token = SEEDED.set(seed_of(config))
    try:
        yield
    finally:
        SEEDED.reset(token)
