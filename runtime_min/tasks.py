"""What kiln-run does on every rank once the model is loaded. Rank 0 speaks, the others compute."""

import sys
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from runtime_min.artifact import Artifact
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.kernels.check import self_check
from runtime_min.messages import Event
from runtime_min.models.decoder import Decoder
from runtime_min.pictures import PromptError, media, placed
from runtime_min.prompt import Prompt, conversation, encoded, user_message
from runtime_min.request import Bounds, Limits, Request
from runtime_min.sample import Sampling
from runtime_min.score import score
from runtime_min.speculate.open import opened
from runtime_min.text import Stream, Tokenizer
from runtime_min.vision.encoder import Encoder
from runtime_min.vision.items import Patched

SCORED = {"ids": (torch.int64, 2)}
PICTURED = {"pixels": (torch.float32, 4), "grids": (torch.int64, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request of `kiln-run generate`. drafts: fields of Limits about them."""

    prompt: str | None
    messages: Path | None
    images: tuple[Path, ...] = ()
    videos: tuple[Path, ...] = ()
    media_root: Path | None = None
    ids: tuple[int, ...] | None
    thinking: bool
    tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stream: bool
    drafts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    source: Path
    output: Path


def generate_task(model: Decoder, artifact: Artifact, wanted: Generation) -> dict[str, Any] | None:
    """Rank 0: ids, text (if there is a tokenizer), finish reason and the prompt's length; None elsewhere."""
    tokenizer = Tokenizer.open(artifact.path) if (artifact.path / "tiktoken.model").exists() else None
    prompt = prompt_of(wanted, tokenizer, artifact)
    request = request_of(wanted, prompt, stops_of(tokenizer, artifact))
    context = model.cos.shape[0]
    Bounds(vocab=model.dims.vocab, context=context, cache_tokens=context).check(request)
    encode = Encoder.load(artifact, model.ops, model.ranks, model.settings) if prompt.items else None
    limits = Limits(running=1, cache_tokens=len(prompt.ids) + wanted.tokens, graphs=1, **wanted.drafts)
    draft = None if limits.draft is None else opened(artifact, limits.draft, model)
    core = Core(model, limits, encode, draft=draft)
    if model.ranks.rank != 0:
        core.follow()
        return None
    patch = 0 if encode is None else encode.rule.patch
    request = replace(request, media=media(prompt.ids, artifact.config.ids.media_placeholder, prompt.items, patch))
    stream = Stream(tokenizer) if tokenizer is not None else None
    text: list[str] = []

    def told(piece: str) -> None:
        text.append(piece)
        if wanted.stream:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def listen(_: int, event: Event) -> None:
        for token in event.tokens:
            if token not in request.stops:
                told(stream.feed(token) if stream is not None else f"{token} ")

    with Engine.over(core) as engine:
        result, drafts = engine.generate([request], listen=listen)[0], engine.stats.drafts
    told(stream.flush() if stream is not None else "")
    if wanted.stream:
        sys.stdout.write("\n")
    if result.error is not None:
        raise PromptError(f"{result.error}; is the artifact damaged?")
    return {
        "ids": result.ids,
        "text": "".join(text) if stream is not None else None,
        "finish_reason": result.finish,
        "prompt_tokens": len(prompt.ids),
        "drafts": None if drafts is None else drafts.facts(),
    }


def stops_of(tokenizer: Tokenizer | None, artifact: Artifact) -> frozenset[int]:
    """Ids that end an answer."""
    if tokenizer is not None:
        return tokenizer.stop_ids
    return frozenset(i for i in artifact.config.ids.eos if i is not None)


def request_of(wanted: Generation, prompt: Prompt, stops: frozenset[int]) -> Request:
    """The request without its pictures."""
    sampling = Sampling(temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k, seed=wanted.seed)
    return Request(prompt=tuple(prompt.ids), max_tokens=wanted.tokens, sampling=sampling, stops=stops)


def prompt_of(wanted: Generation, tokenizer: Tokenizer | None, artifact: Artifact) -> Prompt:
    """Whatever was given as the prompt."""
    if wanted.ids is not None:
        return Prompt(list(wanted.ids))
    if tokenizer is None:
        raise PromptError(f"{artifact.path}: has no tiktoken.model, so text cannot be encoded; use --ids")
    if wanted.prompt is not None:
        request = {"messages": [user_message(wanted.prompt, wanted.images, wanted.videos)]}
        # Files that the command line itself names may lie anywhere.
        return encoded(artifact, tokenizer, request, Path("/"), wanted.thinking)
    assert wanted.messages is not None
    return encoded(artifact, tokenizer, conversation(wanted.messages), wanted.media_root, wanted.thinking)


def score_task(model: Decoder, artifact: Artifact, wanted: Scoring) -> dict[str, Any] | None:
    """Rank 0 writes the logits of every position and says their shape."""
    try:
        tensors = load_file(wanted.source)
    except Exception as e:
        raise PromptError(f"{wanted.source}: cannot be read as safetensors: {e}") from e
    form = {n: (t.dtype, t.ndim) for n, t in tensors.items()}
    if form not in (SCORED, SCORED | PICTURED):
        found = {n: f"{t.dtype} {list(t.shape)}" for n, t in tensors.items()}
        raise PromptError(
            f"{wanted.source}: found {found}, expected exactly `ids` [B, T] int64, or with them `pixels` "
            "[P, 3, p, p] float32 and `grids` [N, 3] int64"
        )
    ids, features = tensors["ids"], None
    if "grids" in tensors:
        if tensors["grids"].shape[1] != 3:
            raise PromptError(f"{wanted.source}: grids: found {list(tensors['grids'].shape)}, expected [N, 3]")
        encoder = Encoder.load(artifact, model.ops, model.ranks, model.settings)
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grids"].tolist()]
        encoder.tower.check(tensors["pixels"], grids)
        parts = tensors["pixels"].split([prod(g) for g in grids])  # type: ignore[no-untyped-call]
        features = encoder([Patched(g, p) for g, p in zip(grids, parts, strict=True)])
    pictures = placed(ids.flatten().tolist(), artifact.config.ids.media_placeholder, features)
    logits = score(model, ids, pictures=pictures)
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
