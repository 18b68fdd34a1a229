"""The continuous batches of a server, which one request can neither end nor be answered by wrongly.

transformers' worker ends for good where a request comes to more tokens than there are pages, and
every later request is refused; it samples all requests as the first one asked; what a batch cannot
do for one request it leaves out in silence, and it computes on for a client that went away.
"""

import asyncio
import contextlib
import contextvars
import copy
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.utils import CBGenerateManager

from attnplug.serve.hugging_face.clients import client_at_hand, until_gone
from attnplug.serve.hugging_face.requests import tokens_problem
from attnplug.serve.hugging_face.sampling import Sampling, sample_by_rows, sampling_of
from attnplug.serve.hugging_face.singly import Singly

READY = 30.0  # seconds that a request waits for the pages of a worker that has just begun
END = 3.0  # and for a worker that has failed to stop
UNSERVED = ("stop", "logit_bias", "frequency_penalty", "generation_config")
ALONE = "start the server with --no-continuous-batching for it"


def batch_problem(body: Mapping[str, Any]) -> str:
    """What of a request no continuous batch serves, in a sentence, or ""."""
    asked = next((name for name in UNSERVED if body.get(name)), "")
    return f"{asked} is not served in continuous batches: {ALONE}" if asked else ""


class Batches(CBGenerateManager):
    """Refuses what does not fit into the pages, samples each row as its own request asked, drops
    the rows of clients that went away, and begins anew after a worker that failed."""

    def __init__(self, cb_config: Any = None):
        super().__init__(cb_config=cb_config)
        self._beginning = threading.Lock()

    def begin(self, model: Any) -> None:
        """Begin where no worker is alive, and wait for its pages. Blocks its thread."""
        with self._beginning:
            self.init_cb(model, None)
            begun: Any = self._cb
            until = time.monotonic() + READY
            while begun.batch_processor is None and self.is_alive() and time.monotonic() < until:
                time.sleep(0.01)

    def is_ready(self) -> bool:
        worker: Any = self._cb
        return worker is not None and self.is_alive() and worker.batch_processor is not None

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Begin where no worker is alive. The first request's `gen_config` decides nothing."""
        failed = None if self.is_alive() else self._cb
        if failed is not None:
            failed.stop(block=True, timeout=END)
            self._cb = None
        if self._cb is not None:
            return
        shared = copy.deepcopy(model.generation_config)
        # transformers makes a processor for each of these two; the rows' own take their places.
        shared.do_sample, shared.temperature, shared.top_p = True, 0.5, 0.5
        shared.use_cache, shared.num_return_sequences = False, 1
        worker = model.init_continuous_batching(
            generation_config=shared, continuous_batching_config=self._cb_config
        )
        sample_by_rows(worker)
        _take_sampling(worker)
        worker.start()
        self._cb = worker

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        self._refuse_unfit(inputs, gen_config)
        name, worker = _name_of_its_own(request_id), self._cb
        # transformers before it parsed answers takes none
        parsed = {} if response_parser is None else {"response_parser": response_parser}
        later: list[Callable[[], None]] = []
        with _asking(sampling_of(gen_config), later):
            found = super().generate_streaming(model, processor, inputs, gen_config, name, **parsed)
        for add in later:
            add()  # now that its answers have a place to go to
        client_at_hand().when_gone(lambda: _cancel(worker, name))
        return found

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        self._refuse_unfit(inputs, gen_config)
        name, worker = _name_of_its_own(request_id), self._cb
        made = super().generate_non_streaming(model, processor, inputs, gen_config, name)
        with _asking(sampling_of(gen_config)):
            answer = asyncio.ensure_future(made)
        try:
            return await until_gone(answer)
        except RuntimeError as error:
            if worker is not None and worker.is_running():
                raise
            raise HTTPException(503, f"the batch has ended: {error}") from error
        finally:
            if not answer.done() or answer.cancelled() or answer.exception() is not None:
                answer.cancel()
                _cancel(worker, name)

    def _refuse_unfit(self, inputs: Any, gen_config: Any) -> None:
        if problem := tokens_problem(inputs["input_ids"]):
            raise HTTPException(400, problem)
        batches = None if self._cb is None else self._cb.batch_processor
        if batches is None:
            return
        prompt, new = len(inputs["input_ids"]), gen_config.max_new_tokens
        room = room_of(batches.cache)
        if prompt + new > room:
            raise HTTPException(
                400,
                f"a prompt of {prompt:,} tokens and {new:,} more (max_tokens) do not fit into the "
                f"pages, which have room for {room:,}",
            )


Later = list[Callable[[], None]]
ASKED: contextvars.ContextVar[tuple[Sampling, Later | None]] = contextvars.ContextVar("asked")


@contextlib.contextmanager
def _asking(sampling: Sampling, later: Later | None = None) -> Iterator[None]:
    """Within it, a worker takes a request with that sampling; where `later` is given, when its one
    entry is called."""
    token = ASKED.set((sampling, later))
    try:
        yield
    finally:
        ASKED.reset(token)


def _take_sampling(worker: Any) -> None:
    """Have a worker take the sampling of the request at hand with its tokens, and say so where it
    takes no more requests: it would drop them in silence, and their clients would wait."""
    take = worker.add_request

    def add_request(input_ids: Any, request_id: str, **more: Any) -> str:
        sampling, later = ASKED.get()

        def add() -> None:
            if take(input_ids, request_id=request_id, **sampling._asdict(), **more) is None:
                raise HTTPException(503, "the server is ending and takes no more requests")

        add() if later is None else later.append(add)
        return request_id

    worker.add_request = add_request


def _cancel(worker: Any, name: str) -> None:
    """Take a request out of the batch. The worker gives no answer then, and keeps no place for
    one."""
    worker.cancel_request(name)
    with worker.output_router._lock:
        worker.output_router.result_handlers.pop(name, None)


def _name_of_its_own(asked: str) -> str:
    """Clients may send one X-Request-ID twice, and the batch answers each name once."""
    return f"{asked}-{secrets.token_hex(4)}"


def room_of(cache: Any) -> int:
    """How many tokens of a row the pages hold, by the layers that keep all tokens, or by all layers
    where none does."""
    if not hasattr(cache, "cache_allocators"):  # transformers 5.17
        return cache.num_blocks * cache.block_size
    every = list(cache.cache_allocators.values())
    full = [x for x in every if "Sliding" not in type(x).__name__] or every
    return min(x.tokens_per_page * x.num_blocks for x in full)


def adopt_managers(state: Any) -> None:
    """Have the state that a server's handlers share hand out `Batches` and `Singly`."""
    if "get_manager" in vars(state):  # for another handler already
        return
    hand_out = state.get_manager

    def get_manager(model_id: str, use_cb: bool = False) -> Any:
        if not use_cb:
            if model_id not in state._generate_managers:
                state._generate_managers[model_id] = Singly()
            return state._generate_managers[model_id]
        found = hand_out(model_id, use_cb=True)
        if not isinstance(found, Batches):
            found = state._cb_manager = Batches(cb_config=state._cb_config)
        return found

    state.get_manager = get_manager
