"""What stands between a server and its clients: one that goes away ends its request, and one that
sends too much is told so before the server holds it."""

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from attnplug.serve.hugging_face.failures import error_of

LEFT = 499  # the status of an answer that nobody waits for
LONGEST = 16 << 20  # bytes of a request: a million tokens of text, escaped by JSON


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An answer that says what is wrong, in OpenAI's form."""
    return JSONResponse(error_of(status, message), status, headers)


class Client:
    """Whoever sent a request, and what is to be done when they go away before its answer."""

    def __init__(self) -> None:
        self.gone = False
        self._leaving: list[Callable[[], object]] = []

    def when_gone(self, do: Callable[[], object]) -> None:
        if self.gone:
            do()
        else:
            self._leaving.append(do)

    def leave(self) -> None:
        self.gone = True
        while self._leaving:
            self._leaving.pop()()

    def served(self) -> None:
        self._leaving.clear()


CLIENT: contextvars.ContextVar[Client | None] = contextvars.ContextVar("client", default=None)


def client_at_hand() -> Client:
    """The client of the request at hand; one that never goes away outside of a server."""
    return CLIENT.get() or Client()


async def until_gone(answer: "asyncio.Future[Any]") -> Any:
    """What an answer comes to, or an error once the client of the request at hand has gone away.
    The answer is not ended by that."""
    gone = asyncio.Event()
    client_at_hand().when_gone(gone.set)
    leaving = asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
    if answer.done():
        return answer.result()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to nobody
    raise HTTPException(LEFT, "the client went away")


class Clients:
    """An ASGI app around the server's: `CLIENT` is the client of the request at hand."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts = await _whole(receive)
        if parts is None:
            told = f"a request has at most {LONGEST >> 20} MiB"
            await refusal(413, told, {"connection": "close"})(scope, receive, send)
            return
        client = Client()
        left = asyncio.Event()

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            client.leave()

        async def receive_again() -> dict[str, Any]:
            if parts:
                return parts.pop(0)
            await left.wait()
            return {"type": "http.disconnect"}

        async def send_on(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                client.served()
            await send(message)

        token = CLIENT.set(client)
        listening = asyncio.ensure_future(listen())
        try:
            await self.app(scope, receive_again, send_on)
        finally:
            listening.cancel()
            CLIENT.reset(token)


async def _whole(receive: Any) -> list[dict[str, Any]] | None:
    """The messages of a request's body; None where it is too long."""
    parts: list[dict[str, Any]] = []
    size = 0
    while not parts or (parts[-1]["type"] == "http.request" and parts[-1].get("more_body", False)):
        parts.append(await receive())
        size += len(parts[-1].get("body", b""))
        if size > LONGEST:
            return None
    return parts
