"""The continuous batches of a server, which one request can neither end nor be answered by wrongly.

transformers' worker ends for good where a request comes to more tokens than there are pages, and
every later request is refused; and what a batch cannot do for one request it leaves out in silence.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.utils import CBGenerateManager

READY = 30.0  # seconds that the first request waits for the pages
END = 3.0  # and the next one for a worker that has failed to stop
UNSERVED = ("stop", "logit_bias", "frequency_penalty", "generation_config")
ALONE = "start the server with --no-continuous-batching for it"


def batch_problem(body: Mapping[str, Any]) -> str:
    """What of a request no continuous batch serves, in a sentence, or ""."""
    asked = next((name for name in UNSERVED if body.get(name)), "")
    return f"{asked} is not served in continuous batches: {ALONE}" if asked else ""


class Batches(CBGenerateManager):
    """Refuses what does not fit into the pages, and begins anew after a worker that failed."""

    def init_cb(self, model: Any, gen_config: Any) -> None:
        failed = None if self.is_alive() else self._cb
        if failed is not None:
            failed.stop(block=True, timeout=END)
            self._cb = None
        if self._cb is not None:
            return
        super().init_cb(model, gen_config)
        begun: Any = self._cb
        until = time.monotonic() + READY
        while begun.batch_processor is None and self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        self._refuse_too_long(inputs, gen_config)
        name = _name_of_its_own(request_id)
        # transformers before it parsed answers takes none
        parsed = {} if response_parser is None else {"response_parser": response_parser}
        return super().generate_streaming(model, processor, inputs, gen_config, name, **parsed)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        self._refuse_too_long(inputs, gen_config)
        name = _name_of_its_own(request_id)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, name)

    def _refuse_too_long(self, inputs: Any, gen_config: Any) -> None:
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


def adopt_batches(state: Any) -> None:
    """Have the state that a server's handlers share hand out `Batches`."""
    if "get_manager" in vars(state):  # for another handler already
        return
    hand_out = state.get_manager

    def get_manager(model_id: str, use_cb: bool = False) -> Any:
        found = hand_out(model_id, use_cb=use_cb)
        if use_cb and not isinstance(found, Batches):
            found = state._cb_manager = Batches(cb_config=state._cb_config)
        return found

    state.get_manager = get_manager
