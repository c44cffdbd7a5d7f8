"""What kiln-run does on every rank once the model is loaded. Rank 0 speaks, the others compute."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from runtime_min.artifact import Artifact
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.generate import PromptError, check_ids, check_length, score
from runtime_min.kernels.check import self_check
from runtime_min.messages import Event
from runtime_min.models.decoder import Decoder
from runtime_min.request import Limits, Request
from runtime_min.sample import Sampling
from runtime_min.text import ChatTemplate, Stream, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request of `kiln-run generate`."""

    prompt: str | None
    messages: Path | None
    ids: tuple[int, ...] | None
    thinking: bool
    tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    source: Path
    output: Path


def generate_task(model: Decoder, artifact: Artifact, wanted: Generation) -> dict[str, Any] | None:
    """Rank 0: ids, text (if there is a tokenizer), finish reason and the prompt's length; None elsewhere."""
    tokenizer = Tokenizer.open(artifact.path) if (artifact.path / "tiktoken.model").exists() else None
    prompt = prompt_ids(wanted, tokenizer, artifact)
    stops = (
        tokenizer.stop_ids if tokenizer is not None else frozenset(i for i in artifact.config.ids.eos if i is not None)
    )
    sampling = Sampling(temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k, seed=wanted.seed)
    request = Request(prompt=tuple(prompt), max_tokens=wanted.tokens, sampling=sampling, stops=stops)
    check_ids(prompt, model.dims.vocab, "prompt")
    check_length(model, len(prompt), wanted.tokens)
    core = Core(model, Limits(running=1, cache_tokens=len(prompt) + wanted.tokens, graphs=1))
    if model.ranks.rank != 0:
        core.follow()
        return None
    stream = Stream(tokenizer) if tokenizer is not None else None
    text: list[str] = []

    def told(piece: str) -> None:
        text.append(piece)
        if wanted.stream:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def listen(_: int, event: Event) -> None:
        for token in event.tokens:
            if token not in stops:
                told(stream.feed(token) if stream is not None else f"{token} ")

    with Engine.over(core) as engine:
        result = engine.generate([request], listen=listen)[0]
    told((stream.flush() if stream is not None else "") + ("\n" if wanted.stream else ""))
    if result.error is not None:
        raise PromptError(f"{result.error}; is the artifact damaged?")
    return {
        "ids": result.ids,
        "text": "".join(text) if stream is not None else None,
        "finish_reason": result.finish,
        "prompt_tokens": len(prompt),
    }


def prompt_ids(wanted: Generation, tokenizer: Tokenizer | None, artifact: Artifact) -> list[int]:
    """Token ids of whatever was given as the prompt."""
    if wanted.ids is not None:
        return list(wanted.ids)
    if tokenizer is None:
        raise PromptError(f"{artifact.path}: has no tiktoken.model, so text cannot be encoded; use --ids")
    if wanted.prompt is not None:
        chat: Any = [{"role": "user", "content": wanted.prompt}]
    else:
        assert wanted.messages is not None
        try:
            chat = json.loads(wanted.messages.read_text())
        except ValueError as e:
            raise PromptError(f"{wanted.messages}: not valid JSON: {e}") from e
    options = {"messages": chat} if isinstance(chat, list) else dict(chat)
    unknown = sorted(set(options) - {"messages", "tools", "thinking", "preserve_thinking"})
    if unknown or not isinstance(options.get("messages"), list):
        raise PromptError(
            f"{wanted.messages}: expected messages, tools, thinking, preserve_thinking; found {sorted(options)}"
        )
    return ChatTemplate.open(artifact.path).encode_chat(
        tokenizer,
        options["messages"],
        options.get("tools"),
        thinking=bool(options.get("thinking", wanted.thinking)),
        preserve_thinking=bool(options.get("preserve_thinking", False)),
    )


def score_task(model: Decoder, artifact: Artifact, wanted: Scoring) -> dict[str, Any] | None:
    """Rank 0 writes the logits of every position and says their shape."""
    try:
        tensors = load_file(wanted.source)
    except Exception as e:
        raise PromptError(f"{wanted.source}: cannot be read as safetensors: {e}") from e
    ids = tensors.get("ids")
    if ids is None or ids.dtype != torch.int64 or ids.ndim != 2 or len(tensors) != 1:
        found = {n: f"{t.dtype} {list(t.shape)}" for n, t in tensors.items()}
        raise PromptError(f"{wanted.source}: found {found}, expected exactly `ids` [B, T] int64")
    logits = score(model, ids)
    if model.ranks.rank != 0:
        return None
    draft = wanted.output.with_name(wanted.output.name + ".part")
    save_file({"logits": logits}, draft)
    draft.rename(wanted.output)
    return {"output": str(wanted.output), "shape": list(logits.shape)}


def doctor_task(model: Decoder, artifact: Artifact, _: None) -> dict[str, Any] | None:
    """Rank 0: what the self-check found; None elsewhere."""
    found, seconds = self_check(model)
    kernels = model.ops.kernels
    launcher = "ref" if kernels is None else type(kernels).__name__.lower()
    rows = [{"op": c.op, "calls": c.calls, "error": c.error, "bound": c.bound} for c in found]
    good = all(c.good for c in found)
    compiled = 0 if kernels is None else kernels.compiled
    facts = {"ok": good, "launcher": launcher, "compiled": compiled, "seconds": seconds, "ops": rows}
    return facts if model.ranks.rank == 0 else None
