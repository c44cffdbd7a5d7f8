"""From the fields of a request to what the engine runs and how its answers are read."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime_min.pictures import media
from runtime_min.prompt import slot
from runtime_min.request import Bounds, Media, Request
from runtime_min.sample import Sampling
from runtime_min.serve.choice import Choice, Plain, Reader
from runtime_min.serve.errors import ApiError
from runtime_min.serve.fields import ChatFields, Common, CompletionFields, NamedTool
from runtime_min.text import ChatTemplate, Tokenizer
from runtime_min.text.calls import renumbered
from runtime_min.text.files import MEDIA_PAD
from runtime_min.text.messages import checked
from runtime_min.text.parser import SECTION, Parser, begins_inside_reasoning
from runtime_min.vision.items import Media as Seen
from runtime_min.vision.sources import Sources, parts

# What OpenAI's completions endpoint does when nobody says.
COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sampling where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """The model behind the server. sources: where pictures come from, None if it sees none; grammars: what compiles
    them, None without the extra."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    bounds: Bounds
    defaults: Defaults
    choices: int
    sources: Sources | None = None
    grammars: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """Requests to run and the choices that read them, place by place; `each` choices share one prompt."""

    requests: list[Request]
    choices: list[Choice]
    each: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests[:: self.each])


def chat(served: Served, fields: ChatFields) -> Job:
    """Raises ApiError, or InputError for messages and tools that no prompt can be made of."""
    messages, first_call = renumbered(checked([_message(m.model_dump(exclude_none=True)) for m in fields.messages]))
    kwargs = {} if fields.chat_template_kwargs is None else fields.chat_template_kwargs.model_dump(exclude_none=True)
    tools = [t.model_dump(exclude_none=True) for t in fields.tools or ()]
    seen = _pictures(served, messages)
    ids = served.template.encode_chat(
        served.tokenizer, messages, tools or None, media=[slot(m) for m in seen], **kwargs
    )  # fmt: skip
    inside = begins_inside_reasoning(served.tokenizer, ids)
    names = [t["function"]["name"] for t in tools]
    callable_ = bool(tools) and fields.tool_choice != "none"
    bias = {served.tokenizer.special(SECTION): -math.inf} if tools and not callable_ else {}

    def reader() -> Reader:
        offered = names if callable_ else None
        return Parser(served.tokenizer, reasoning=inside, tools=offered, first_call=first_call)

    most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    return _job(
        served, fields, [tuple(ids)], reader, most=most, bias=bias,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        grammar=_grammar(served, fields, inside), media=_placed(served, ids, seen),
    )  # fmt: skip


def completion(served: Served, fields: CompletionFields) -> Job:
    """Text in prompts is text: control tokens are given as ids."""
    if fields.stream and fields.echo:
        raise ApiError(400, "echo: goes with stream: false only", param="echo")
    given: list[Any] = [fields.prompt] if isinstance(fields.prompt, str) else list(fields.prompt)
    if given and isinstance(given[0], int):
        given = [given]
    prompts = [tuple(served.tokenizer.encode_ordinary(p) if isinstance(p, str) else p) for p in given]
    if not prompts:
        raise ApiError(400, "prompt: is empty, expected at least one", param="prompt")
    most = COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if fields.echo and most == 0:
        # Only the prompt is wanted; the engine makes one token, which nobody sees.
        most = 1
    return _job(
        served, fields, prompts, lambda: Plain(served.tokenizer), most=most, logprobs=fields.logprobs,
        scored=bool(fields.echo) and fields.logprobs is not None,
    )  # fmt: skip


def _job(
    served: Served, fields: Common, prompts: Sequence[tuple[int, ...]], reader: Callable[[], Reader], *,
    most: int | None, logprobs: int | None, bias: Mapping[int, float] | None = None, **rest: Any,
) -> Job:  # fmt: skip
    """`rest` are further fields of the engine's requests."""
    each = fields.n or 1
    if each * len(prompts) > served.choices:
        raise ApiError(400, f"n: {each * len(prompts)} choices, at most {served.choices} are made", param="n")
    if most == 0:
        raise ApiError(400, "max_tokens: found 0, expected at least 1", param="max_tokens")
    ends = frozenset(fields.stop_token_ids or ()) | (frozenset() if fields.ignore_eos else served.tokenizer.stop_ids)
    requests = []
    for prompt in prompts:
        room = min(served.bounds.context, served.bounds.cache_tokens) - len(prompt)
        for i in range(each):
            how = _sampling(served, fields, i, logprobs, bias or {})
            tokens = max(1, room) if most is None else most
            requests.append(Request(prompt=prompt, max_tokens=tokens, sampling=how, stops=ends, **rest))
    for request in requests[::each]:
        served.bounds.check(request)
    choices = [Choice(reader(), fields.stop or (), ends) for _ in requests]
    return Job(requests=requests, choices=choices, each=each)


def _sampling(
    served: Served, fields: Common, place: int, logprobs: int | None, bias: Mapping[int, float]
) -> Sampling:  # fmt: skip
    """How choice `place` of a prompt is sampled: with a seed of its own if there is a seed."""
    try:
        wished = {int(id): value for id, value in (fields.logit_bias or {}).items()}
    except ValueError as e:
        raise ApiError(400, f"logit_bias: {e}; its keys are token ids", param="logit_bias") from e
    default = served.defaults
    return Sampling(
        temperature=default.temperature if fields.temperature is None else fields.temperature,
        top_p=default.top_p if fields.top_p is None else fields.top_p,
        top_k=default.top_k if fields.top_k is None else max(0, fields.top_k),
        min_p=fields.min_p or 0.0,
        presence=fields.presence_penalty or 0.0,
        frequency=fields.frequency_penalty or 0.0,
        repetition=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        bias=tuple(sorted({**wished, **bias}.items())),
        seed=None if fields.seed is None else fields.seed + place,
        logprobs=logprobs,
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the template knows it: its roles are system, user, assistant and tool."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _pictures(served: Served, messages: Sequence[Mapping[str, Any]]) -> list[Seen]:
    where = next((where for where, _ in parts(messages)), None)
    if where is None:
        return []
    if served.sources is None:
        raise ApiError(400, f"{where}: this server's model sees no pictures", param=where)
    return served.sources.media(messages)


def _placed(served: Served, ids: Sequence[int], seen: Sequence[Seen]) -> tuple[Media, ...]:
    """Each picture with the place of its tokens, decoded here, so that a damaged one is named."""
    if served.sources is None or not seen:
        return ()
    items = [item for m in seen for item in m.items]
    return media(ids, served.tokenizer.special(MEDIA_PAD), items, served.sources.rule.patch)


def _grammar(served: Served, fields: ChatFields, inside: bool) -> str | None:
    """The grammar of the answer, if it needs one; ApiError that names the fields if there are none here."""
    wanted = {
        "tool_choice": fields.tool_choice == "required" or isinstance(fields.tool_choice, NamedTool),
        "parallel_tool_calls": bool(fields.tools) and fields.parallel_tool_calls is False,
        "response_format": fields.response_format is not None and fields.response_format.type != "text",
        "tools.function.strict": any(t.function.strict for t in fields.tools or ()),
    }
    names = [name for name, here in wanted.items() if here]
    if not names:
        return None
    if served.grammars is None:
        raise ApiError(400, f"{', '.join(names)}: needs `pip install 'kiln[grammar]'` on the server", param=names[0])
    if fields.ignore_eos:
        raise ApiError(400, f"ignore_eos: does not go with {', '.join(names)}", param="ignore_eos")
    return str(served.grammars.of(fields, inside))
