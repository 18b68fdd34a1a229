"""Requests that fail where no check foresaw it: whose fault that is, and how a client is told once
its answer has begun."""

import contextlib
import json
import traceback
from collections.abc import AsyncIterator
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

FAILED = "the server failed to answer this request; its log says why"
# How transformers begins and ends the last event of a stream that failed. It writes the error's
# text between them as it is, which quotes and line breaks make unreadable.
STOCK_BEGIN, STOCK_END = 'data: {"error": "', '"}\n\n'


def error_of(status: int, message: str) -> dict[str, Any]:
    """What went wrong, in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind}}


def is_of_template(error: BaseException) -> bool:
    """Whether an error came while a chat template was looked up or rendered, which can raise
    whatever Python raises for a message that it was not written for."""
    steps = (PreTrainedTokenizerBase.get_chat_template, render_jinja_template)
    codes = {each.__code__ for each in steps}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


async def told_to_the_end(events: Any) -> AsyncIterator[str]:
    """The events of a stream, the last of which says so where it failed: its status is out."""
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                before, begun, told = event.partition(STOCK_BEGIN)
                yield before + _last_event(told.removesuffix(STOCK_END)) if begun else event
        except BaseException as error:
            if isinstance(error, Exception):  # and nobody's leave
                yield _last_event(FAILED)
            raise


def _last_event(message: str) -> str:
    return f"data: {json.dumps(error_of(500, message))}\n\n"
