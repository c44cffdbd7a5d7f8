"""Chat prompts: the checkpoint's Jinja template, sandboxed, with user text kept apart from the template's own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime_min.text.media import Slot, expanded
from runtime_min.text.messages import ChatError, checked
from runtime_min.text.tokenizer import Piece, Tokenizer
from runtime_min.text.tools import ToolError, declare, ordered
from runtime_min.text.vault import CLOSE, OPEN, Vault

FILE = "chat_template.jinja"
VAULT = "user_text"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatTemplate:
    """A checkpoint's or an artifact's chat template."""

    path: Path
    template: jinja2.Template

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The template in `folder`; ChatError if it is missing, no Jinja, or uses the characters of stand-ins."""
        path = folder / FILE
        try:
            source = path.read_text(encoding="utf-8")
            template = _environment().from_string(source)
        except (OSError, UnicodeDecodeError) as e:
            raise ChatError(f"{path}: cannot be read: {e}; fetch it again from the checkpoint") from e
        except jinja2.TemplateSyntaxError as e:
            raise ChatError(f"{path}: line {e.lineno}: {e.message}; fetch it again from the checkpoint") from e
        if OPEN in source or CLOSE in source:
            raise ChatError(f"{path}: uses {OPEN!a} or {CLOSE!a}, which stand for user text here; use other characters")
        return cls(path=path, template=template)

    def pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[Piece]:
        """The prompt in order: the template's own text, trusted, and all that came with the request, not.

        messages: OpenAI-style, content "", None, text or parts; reasoning in `reasoning_content`. tools: OpenAI-style;
        declared as TypeScript, or as JSON where that cannot be built. An image or video part leaves the template's
        placeholder in trusted text. Raises ChatError for a request of another form or one that the template refuses.
        """
        vault = Vault()
        try:
            known = ordered(_json_objects(tools)) if tools else None
            rendered = self.template.render(
                messages=vault.hide_all(checked(messages)),
                tools=vault.hide_all(known),
                tools_ts_str=vault.hide(_declaration(known)) if known else None,
                thinking=thinking,
                preserve_thinking=preserve_thinking,
                add_generation_prompt=add_generation_prompt,
                **{VAULT: vault},
            )
            return vault.pieces(rendered)
        except ChatError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as e:
            raise ChatError(f"{self.path}: refuses the messages: {vault.reveal(str(e))}") from e

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
        media: Sequence[Slot] | None = None,
    ) -> list[int]:
        """Ids of the prompt; arguments and errors as for `pieces`. Only the template's own text gives special ids.

        media: what the placeholders stand for, in order; each becomes as many pads as it has tokens, and ChatError
        says so if they do not fit. None leaves placeholders as the template writes them.
        """
        pieces = self.pieces(
            messages,
            tools,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
            add_generation_prompt=add_generation_prompt,
        )
        return tokenizer.encode_pieces(pieces if media is None else expanded(pieces, media))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON of `value` as user text. Nothing is escaped for HTML; the options are those of json.dumps."""
    vault = context[VAULT]
    assert isinstance(vault, Vault)
    return vault.serialize(
        value,
        lambda original: json.dumps(
            original, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        ),
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _json_objects(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`tools`, known to be JSON objects; ChatError otherwise."""
    for i, tool in enumerate(tools):
        try:
            if not isinstance(tool, Mapping):
                raise TypeError(f"a {type(tool).__name__}")
            json.dumps(tool, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as e:
            raise ChatError(f"tools[{i}]: found {e}, expected a JSON object") from e
    return list(tools)


def _declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    """The TypeScript of `tools`, or "" where there is none: the template then writes JSON."""
    try:
        return declare(tools)
    except ToolError:
        return ""
