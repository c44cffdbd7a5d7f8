"""The parts of HTTP that are ours: bodies with a limit, streams that notice a client leaving, ids, keys, log lines."""

import asyncio
import re
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from hmac import compare_digest
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime_min.serve.errors import ApiError
from runtime_min.serve.replies import dumps

T = TypeVar("T")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PROTECTED = "/v1/"


class Gone(Exception):
    """The client has left."""


async def body_of(request: Request, most: int) -> bytes:
    """The JSON text of a request; ApiError 415 for another type, 413 for more than `most` bytes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Nor could a web page of another origin send this type unasked.
        raise ApiError(415, f"content-type: found {kind or 'none'}, expected application/json")
    said = request.headers.get("content-length", "")
    data = bytearray()
    if not (said.isdecimal() and int(said) > most):
        async for piece in request.stream():
            data += piece
            if len(data) > most:
                break
        else:
            return bytes(data)
    raise ApiError(413, f"body: larger than {most:,} bytes, the most that is taken")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; if the client leaves first, it is cancelled and Gone raised."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: `first`, then what a generator that has given it goes on to give. Whatever ends the stream,
    the generator is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.first, self.events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def flow() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with aclosing(self.events):
            with suppress(Gone, OSError):
                await unless_gone(receive, flow())


class Gate:
    """Gives each request an id, asks for the key where one is needed, and writes a line when it is answered."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], log: Callable[[str], None]) -> None:
        self.app, self.keys, self.log = app, [k.encode() for k in keys], log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        notes: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=id, notes=notes)
        begun, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", id.encode())]}
            await send(message)

        try:
            if scope["path"].startswith(PROTECTED) and not self._knows(headers.get(b"authorization", b"")):
                wrong = ApiError(401, "authorization: expected `Bearer KEY` with this server's key")
                await failure(wrong)(scope, receive, answer)
            else:
                await self.app(scope, receive, answer)
        finally:
            if scope["path"].startswith(PROTECTED):
                told = " ".join(f"{k}={v}" for k, v in notes.items())
                line = (
                    f"{id} {scope['method']} {scope['path']} {status or 'gone'} {time.monotonic() - begun:.3f}s {told}"
                )
                self.log(line.rstrip())

    def _knows(self, said: bytes) -> bool:
        key = said[7:].strip() if said[:7].lower() == b"bearer " else b""
        return not self.keys or any([compare_digest(key, k) for k in self.keys])


def failure(error: ApiError) -> Response:
    return Response(dumps(error.body), error.status, error.headers, "application/json")


def to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
