"""The real server over an engine double, and ways to ask it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from runtime_min.request import Bounds, Request
from runtime_min.serve.app import app_of
from runtime_min.serve.jobs import Defaults, Served
from runtime_min.serve.pump import Pump
from runtime_min.serve.server import Rules, Server
from runtime_min.text import ChatTemplate, Piece, Tokenizer
from runtime_min.vision.rule import Rule
from runtime_min.vision.sources import Sources
from tests.scripted import Scripted, listening

# One for all: making one reads the certificates of the system.
WEB = httpx.Client(trust_env=False, timeout=20)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("f", "g")]


@dataclass
class Bench:
    """A running server, its double, and ways to ask it."""

    url: str
    engine: Scripted
    server: Server
    log: list[str]

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: Any) -> Any:
        return WEB.post(f"{self.url}{path}", json={"model": "kimi", **body}, timeout=20)

    def chat(self, **body: Any) -> Any:
        return self.post("/v1/chat/completions", **{"messages": HELLO, **body})

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream; the last must be [DONE]."""
        answer = self.post(path, stream=True, **({"messages": HELLO} if "chat" in path else {}), **body)
        assert answer.status_code == 200, answer.text
        events = [e.removeprefix("data: ") for e in answer.text.split("\n\n") if e and not e.startswith(":")]
        assert events.pop() == "[DONE]"
        return [json.loads(e) for e in events]


@contextmanager
def benched(
    folder: Path,
    said: Any = "</think>Hi.",
    rules: Rules | None = None,
    group: int = 1,
    fetch: Any = None,
    grammars: Any = None,
    **how: Any,
) -> Iterator[Bench]:
    """The real server over a double that says a text, or what `said` makes of the request, `group` ids a step."""
    tokenizer = Tokenizer.open(folder)

    def script(request: Request) -> list[list[int]]:
        text = said(request) if callable(said) else said
        ids = [*tokenizer.encode_pieces([Piece(text, True)]), tokenizer.special("<|im_end|>")]
        return [ids[i : i + group] for i in range(0, len(ids), group)]

    bounds = Bounds(vocab=tokenizer.vocab_size, context=4096, cache_tokens=8192, sees=True)
    engine = Scripted(script=how.pop("script", script), bounds=bounds, **how)
    served = Served(
        name="kimi", tokenizer=tokenizer, template=ChatTemplate.open(folder), bounds=bounds, defaults=Defaults(),
        choices=8, sources=Sources(rule=Rule.open(folder), fetch=fetch), grammars=grammars,
    )  # fmt: skip
    log: list[str] = []
    server = Server(served, Pump(engine), rules or Rules())
    with listening(app_of(server, log.append)) as url:
        yield Bench(url, engine, server, log)
    assert engine.closed
