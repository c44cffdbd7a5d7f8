"""The fields of requests. What is not here is refused by name; a Literal is the one value that changes nothing.

Fields of bookkeeping (user, metadata and the like) are taken and have no effect on the answer.
"""

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from runtime_min.serve.errors import ApiError

TOP = 20
NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Listed = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Stop = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16), Listed]


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class Common(Fields):
    """What both endpoints take. Defaults of sampling are the server's."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 30)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=4096)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Bookkeeping.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Neutral.
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: goes with stream: true only")
        return self


class ImageUrl(Fields):
    url: str
    detail: Literal["auto"] | None = None


class Part(Fields):
    """A part of a message's content."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Annotated[ImageUrl, BeforeValidator(lambda v: {"url": v} if isinstance(v, str) else v)] | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> Self:
        if (self.text is None) == (self.type == "text") or (self.image_url is None) == (self.type == "image_url"):
            raise ValueError(f"a part of type {self.type} has exactly the field {self.type}")
        return self


class CalledFunction(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Fields):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Fields):
    name: str
    description: str | None = None
    # `schema` is a method of pydantic's models.
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema goes with type json_schema, and must be there then")
        return self


class TemplateKwargs(Fields):
    thinking: bool | None = None
    preserve_thinking: bool | None = None


class ChatFields(Common):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    tools: list[Tool] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP)
    # Neutral.
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    reasoning_effort: None = None
    audio: None = None
    prediction: None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        names = [t.function.name for t in self.tools or ()]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"tools: {', '.join(twice)} more than once")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: {self.tool_choice.function.name!r} is none of the tools {names}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required, but there are no tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: goes with logprobs: true only")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError(f"max_tokens: {self.max_tokens}, but max_completion_tokens {self.max_completion_tokens}")
        return self


class CompletionFields(Common):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP)
    suffix: None = None


AnyFields = TypeVar("AnyFields", bound=Common)


def read(kind: type[AnyFields], body: bytes) -> AnyFields:
    """The fields of a request's body; ApiError 400 that names every field at fault, with what is honoured."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        found = list(dict.fromkeys(_told(dict(error)) for error in e.errors(include_url=False)))
        # Of a field that may be of several types, the fault that lies deepest is the one that was meant.
        places = [where or "" for where, _ in found]
        told = [f for f in found if not any(p.startswith((f"{f[0]}[", f"{f[0]}.")) for p in places)]
        raise ApiError(400, "; ".join(said for _, said in told), param=told[0][0]) from e


def _told(error: dict[str, Any]) -> tuple[str | None, str]:
    """(field, what is wrong with it) of one of pydantic's errors."""
    where = ""
    for step in error["loc"]:
        # Steps that only say which member of a union was tried are no part of the request.
        if isinstance(step, int):
            where += f"[{step}]"
        elif re.fullmatch(r"[a-z_0-9]+", step) and step not in ("str", "int", "dict", "none"):
            where += f".{step}" if where else step
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "is not honoured by this server; leave it out"
    elif error["type"] == "value_error" and not where:
        where, _, message = message.partition(": ")
    elif error["type"] == "missing":
        message = "is missing"
    elif error["type"] != "json_invalid":
        shown = repr(error["input"])
        message = f"found {shown if len(shown) <= 60 else shown[:57] + '...'}; {message[:1].lower()}{message[1:]}"
    return where or None, f"{where}: {message}" if where else message
