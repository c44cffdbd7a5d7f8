"""The terminal chat and the day-one kit, on the demo model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from runtime_min.accept import text
from runtime_min.cli import main
from runtime_min.text import Tokenizer
from tests.lab import converted
from tests.test_serve_grammar import TOOLS

HOW = ["--device", "cpu", "--cache-tokens", "2048"]


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "artifact"
    converted(demo, out)
    return out


def talked(artifact: Path, *lines: str, more: tuple[str, ...] = ()) -> str:
    command = ["chat", str(artifact), *HOW, "--max-tokens", "12", "--temperature", "0", *more]
    done = CliRunner().invoke(main, command, input="".join(f"{line}\n" for line in lines), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_chat_remembers_until_told_to_forget(artifact: Path) -> None:
    first = talked(artifact, "Hello")
    assert "[12 tokens, " in first and "tokens a second, first after" in first
    # The same question is another one once there is a history, and the same again without.
    asked = talked(artifact, "Hello", "Hello", "/new", "Hello").split("> ")
    answers = [a.rpartition("\n[")[0] for a in asked if "[12 tokens" in a]
    assert len(answers) == 3 and answers[0] == answers[2] != answers[1]


def test_chat_commands_and_pictures(artifact: Path, tmp_path: Path) -> None:
    Image.new("RGB", (56, 56), "red").save(tmp_path / "red one.png")
    said = talked(
        artifact, "/help", f"/image {tmp_path}/red one.png", "What is it?", "/thinking", "And now?", "/exit", "x"
    )
    assert "/image FILE" in said and "thinking off" in said and said.count("[12 tokens") == 2
    wrong = talked(artifact, "/image nothing.png", "What?", "Hello")
    assert "error: messages[0].content[0].image" in wrong and wrong.count("[12 tokens") == 1


def test_chat_ends_with_the_input(artifact: Path) -> None:
    assert talked(artifact).startswith("> ")


def accepted(artifact: Path, out: Path, *more: str) -> tuple[int, dict[str, dict[str, object]], str]:
    done = CliRunner().invoke(main, ["accept", str(artifact), *HOW, "--out", str(out), *more])
    report = json.loads((out / "accept.json").read_text())
    return done.exit_code, {f["name"]: f for f in report["findings"]}, (out / "accept.md").read_text()


def test_accept_passes_and_fails_by_what_it_measures(artifact: Path, tmp_path: Path) -> None:
    prose, requests = tmp_path / "prose.txt", tmp_path / "requests.jsonl"
    prose.write_text("It was a bright cold day, and the clocks were striking. " * 40)
    hello = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "expected_calls": []}
    requests.write_text(json.dumps({**hello, "tools": TOOLS}) + "\n" + json.dumps(hello) + "\n")
    files = ("--text", str(prose), "--requests", str(requests))
    code, found, page = accepted(artifact, tmp_path / "a", "--release", "none", "--perplexity", "2", "5000", *files)
    assert code == 0 and {n: f["verdict"] for n, f in found.items()} == {
        "kernels": "pass", "digests": "skipped", "renderings": "pass", "perplexity": "pass", "tool calls": "pass",
        "drafts": "skipped",
    }  # fmt: skip
    facts = found["perplexity"]["facts"]
    assert isinstance(facts, dict) and 2 < facts["perplexity"] < 5000 and f"{facts['perplexity']:.4f}" in page
    # A model without training is no better than chance at words it has not learnt.
    assert facts["perplexity"] > Tokenizer.open(artifact).vocab_size / 3
    missed = {**hello, "tools": TOOLS, "expected_calls": ["time"]}
    requests.write_text(json.dumps(missed) + "\n")
    code, found, page = accepted(artifact, tmp_path / "b", "--perplexity", "1", "2", *files)
    assert code == 1 and {n: f["verdict"] for n, f in found.items()} == {
        "kernels": "pass", "digests": "fail", "renderings": "pass", "perplexity": "fail", "tool calls": "fail",
        "drafts": "skipped",
    }  # fmt: skip
    assert "| tool calls | fail | F1 0.000" in page


def test_accept_skips_what_it_has_no_file_for(artifact: Path, tmp_path: Path) -> None:
    code, found, _ = accepted(artifact, tmp_path, "--release", "none")
    assert code == 0 and found["perplexity"]["said"] == "no --text" and found["tool calls"]["verdict"] == "skipped"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "requests.jsonl:1: "),
        ("{}", "has no 'expected_calls'"),
        ('{"expected_calls": "f"}', "expected a list of names"),
        ('{"expected_calls": [], "messages": [], "foo": 1}', "foo: is not honoured"),
    ],
)
def test_accept_names_the_bad_line(artifact: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "requests.jsonl").write_text(line)
    command = ["accept", str(artifact), *HOW, "--release", "none", "--requests", str(tmp_path / "requests.jsonl")]
    done = CliRunner().invoke(main, [*command, "--out", str(tmp_path)])
    assert done.exit_code == 1 and message in done.stderr


def test_renderings_name_what_differs(artifact: Path, tmp_path: Path) -> None:
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((artifact / name).read_bytes())
    template = (artifact / "chat_template.jinja").read_text()
    assert template.count("## Return of") == 1
    (tmp_path / "chat_template.jinja").write_text(template.replace("## Return of", "# Return of"))
    found = text.renderings(tmp_path)
    assert found.verdict == "fail" and found.said == "2 of 5 are as known" and len(found.facts) == 3
    (tmp_path / "chat_template.jinja").unlink()
    assert text.renderings(tmp_path).verdict == "fail"
