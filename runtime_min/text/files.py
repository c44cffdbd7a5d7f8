"""The tokenizer's files, read without remote code and held against each other and against config.json."""

import binascii
import json
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.config import read_config
from specs.dims import ModelConfig
from specs.errors import InputError

RANKS, TABLE, CONFIG, GENERATION = "tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json"
EOS, TURN_END, MEDIA_PAD = "[EOS]", "<|im_end|>", "<|media_pad|>"
# What the template writes and the parser looks for: each must be one id.
NEEDED = (
    EOS,
    TURN_END,
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
)
NEEDED_FOR_MEDIA = ("<|media_begin|>", "<|media_content|>", MEDIA_PAD, "<|media_end|>")


class TokenizerError(InputError):
    """Tokenizer files that are damaged or contradict each other, or a token that they do not have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Vocabulary:
    """What the files say.

    tokens: bytes by id. ranks: ordinary tokens, byte strings to ids. specials: names to ids. hidden: ids flagged as
    special, which a reader of the text need not see. stop_ids: ids that end a generation.
    """

    tokens: tuple[bytes, ...]
    ranks: dict[bytes, int]
    specials: Mapping[str, int]
    hidden: frozenset[int]
    stop_ids: frozenset[int]


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a checkpoint or artifact. Raises TokenizerError with all problems, ConfigError for config.json.

    An id among the special ones that tokenizer_config.json leaves out is a reserved token, named by its id as the
    release names it. Source: the special ids of the released tokenizer.
    """
    config = read_config(_object(folder / CONFIG))
    table = _object(folder / TABLE)
    tokens = _ranks(folder / RANKS)
    first, vocab = len(tokens), config.text.vocab
    added, problems = _added(table.get("added_tokens_decoder"), first, vocab)
    stops, more = _stops(folder / GENERATION, config)
    listed = {name: i for i, (name, _) in added.items()}
    problems += [*more, *_disagreements(table, listed, config, stops)]
    if added and (min(added), max(added)) != (first, vocab - 1):
        problems.append(
            f"{TABLE}: names ids {min(added)}..{max(added)}, expected {first}..{vocab - 1}: {RANKS} holds {first} "
            f"ranks and {CONFIG} has vocab_size {vocab}; one of the three is not of this checkpoint, or cut short"
        )
    if problems:
        raise TokenizerError([f"{folder}: {p}" for p in problems])
    names = [added[i][0] if i in added else f"<|reserved_token_{i}|>" for i in range(first, vocab)]
    if len(set(names)) < len(names):
        raise TokenizerError(f"{folder / TABLE}: names a token like a reserved one; fetch the file again")
    return Vocabulary(
        tokens=(*tokens, *(name.encode() for name in names)),
        ranks={token: i for i, token in enumerate(tokens)},
        specials={name: i for i, name in enumerate(names, start=first)},
        hidden=frozenset(i for i in range(first, vocab) if i not in added or added[i][1]),
        stop_ids=frozenset({*stops, listed[EOS], listed[TURN_END]}),
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise TokenizerError(f"{path}: cannot be read: {e}; fetch it again from the checkpoint") from e
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found a {type(value).__name__}, expected an object")
    return value


def _ranks(path: Path) -> list[bytes]:
    """Ordinary tokens by rank, from one `base64 rank` pair a line; TokenizerError names the first bad line."""
    tokens: dict[int, bytes] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise TokenizerError(f"{path}: cannot be read: {e}; fetch it again from the checkpoint") from e
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token, at = b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error) as e:
            shown = line[:40].decode("ascii", "replace")
            raise TokenizerError(
                f"{path}: line {number}: found {shown!r}, expected `base64 rank`; fetch it again"
            ) from e
        if not token or at in tokens:
            raise TokenizerError(f"{path}: line {number}: found an empty token or rank {at} again; fetch it again")
        tokens[at] = token
    missing = next((i for i in range(len(tokens)) if i not in tokens), None)
    if missing is not None:
        raise TokenizerError(f"{path}: has no rank {missing}, expected every rank 0..{len(tokens) - 1}; fetch it again")
    known = set(tokens.values())
    if len(known) < len(tokens) or any(bytes([b]) not in known for b in range(256)):
        raise TokenizerError(f"{path}: repeats a token or lacks one of the 256 single bytes; fetch it again")
    return [tokens[i] for i in range(len(tokens))]


def _added(found: object, first: int, vocab: int) -> tuple[dict[int, tuple[str, bool]], list[str]]:
    """(name, flagged as special) by id, and what is wrong with them: ids must be in first..vocab-1, names unique."""
    where = f"{TABLE}: added_tokens_decoder"
    if not isinstance(found, dict):
        return {}, [f"{where}: found {type(found).__name__}, expected an object of tokens by id"]
    added: dict[int, tuple[str, bool]] = {}
    problems: list[str] = []
    names: dict[str, str] = {}
    for key, entry in found.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        flag = entry.get("special") if isinstance(entry, dict) else None
        if not key.isdecimal() or not isinstance(name, str) or not name or not isinstance(flag, bool):
            problems.append(f"{where}.{key}: found {entry!r}, expected an id with content and special")
        elif not first <= int(key) < vocab:
            problems.append(
                f"{where}.{key}: {name!r} is outside {first}..{vocab - 1}, which is what the {first} ranks of {RANKS} "
                f"and {CONFIG}'s vocab_size {vocab} leave"
            )
        elif name in names:
            problems.append(f"{where}.{key}: {name!r} already has id {names[name]}")
        else:
            added[int(key)], names[name] = (name, flag), key
    return added, problems


def _stops(path: Path, config: ModelConfig) -> tuple[set[int], list[str]]:
    """The ids that config.json and generation_config.json (which may be absent) call eos."""
    stated: object = _object(path).get("eos_token_id", []) if path.exists() else []
    also = stated if isinstance(stated, list) else [stated]
    bad = [f"{GENERATION}: eos_token_id: found {i!r}, expected an id" for i in also if type(i) is not int]
    return {*config.ids.eos, *(i for i in also if type(i) is int)}, bad


def _disagreements(
    table: Mapping[str, Any], listed: Mapping[str, int], config: ModelConfig, stops: set[int]
) -> Iterator[str]:
    """What the files say differently about the same token, one line each."""
    ids = config.ids
    needed = NEEDED if ids.media_placeholder is None else (*NEEDED, *NEEDED_FOR_MEDIA)
    for missing in (n for n in needed if n not in listed):
        yield f"{TABLE}: added_tokens_decoder has no {missing}, expected one id for it"
    for stop in sorted(stops, key=str):
        if stop not in listed.values():
            yield f"{CONFIG} or {GENERATION}: eos_token_id {stop} is no token of {TABLE}"
    # The eos_token of the table may be another stop than config.json's, so it only has to exist.
    for key, stated in (("bos_token", ids.bos), ("pad_token", ids.pad), ("eos_token", None)):
        value = table.get(key)
        name = value.get("content") if isinstance(value, dict) else value
        if name is None:
            continue
        if not isinstance(name, str) or name not in listed:
            yield f"{TABLE}: {key} {name!r} is not in added_tokens_decoder"
        elif stated is not None and listed[name] != stated:
            yield f"{CONFIG}: {key}_id: found {stated}, expected {listed[name]}, the id of {name} in {TABLE}"
    pad = listed.get(MEDIA_PAD)
    if ids.media_placeholder is not None and pad is not None and pad != ids.media_placeholder:
        yield (
            f"{CONFIG}: media_placeholder_token_id: found {ids.media_placeholder}, expected {pad}, "
            f"the id of {MEDIA_PAD} in {TABLE}"
        )
