"""The command line as a contract: names, flags, JSON, exit codes, and errors a person can act on."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from convert.cli import main
from tests.lab import copied, edit


def kiln(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_plan_and_convert_and_verify_and_inspect(demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    planned = json.loads(kiln("plan", demo, "--tp", 2, "--json").stdout)
    assert {"source_bytes", "source_tensors", "rank_bytes", "common_bytes", "peak_memory_bytes"} <= set(planned)
    made = json.loads(kiln("convert", demo, "--tp", 2, "--out", out, "--arch", "sm120", "--json").stdout)
    assert made["artifact"] == str(out) and made["bytes_written"] == planned["disk_bytes"]
    for extra in ((), ("--quick",), ("--against", demo)):
        verdict = json.loads(kiln("verify", out, "--json", *extra).stdout)
        assert verdict["ok"] and verdict["problems"] == [] and verdict["logical_digest"] == made["logical_digest"]
    facts = json.loads(kiln("inspect", out, "--json").stdout)
    assert facts["mesh"] == {"world": 2, "tp": 2, "ep": 1} and facts["logical"] == made["logical_digest"]


def test_text_ends_with_the_next_command(demo: Path, tmp_path: Path) -> None:
    result = kiln("convert", demo, "--tp", 2, "--out", tmp_path / "o")
    assert result.exit_code == 0
    command = result.stdout.strip().splitlines()[-1].removeprefix("next: ").split()
    done = subprocess.run([*command, "--max-tokens", "2"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "peak memory" in result.stdout and "bound" in result.stdout
    again = kiln("convert", demo, "--tp", 2, "--out", tmp_path / "o")
    assert again.exit_code == 0 and "nothing to do" in again.stdout
    assert "experts" in kiln("plan", demo, "--tp", 2).stdout and "w2-tp2" not in kiln("inspect", tmp_path / "o").stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("plan", "MODEL", "--arch", "sm12"), "known are sm80, sm90, sm100, sm103, sm120"),
        (("plan", "MODEL", "--tp", 3, "--world", 8), "tp 3 does not divide world 8; legal: 1, 2, 4, 8"),
        (("plan", "MODEL", "--tp", 8, "--ep", 5), "ep 5 does not divide world 8"),
        (("plan", "MODEL", "--tp", 128), "world 128: expected 1..64"),
        (
            ("fetch", "a/b", "--out", "x", "--draft", "y", "--no-drafts"),
            "--draft and --no-drafts contradict each other",
        ),
        (("convert", "MODEL", "--workers", 0), "not in the range"),
        (("verify", "MODEL", "--quick", "--against", "x"), "choose one"),
        (("demo", "MODEL", "--geometry", "k2.6"), "--layers"),
        (("demo", "MODEL", "--layers", 2), "--layers goes with --geometry k2.6"),
        (("serve",), "No such command"),
    ],
)
def test_wrong_usage_is_exit_code_2(demo: Path, args: tuple[object, ...], said: str) -> None:
    result = kiln(*(demo if a == "MODEL" else a for a in args))
    assert result.exit_code == 2 and said in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("plan", "/nowhere"), "/nowhere: does not exist"),
        (("plan", "MODEL", "--tp", 3), "legal for this model: tp 1, 2, 4, 8"),
        (("convert", "MODEL", "--tp", 16), "axis heads=8 over tp=16"),
        (("convert", "MODEL", "--draft", "/nowhere"), "draft nowhere: /nowhere: does not exist"),
        (("inspect", "MODEL"), "no finished artifact"),
        (("verify", "MODEL"), "no finished artifact"),
        (("verify", "/nowhere"), "no finished artifact"),
        (("demo", "MODEL"), "demo"),
    ],
)
def test_wrong_input_is_exit_code_1_with_the_reason(demo: Path, args: tuple[object, ...], said: str) -> None:
    result = kiln(*(demo if a == "MODEL" else a for a in args))
    assert result.exit_code == 1 and said in result.stderr
    assert all(line.startswith("error: ") for line in result.stderr.strip().splitlines()) and result.stdout == ""


def test_a_damaged_artifact_is_exit_code_1(demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kiln("convert", demo, "--tp", 2, "--out", out)
    part = out / "weights/rank-00/part-01.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\x7f")
    result = kiln("verify", out, "--json")
    assert result.exit_code == 1
    assert "part-01.safetensors: sha256" in json.loads(result.stdout)["problems"][0] and "error: " in result.stderr


def test_without_tokenizer_and_licence_there_is_a_warning(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    (model / "tiktoken.model").unlink()
    (model / "LICENSE").unlink()
    result = kiln("convert", model, "--tp", 2, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "no tiktoken.model or tokenizer.json" in result.stderr and "no LICENSE file" in result.stderr


def test_all_problems_of_a_kind_are_listed(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    stem = "language_model.model.layers.1.mlp.experts.{}.down_proj.weight_scale"
    edit(model, stem.format(5), lambda t: [t.pop(stem.format(e)) for e in (5, 7, 9)])
    result = kiln("plan", model, "--tp", 2)
    assert result.exit_code == 1
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [stem.format(e) for e in (5, 7, 9)]


def test_demo_and_convert_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = kiln("convert", "--tp", 8)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "build/demo/w8-tp8-ep1/manifest.json").exists()
    assert kiln("convert", "--tp", 8, "--ep", 8).exit_code == 0
    assert kiln("demo", "mine").exit_code == 0 and (tmp_path / "mine/config.json").exists()


def test_help_teaches(demo: Path) -> None:
    for command in ("plan", "convert", "verify", "inspect", "demo"):
        shown = kiln(command, "--help").stdout
        assert len(shown) > 200 and "Usage:" in shown
    assert "Exit codes: 0 done, 1 the input or artifact is wrong, 2 wrong usage" in " ".join(
        kiln("--help").stdout.split()
    )
    assert kiln("--version").stdout.startswith("kiln")
