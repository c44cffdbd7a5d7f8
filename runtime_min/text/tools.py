"""Tool declarations: OpenAI-style function schemas as the TypeScript text that the model was trained on."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specs.errors import InputError

INDENT = "  "
DEFINITIONS = "#/$defs/"
ROOT = "parameters"
CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
CHECKED: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


class ToolError(InputError):
    """A tool whose schema has no TypeScript form."""


def ordered(value: Any) -> Any:
    """JSON `value` with the keys of every object sorted, as the release's tokenizer hands tools to the template."""
    if isinstance(value, Mapping):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(v) for v in value] if isinstance(value, list | tuple) else value


def declare(tools: Sequence[Mapping[str, Any]]) -> str:
    """The declaration of the entries of type "function", "" if there are none.

    Raises ToolError for a schema that the format cannot say: a reference to nowhere, a type-less schema, an enum at
    odds with its type; the caller then declares the tools as JSON. Source: the tool text of K2.5 and K2.6 prompts.
    """
    entries = [_mapping(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    called = [(f"tools[{i}].function", t.get("function")) for i, t in enumerate(entries) if t.get("type") == "function"]
    blocks = [_Function(where).block(ordered(_mapping(f, where))) for where, f in called if f]
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *blocks, "}", ""]) if blocks else ""


class _Function:
    """One function's block. Holds the $defs seen so far and whether the schema refers to itself as a whole."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def block(self, function: Mapping[str, Any]) -> str:
        """Interfaces, description and type of `function`, whose keys are sorted."""
        parameters = _mapping(function.get("parameters") or {}, f"{self.where}.parameters")
        fields, rest = self._members(parameters, INDENT)
        argument = _braces([*_required_first(fields, parameters), *rest], "")
        interfaces: list[str] = []
        if self.refers_to_root:
            argument = ROOT
            interfaces.append(f"interface {ROOT} {_braces(list(fields.values()), '')}")
        for name, schema in list(self.definitions.items()):
            body = self._type(schema, "")
            comment = _comment(_mapping(schema, f"{self.where}.$defs.{name}").get("description"), "")
            interfaces.append(f"{comment}interface {name} {body}")
        head = _comment(function.get("description"), "")
        return "\n".join([*interfaces, f"{head}type {function.get('name', 'function')} = (_: {argument}) => any;"])

    def _members(self, schema: Mapping[str, Any], indent: str) -> tuple[dict[str, str], list[str]]:
        """The properties of an object by name, and the line for further ones, each at `indent`."""
        self.definitions |= _mapping(schema.get("$defs") or {}, f"{self.where}.$defs")
        further = schema.get("additionalProperties")
        rest: list[str] = []
        if further is not None:
            kind = "never" if further is False else self._type(further, indent)
            rest = [f"{indent}[k: string]: {kind}"]
        properties = _mapping(schema.get("properties", {}), f"{self.where}.properties")
        required = schema.get("required", [])
        if not isinstance(required, list):
            raise ToolError(f"{self.where}.required: found {required!r}, expected a list of names")
        fields: dict[str, str] = {}
        for name, property_ in properties.items():
            body = self._type(property_, indent)
            mark = "" if name in required else "?"
            default = property_.get("default") if isinstance(property_, dict) else None
            fields[name] = f"{self._comments(property_, indent, default)}{indent}{name}{mark}: {body}"
        return fields, rest

    def _type(self, schema: object, indent: str) -> str:
        """`schema` as a type whose further lines stand at `indent`."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not isinstance(schema, dict):
            raise ToolError(f"{self.where}: found the schema {schema!r}, expected an object")
        kind = schema.get("type")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(option, indent) for option in _list(schema["anyOf"], f"{self.where}.anyOf"))
        if "enum" in schema:
            return self._enum(schema)
        if isinstance(kind, list):
            if any(not isinstance(k, str) or k not in UNION for k in kind):
                raise ToolError(f"{self.where}.type: found {kind!r}, expected names out of {', '.join(UNION)}")
            return " | ".join(UNION[k] for k in kind)
        if kind == "object":
            fields, rest = self._members(schema, indent + INDENT)
            return _braces([*_required_first(fields, schema), *rest], indent)
        if kind == "array":
            return self._array(schema.get("items"), indent)
        if isinstance(kind, str):
            return "number" if kind == "integer" else kind
        if not schema:
            return "any"
        raise ToolError(f"{self.where}: found a schema without a type: {schema!r}; give it a type, an enum or anyOf")

    def _reference(self, target: object) -> str:
        if target == "#":
            self.refers_to_root = True
            return ROOT
        if isinstance(target, str) and target.startswith(DEFINITIONS):
            name = target.rpartition("/")[2]
            if isinstance(self.definitions.get(name), dict):
                return name
        raise ToolError(f"{self.where}: $ref {target!r} leads to no schema, expected # or {DEFINITIONS}NAME")

    def _enum(self, schema: Mapping[str, Any]) -> str:
        values = _list(schema["enum"], f"{self.where}.enum")
        kinds = schema.get("type")
        if isinstance(kinds, list):
            plain = [k for k in kinds if k != "null"] if len(kinds) == 2 else kinds
            if len(plain) != 1:
                raise ToolError(f"{self.where}.enum: its type {kinds!r} is neither one type nor one type or null")
            kinds = plain[0]
        allowed = CHECKED.get(kinds) if isinstance(kinds, str) else None
        if allowed and any(v is not None and not isinstance(v, allowed) for v in values):
            raise ToolError(f"{self.where}.enum: {values!r} holds a value that is no {kinds}")
        return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values)

    def _array(self, items: object, indent: str) -> str:
        if not items:
            return "Array<any>"
        comments = self._comments(items, indent + INDENT)
        if not comments:
            return f"Array<{self._type(items, indent)}>"
        return f"Array<\n{comments}{indent}{INDENT}{self._type(items, indent + INDENT)}\n{indent}>"

    def _comments(self, schema: object, indent: str, default: object = None) -> str:
        """Description, constraints and default as lines at `indent`, "" if there are none."""
        if not isinstance(schema, dict):
            return ""
        lines = _comment(schema.get("description"), indent)
        kind = schema.get("type")
        if isinstance(kind, str) and not schema.keys() & {"$ref", "anyOf", "enum"}:
            limits = [f"{key}: {schema[key]}" for key in CONSTRAINTS.get(kind, ()) if key in schema]
            lines += f"{indent}// {', '.join(limits)}\n" if limits else ""
        if default is not None:
            # Numbers and truth values are written as the release writes them, which is not JSON for True and False.
            shown = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            lines += f"{indent}// Default: {shown}\n"
        return lines


def _required_first(fields: Mapping[str, str], schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required", [])
    return [fields[name] for name in sorted(fields, key=lambda name: (name not in required, name))]


def _braces(members: Sequence[str], indent: str) -> str:
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else "{}"


def _comment(description: object, indent: str) -> str:
    if not description:
        return ""
    if not isinstance(description, str):
        raise ToolError(f"description: found {description!r}, expected text")
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in description.split("\n"))


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ToolError(f"{where}: found {value!r}, expected an object")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ToolError(f"{where}: found {value!r}, expected a list")
    return value
