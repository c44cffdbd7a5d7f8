"""Suites that others wrote, unmodified, against the running server: llm-comply, canitoolcall's probe."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from canitoolcall.probe import BUILTIN_SCENARIOS, probe

from runtime_min.request import Request
from runtime_min.serve.grammar import Grammars
from runtime_min.text import Tokenizer

SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
# What a model that can call tools would say, by words of the last user's message.
ANSWERS: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("weather in San Francisco", [("get_weather", {"location": "San Francisco"})]),
    ("Use the tool.", [("get_weather", {"city": "Paris"})]),
    ("in Tokyo", [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})]),
    (
        "Design review",
        [
            (
                "create_event",
                {
                    "title": "Design review",
                    "start": "2026-10-01T15:00:00Z",
                    "attendees": [
                        {"name": "Ana", "email": "ana@example.com"},
                        {"name": "Bo", "email": "bo@example.com"},
                    ],
                    "location": {"city": "Berlin", "room": "4.12"},
                },
            )
        ],
    ),
    ("Grüße", [("save_note", {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"})]),
    ("on the server", [("get_server_time", {})]),
    ("Lisbon", [("get_weather", {"city": "Lisbon"})]),
    ("record_answer tool", [("record_answer", {"answer": "9.9"})]),
]


def said(tokenizer: Tokenizer, request: Request) -> str:
    """The double's answer: thinking first if the prompt asks for it."""
    prompt = tokenizer.decode(request.prompt)
    begin = "" if prompt.endswith("</think>") else "Let me see.</think>"
    last = prompt.rpartition("<|im_user|>")[2]
    if "## Return of" in last:
        return f"{begin}It is 18 degrees and clear."
    for words, calls in reversed(ANSWERS):
        if words in last and all(f"type {name} =" in prompt for name, _ in calls):
            first = len(re.findall(r"functions\.\w+:\d+", prompt))
            made = [CALL.format(n, i, json.dumps(a, ensure_ascii=False)) for i, (n, a) in enumerate(calls, first)]
            return begin + SECTION.format("".join(made))
    return f"{begin}42"


def able(bench: Any, demo: Path, group: int) -> Any:
    tokenizer = Tokenizer.open(demo)
    return bench(lambda request: said(tokenizer, request), group=group, grammars=Grammars(tokenizer))


def test_llm_comply(bench: Any, demo: Path) -> None:
    with able(bench, demo, 2) as b:
        command = [sys.executable, "-m", "llm_comply.cli", "--format", "openai-chat", "-u", f"{b.url}/v1", "-k", "x"]
        done = subprocess.run([*command, "-m", "kimi", "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {r["id"]: r["status"] for r in json.loads(done.stdout)["results"]}
    skipped = {name for name, status in found.items() if status == "skipped"}
    assert skipped <= {"chat-reasoning-summary"} and len(found) == 9, found
    assert all(status == "passed" for name, status in found.items() if name not in skipped), found


def test_canitoolcall_probe(bench: Any, demo: Path) -> None:
    for group in (1, 5):
        with able(bench, demo, group) as b:
            report = probe(f"{b.url}/v1", "kimi")
        assert report.summary() == {"pass": 3 * len(BUILTIN_SCENARIOS), "fail": 0, "error": 0, "skip": 0}, (
            report.render_text()
        )
        assert not any(o.warnings for o in report.outcomes), report.render_text()
