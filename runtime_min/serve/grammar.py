"""What an answer may be, as a grammar over tokens: calls that must be made, JSON of a schema. Needs xgrammar.

Markers are single tokens here, as they are for the parser: no other spelling of them is a marker. Text in JSON holds no
control token.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import xgrammar
from xgrammar.structural_tag import (
    AnyTokensFormat,
    ConstStringFormat,
    JSONSchemaFormat,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    RegexFormat,
    SequenceFormat,
    StructuralTag,
    TokenFormat,
)

from runtime_min.grammar import vocabulary
from runtime_min.serve.errors import ApiError
from runtime_min.serve.fields import ChatFields, Function, NamedTool
from runtime_min.text import Tokenizer
from runtime_min.text.parser import ARGUMENTS, CALL, CALL_END, SECTION, SECTION_END, THOUGHT

# Blanks in a row between the parts of JSON; without a limit a model can go on with them for ever.
BLANKS = 2
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Grammars:
    """Compiles the grammars of requests, in whichever thread asks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiler = xgrammar.GrammarCompiler(vocabulary(tokenizer), max_threads=1, cache_limit_bytes=256 << 20)
        self._free = AnyTokensFormat(exclude_tokens=sorted(tokenizer.vocabulary.specials.values()))
        self._lock = threading.Lock()

    def of(self, fields: ChatFields, inside: bool) -> str | None:
        """The compiled grammar of a request's answer as JSON, None if nothing limits it. inside: the answer begins in
        the reasoning. ApiError 400 for a schema that no grammar can be made of."""
        answer = self._answer(fields)
        if answer is None:
            return None
        whole = SequenceFormat(elements=[self._free, self._token(THOUGHT), answer]) if inside else answer
        try:
            with self._lock:
                compiled = self._compiler.compile_structural_tag(StructuralTag(format=whole))
            return str(compiled.serialize_json())
        except (RuntimeError, ValueError, TypeError) as e:
            name = "tools" if fields.tools else "response_format"
            raise ApiError(400, f"{name}: no grammar can be made of this schema: {e}", param=name) from e

    def _answer(self, fields: ChatFields) -> Any:
        """The answer after the reasoning, or None if it is free."""
        functions = [t.function for t in fields.tools or ()]
        choice, parallel = fields.tool_choice, fields.parallel_tool_calls is not False
        if isinstance(choice, NamedTool):
            return self._section([f for f in functions if f.name == choice.function.name], parallel=False)
        if choice == "required":
            return self._section(functions, parallel)
        offered = functions if choice != "none" else []
        calls = self._section(offered, parallel) if offered else None
        said = None if fields.response_format is None else _schema_of(fields.response_format.model_dump(by_alias=True))
        if said is not None:
            content = _json(said)
            return content if calls is None else OrFormat(elements=[content, calls])
        if calls is not None and (not parallel or any(f.strict for f in offered)):
            return SequenceFormat(elements=[self._free, OptionalFormat(content=calls)])
        return None

    def _section(self, functions: Sequence[Function], parallel: bool) -> Any:
        calls = OrFormat(elements=[self._call(f) for f in functions])
        inner = PlusFormat(content=calls) if parallel else calls
        return SequenceFormat(elements=[self._token(SECTION), inner, self._token(SECTION_END)])

    def _call(self, function: Function) -> Any:
        schema = ANY_OBJECT if function.strict is False else function.parameters or ANY_OBJECT
        return SequenceFormat(
            elements=[
                self._token(CALL),
                ConstStringFormat(value=f"functions.{function.name}:"),
                RegexFormat(pattern=r"\d{1,4}"),
                self._token(ARGUMENTS),
                _json(schema),
                self._token(CALL_END),
            ]
        )

    def _token(self, name: str) -> TokenFormat:
        return TokenFormat(token=self.tokenizer.special(name))


def _json(schema: Mapping[str, Any]) -> JSONSchemaFormat:
    return JSONSchemaFormat(json_schema=dict(schema), max_whitespace_cnt=BLANKS)


def _schema_of(wanted: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a response_format; None for text."""
    if wanted["type"] == "json_schema":
        return wanted["json_schema"]["schema"] or ANY_OBJECT
    return ANY_OBJECT if wanted["type"] == "json_object" else None
