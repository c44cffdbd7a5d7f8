"""What a model is worth here: bits per byte of text, and greedy answers to questions and about pictures."""

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from runtime_min.artifact import Artifact
from runtime_min.engine import Engine, Result
from runtime_min.models.decoder import Decoder
from runtime_min.pictures import media
from runtime_min.prompt import encoded
from runtime_min.request import Request
from runtime_min.sample import Sampling
from runtime_min.score import score
from runtime_min.text import Tokenizer

WINDOW = 1024


def bits_per_byte(model: Decoder, tokenizer: Tokenizer, texts: Iterable[str], window: int = WINDOW) -> float:
    """Of the texts, each from its beginning in windows of `window` tokens that begin with [EOS]."""
    end, bits, size = tokenizer.special("[EOS]"), 0.0, 0
    for text in texts:
        ids = tokenizer.encode_ordinary(text)
        size += len(text.encode())
        for i in range(0, len(ids), window):
            part = torch.tensor([[end, *ids[i : i + window]]])
            chances = score(model, part[:, :-1])[0].double().log_softmax(-1)
            bits -= float(chances.gather(1, part[0, 1:, None]).sum()) / math.log(2)
    return bits / size


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """says: without special tokens. ends: by itself. gap: the smallest lead of a token over the next likeliest."""

    ids: list[int]
    says: str
    ends: bool
    gap: float


def question(artifact: Artifact, tokenizer: Tokenizer, text: str, png: bytes | None = None, most: int = 64) -> Request:
    """A user's one message in instant mode, with a picture before it if there is one; greedy."""
    content: str | list[dict[str, object]] = text
    if png is not None:
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    chat = {"messages": [{"role": "user", "content": content}], "thinking": False}
    prompt = encoded(artifact, tokenizer, chat, None)
    patch = artifact.config.vision.patch if artifact.config.vision else 0
    seen = media(prompt.ids, artifact.config.ids.media_placeholder, prompt.items, patch)
    sampling = Sampling(temperature=0, logprobs=2)
    return Request(prompt=tuple(prompt.ids), max_tokens=most, sampling=sampling, stops=tokenizer.stop_ids, media=seen)


def answers(engine: Engine, tokenizer: Tokenizer, requests: Sequence[Request]) -> list[Answer]:
    """What the engine says to each."""
    return [_answer(tokenizer, result) for result in engine.generate(requests)]


def _answer(tokenizer: Tokenizer, result: Result) -> Answer:
    gaps = [p.top[0][1] - p.top[1][1] for p in result.logprobs]
    return Answer(
        ids=result.ids,
        says=tokenizer.decode(result.ids, skip_special=True),
        ends=result.finish == "stop",
        gap=min(gaps),
    )
