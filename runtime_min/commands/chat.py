"""kiln-run chat: a conversation in the terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from runtime_min.artifact import Artifact
from runtime_min.commands.options import limit_options, run_options
from runtime_min.engine import Engine
from runtime_min.launch import Run
from runtime_min.messages import Event
from runtime_min.pictures import media
from runtime_min.prompt import Prompt, encoded, user_message
from runtime_min.request import Limits, Media, Request
from runtime_min.sample import Sampling
from runtime_min.speculate.figures import Acceptance
from runtime_min.text import Tokenizer
from runtime_min.text.parser import Parser, Part, Text, begins_inside_reasoning
from runtime_min.vision.rule import Rule
from specs.errors import InputError

DIM, PLAIN = "\033[2m", "\033[0m"
HELP = """\
/image FILE   a picture for the next message; may be repeated
/thinking     think before answering, or no longer
/new          forget the conversation
/exit         end (or Ctrl-D); Ctrl-C stops an answer
"""


@dataclass(slots=True)
class Chat:
    """A conversation with an engine. tokens: of an answer at most, None for as many as fit; say: writes text as it
    comes; color: dim what is thought."""

    artifact: Artifact
    engine: Engine
    tokenizer: Tokenizer
    sampling: Sampling
    tokens: int | None
    say: Callable[[str], None]
    color: bool
    thinking: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)

    def line(self, said: str) -> bool:
        """Obeys one line of input; False to end. What is wrong with it is said, and the conversation goes on."""
        command, _, rest = said.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/image" and rest:
            self.images.append(Path(rest.strip()).expanduser())
        elif command == "/thinking":
            self.thinking = not self.thinking
            self.say(f"thinking {'on' if self.thinking else 'off'}\n")
        elif command == "/new":
            self.messages.clear()
            self.images.clear()
        elif command.startswith("/"):
            self.say(HELP)
        elif said.strip():
            self._turn(said)
        return True

    def _turn(self, said: str) -> None:
        message, self.images = user_message(said, self.images, []), []
        asked = {"messages": [*self.messages, message], "thinking": self.thinking}
        try:
            prompt = encoded(self.artifact, self.tokenizer, asked, Path("/"))
            answer = self._answer(prompt)
        except InputError as e:
            self.say("".join(f"error: {line}\n" for line in e.lines()))
            return
        self.messages += [message, answer]

    def _answer(self, prompt: Prompt) -> dict[str, Any]:
        """The answer to a prompt, shown as it comes."""
        stops = self.tokenizer.stop_ids
        parser = Parser(self.tokenizer, reasoning=begins_inside_reasoning(self.tokenizer, prompt.ids))
        begun = time.monotonic()
        told = Told(self.say, self.color)
        count, first = 0, begun
        drafts = Acceptance()
        for event in self._events(self._request(prompt)):
            if event.tokens and not count:
                first = time.monotonic()
            count += len(event.tokens)
            drafts = drafts.plus(event.drafted, event.accepted) if event.drafted else drafts
            for token in event.tokens:
                told.show(parser.feed(token) if token not in stops else [])
            if event.finish is not None:
                told.show(parser.finish(cut=event.finish != "stop"))
        last = time.monotonic()
        speed = f"{(count - 1) / (last - first):.1f} tokens a second" if count > 1 and last > first else ""
        length = f"accept length {drafts.length:.2f}" if drafts.drafts else ""
        told.close(", ".join(filter(None, (f"{count} tokens", speed, f"first after {first - begun:.2f} s", length))))
        return told.message

    def _request(self, prompt: Prompt) -> Request:
        bounds = self.engine.bounds
        room = max(1, min(bounds.context, bounds.cache_tokens) - len(prompt.ids))
        seen: tuple[Media, ...] = ()
        if prompt.items:
            pad, patch = self.artifact.config.ids.media_placeholder, Rule.open(self.artifact.path).patch
            seen = media(prompt.ids, pad, prompt.items, patch)
        return Request(
            prompt=tuple(prompt.ids), max_tokens=room if self.tokens is None else min(room, self.tokens),
            sampling=self.sampling, stops=self.tokenizer.stop_ids, media=seen,
        )  # fmt: skip

    def _events(self, request: Request) -> Iterator[Event]:
        """The request's events; Ctrl-C ends the answer, not the conversation."""
        id, stopped = self.engine.submit(request), False
        while True:
            try:
                events = [e for e in self.engine.step(wait=0.1) if e.id == id]
            except KeyboardInterrupt:
                if stopped:
                    raise
                stopped, events = True, []
                self.engine.cancel(id)
            for event in events:
                yield event
                if event.error is not None:
                    raise InputError(event.error)
                if event.finish is not None:
                    return


class Told:
    """An answer on the screen, and as the message of the history."""

    def __init__(self, say: Callable[[str], None], color: bool) -> None:
        self.say, self.color = say, color
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._dim = False

    def show(self, parts: list[Part]) -> None:
        for part in parts:
            # No tools are offered here, so an answer is all text.
            assert isinstance(part, Text)
            key = "reasoning_content" if part.channel == "reasoning" else "content"
            self.message[key] = self.message.get(key, "") + part.text
            self._write(part.text, dim=part.channel == "reasoning")

    def _write(self, text: str, dim: bool) -> None:
        if dim != self._dim:
            # Without color a line of its own keeps the two apart.
            mark = (DIM if dim else PLAIN) if self.color else ""
            self.say(mark + ("" if dim else "\n\n"))
            self._dim = dim
        self.say(text)

    def close(self, line: str) -> None:
        self._write("", dim=False)
        self.say(f"\n{DIM if self.color else ''}[{line}]{PLAIN if self.color else ''}\n")


def to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@run_options
@limit_options
@click.option("--instant", is_flag=True, help="Answer without thinking first.")
@click.option("--max-tokens", type=click.IntRange(1), default=None, help="Of an answer.  [default: what fits]")
@click.option("--temperature", type=click.FloatRange(0), default=1.0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95)
@click.option("--seed", type=int, default=None, help="[default: another each time]")
def chat(
    artifact: Path, run: Run, limits: Limits, instant: bool,
    max_tokens: int | None, temperature: float, top_p: float, seed: int | None,
) -> None:  # fmt: skip
    """Chat with ARTIFACT in the terminal: history, pictures by path, what is thought dimmed; /help in it tells more."""
    with suppress(ImportError):
        # Lines can be edited and called back where there is readline.
        import readline  # noqa: F401
    opened = Artifact.open(artifact, verify=False)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    tokenizer = Tokenizer.open(artifact)
    with Engine(artifact, limits, **run.how) as engine:
        talk = Chat(
            artifact=opened, engine=engine, tokenizer=tokenizer, sampling=sampling, tokens=max_tokens, say=to_stdout,
            color=sys.stdout.isatty(), thinking=not instant,
        )  # fmt: skip
        going = True
        while going:
            try:
                going = talk.line(input("> "))
            except EOFError:
                going = False
            except KeyboardInterrupt:
                to_stdout("\n")
