"""What kiln-run does on every rank once the model is loaded. Rank 0 speaks, the others compute."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime_min.artifact import Artifact
from runtime_min.generate import check_ids, check_length, generate, score
from runtime_min.kernels.check import self_check
from runtime_min.models.decoder import Decoder
from runtime_min.pictures import PromptError, placed
from runtime_min.prompt import Prompt, conversation, encoded, user_message
from runtime_min.sample import Sampling
from runtime_min.text import Stream, Tokenizer
from runtime_min.vision.encoder import Encoder
from runtime_min.vision.items import Item

SCORED = {"ids": (torch.int64, 2)}
PICTURED = {"pixels": (torch.float32, 4), "grids": (torch.int64, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request of `kiln-run generate`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    source: Path
    output: Path


def generate_task(model: Decoder, artifact: Artifact, wanted: Generation) -> dict[str, Any] | None:
    """Rank 0: ids, text (if there is a tokenizer), finish reason and the prompt's length; None elsewhere."""
    tokenizer = Tokenizer.open(artifact.path) if (artifact.path / "tiktoken.model").exists() else None
    prompt = prompt_of(wanted, tokenizer, artifact)
    check_ids(prompt.ids, model.dims.vocab, "prompt")
    check_length(model, len(prompt.ids), wanted.tokens)
    features = features_of(model, artifact, prompt.items)
    pictures = placed(prompt.ids, artifact.config.ids.media_placeholder, features)
    stops = (
        tokenizer.stop_ids if tokenizer is not None else frozenset(i for i in artifact.config.ids.eos if i is not None)
    )
    sampling = Sampling(temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k)
    speaks = model.ranks.rank == 0
    stream = Stream(tokenizer) if tokenizer is not None else None
    ids: list[int] = []
    text = ""
    how: dict[str, Any] = {"tokens": wanted.tokens, "sampling": sampling, "seed": wanted.seed, "stops": stops}
    for token in generate(model, prompt.ids, pictures=pictures, **how):
        ids.append(token)
        piece = "" if token in stops else (stream.feed(token) if stream is not None else f"{token} ")
        text += piece
        if speaks and wanted.stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    rest = stream.flush() if stream is not None else ""
    if speaks and wanted.stream:
        sys.stdout.write(rest + "\n")
        sys.stdout.flush()
    finish = "stop" if ids and ids[-1] in stops else "length"
    facts = {
        "ids": ids,
        "text": text + rest if stream is not None else None,
        "finish_reason": finish,
        "prompt_tokens": len(prompt.ids),
    }
    return facts if speaks else None


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


def features_of(model: Decoder, artifact: Artifact, items: Sequence[Item]) -> Tensor | None:
    """Embeddings of the prompt's pictures, if it has any; the vision part is read only then."""
    if not items:
        return None
    return Encoder.load(artifact, model.ops, model.ranks, model.settings).items(items)


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
        features = encoder.pixels(tensors["pixels"], grids)
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
