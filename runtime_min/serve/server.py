"""What the endpoints do: requests through the engine, and how the server is."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from runtime_min.request import Request as Asked
from runtime_min.serve import jobs
from runtime_min.serve.choice import News
from runtime_min.serve.errors import ApiError
from runtime_min.serve.fields import ChatFields, Common, CompletionFields, read
from runtime_min.serve.http import EventStream, body_of, unless_gone
from runtime_min.serve.jobs import Job, Served
from runtime_min.serve.metrics import Clock, Metrics
from runtime_min.serve.pump import Pump
from runtime_min.serve.replies import ChatReply, Reply, TextReply, dumps, event

RETRY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one request may cost. seconds: of a whole request; body: bytes; beat: seconds of silence in a stream after
    which a comment is sent, so that nobody takes it for dead; deep: seconds for a token in a health check."""

    keys: tuple[str, ...] = ()
    seconds: float = 3600.0
    body: int = 64 << 20
    beat: float = 15.0
    deep: float = 30.0


class Server:
    """The state behind the endpoints."""

    def __init__(self, served: Served, pump: Pump, rules: Rules) -> None:
        self.served, self.pump, self.rules = served, pump, rules
        self.metrics = Metrics(pump)
        pump.heard = self.metrics.heard
        self.draining = False
        self.active = 0
        self.created = int(time.time())

    def refuse_if_ending(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down; ask another", retry=RETRY)

    async def chat(self, request: Request) -> Response:
        fields = await self._fields(request, ChatFields)
        job = await asyncio.to_thread(jobs.chat, self.served, fields)
        reply = ChatReply(*self._about(request, job), logprobs=bool(fields.logprobs), usage_chunk=_usage(fields))
        return await self._answer(request, "chat", reply, bool(fields.stream))

    async def completions(self, request: Request) -> Response:
        fields = await self._fields(request, CompletionFields)
        job = await asyncio.to_thread(jobs.completion, self.served, fields)
        reply = TextReply(
            *self._about(request, job), logprobs=fields.logprobs is not None, echo=bool(fields.echo),
            prompt_only=fields.max_tokens == 0, usage_chunk=_usage(fields),
        )  # fmt: skip
        return await self._answer(request, "completions", reply, bool(fields.stream))

    async def _fields(self, request: Request, kind: type[Any]) -> Any:
        self.refuse_if_ending()
        fields = read(kind, await body_of(request, self.rules.body))
        if fields.model != self.served.name:
            raise ApiError(
                404, f"model: found {fields.model!r}, {self.served.name!r} is served", param="model",
                code="model_not_found",
            )  # fmt: skip
        return fields

    def _about(self, request: Request, job: Job) -> tuple[str, str, Any, Job]:
        return request.state.request_id, self.served.name, self.served.tokenizer, job

    async def _answer(self, request: Request, endpoint: str, reply: Reply, stream: bool) -> Response:
        self.refuse_if_ending()
        news = self._news(endpoint, reply.job, request.state.notes)
        # Runs up to the point where the engine has taken the requests, so that a refusal still has a status.
        await anext(news)
        if stream:
            events = self._events(reply, news)
            return EventStream(await anext(events), events)

        async def whole() -> Response:
            async for batch in news:
                for place, part in batch:
                    reply.take(place, part)
            return Response(dumps(reply.whole()), media_type="application/json")

        async with aclosing(news):
            return await unless_gone(request.receive, whole())

    async def _events(self, reply: Reply, news: AsyncGenerator[list[tuple[int, News]]]) -> AsyncGenerator[bytes]:
        """The stream of a reply. What goes wrong on the way is its last event."""
        async with aclosing(news):
            yield b"".join(map(event, reply.opening()))
            try:
                async for batch in news:
                    for place, part in batch:
                        reply.take(place, part)
                    chunks = [chunk for place in dict(batch) for chunk in reply.chunks(place)]
                    yield b"".join(map(event, chunks)) if chunks or batch else b": waiting\n\n"
            except ApiError as e:
                yield event(e.body)
                return
            yield b"".join(map(event, reply.closing())) + b"data: [DONE]\n\n"

    async def _news(
        self, endpoint: str, job: Job, notes: dict[str, Any]
    ) -> AsyncGenerator[list[tuple[int, News]]]:  # fmt: skip
        """First nothing, once the engine has the job; then what comes, by place; nothing again after long silence."""
        clock, finish = Clock(), "gone"
        ticket = await self.pump.open(job.requests)
        self.active += 1
        self.metrics.begun(job)
        try:
            yield []
            left = set(range(len(job.choices)))
            while left:
                batch = await self._batch(ticket.events, clock.begun + self.rules.seconds)
                told: list[tuple[int, News]] = []
                for place, said in batch:
                    choice = job.choices[place]
                    if choice.done:
                        continue
                    if said.tokens:
                        self._timed(clock)
                    told.append((place, choice.take(said)))
                    if choice.error is not None:
                        raise ApiError(503 if self.pump.failed else 500, choice.error)
                    if choice.done:
                        left.discard(place)
                        if said.finish is None:
                            self.pump.cancel(ticket, place)
                yield told
            finish = "+".join(sorted({str(c.reason) for c in job.choices}))
        except ApiError as e:
            finish = {504: "timeout"}.get(e.status, "error")
            raise
        finally:
            self.active -= 1
            self.pump.close(ticket)
            self.metrics.ended(endpoint, finish, job, clock)
            _note(notes, finish, job, clock)

    def _timed(self, clock: Clock) -> None:
        gap = clock.token()
        if gap is None:
            self.metrics.first.observe(clock.last - clock.begun)
        else:
            self.metrics.gap.observe(gap)

    async def _batch(self, events: asyncio.Queue[Any], deadline: float) -> list[Any]:
        """All that has come, waiting for the first; nothing after a beat of silence. ApiError 504 at the deadline."""
        left = deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(self.rules.beat, left))):
                batch = [await events.get()]
        except TimeoutError:
            if left <= self.rules.beat:
                raise ApiError(504, f"not answered within {self.rules.seconds:g} s, the limit of this server") from None
            return []
        while not events.empty():
            batch.append(events.get_nowait())
        return batch

    async def health(self, deep: bool) -> Response:
        """200 while the engine lives; with `deep`, once it has made a token just now."""
        if self.pump.failed is not None:
            raise ApiError(503, f"the engine has failed: {self.pump.failed}")
        facts: dict[str, Any] = {"status": "ok"}
        if deep:
            begun = time.monotonic()
            await self._one_token()
            facts["token_seconds"] = round(time.monotonic() - begun, 4)
        return Response(dumps(facts), media_type="application/json")

    async def _one_token(self) -> None:
        ticket = await self.pump.open([Asked(prompt=(0,), max_tokens=1)])
        try:
            async with asyncio.timeout(self.rules.deep):
                _, said = await ticket.events.get()
        except TimeoutError:
            raise ApiError(503, f"the engine made no token within {self.rules.deep:g} s") from None
        finally:
            self.pump.close(ticket)
        if said.error is not None:
            raise ApiError(503, f"the engine made no token: {said.error}")

    def ready(self) -> Response:
        self.refuse_if_ending()
        if self.pump.failed is not None:
            raise ApiError(503, f"the engine has failed: {self.pump.failed}")
        return Response(dumps({"status": "ready"}), media_type="application/json")

    def model(self, name: str) -> dict[str, Any]:
        if name != self.served.name:
            raise ApiError(404, f"model: {name!r}, {self.served.name!r} is served", code="model_not_found")
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "kiln",
            "max_model_len": self.served.bounds.context,
        }  # fmt: skip


def _usage(fields: Common) -> bool:
    return bool(fields.stream_options and fields.stream_options.include_usage)


def _note(notes: dict[str, Any], finish: str, job: Job, clock: Clock) -> None:
    """What the line in the log says of a job."""
    notes["finish"], notes["prompt"] = finish, job.prompt_tokens
    notes["cached"] = sum(c.cached for c in job.choices)
    notes["tokens"] = sum(c.tokens for c in job.choices)
    if clock.first is not None:
        notes["first"] = f"{clock.first - clock.begun:.3f}s"
