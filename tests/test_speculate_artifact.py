"""Drafts of an artifact at work: on one rank and several, from the command line, in the server's figures."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from convert.demo.drafts import DRAFT_KINDS, write_draft
from convert.drafts import all_asked, finished, prepared, write
from runtime_min.cli import main
from runtime_min.engine import Engine
from runtime_min.messages import Stats
from runtime_min.request import Limits, Request
from runtime_min.sample import Sampling
from runtime_min.serve.metrics import Metrics
from runtime_min.serve.run import told
from runtime_min.speculate.figures import Acceptance
from specs.errors import ArtifactError
from specs.mesh import Mesh
from tests.lab import converted

LIMITS = Limits(
    running=3, step_tokens=40, share=8, cache_tokens=40 * 8, page_tokens=8, spec_tokens=3, spec_adaptive=False
)
KINDS = sorted(DRAFT_KINDS)


def requests() -> list[Request]:
    return [
        Request(
            prompt=tuple((7 * i + j) % 500 for j in range(3 + 11 * (i % 4))), max_tokens=3 + i % 5,
            sampling=Sampling(presence=i % 2, logprobs=1), scored=i == 4,
        )
        for i in range(9)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for kind in KINDS:
        write_draft(folder / kind, kind)
    return folder


def drafted(demo: Path, sources: Path, out: Path, **mesh: int) -> Path:
    """The demo as an artifact with a draft of every kind."""
    converted(demo, out, **mesh)
    for draft in prepared(all_asked([str(sources / kind) for kind in KINDS]), finished(out)):
        write(draft, out, workers=2)
    return out


@pytest.fixture(scope="module")
def artifact(demo: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafted(demo, sources, tmp_path_factory.mktemp("one") / "artifact")


@pytest.fixture(scope="module")
def want(artifact: Path) -> list[list[int]]:
    with Engine(artifact, LIMITS, device="cpu", dtype="float64") as engine:
        return [r.ids for r in engine.generate(requests())]


def answers(path: Path, kind: str, tree: int) -> tuple[list[list[int]], Acceptance]:
    limits = replace(LIMITS, draft=kind, spec_tree=tree)
    with Engine(path, limits, device="cpu", dtype="float64") as engine:
        ids = [r.ids for r in engine.generate(requests())]
        found = engine.stats.drafts
    assert found is not None
    return ids, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [0, 7])
def test_every_kind_gives_what_plain_decoding(artifact: Path, want: list[list[int]], kind: str, tree: int) -> None:
    ids, found = answers(artifact, kind, tree)
    assert ids == want and found.drafts > 9 and found.draft_ms > 0 < found.verify_ms


@pytest.mark.parametrize(
    "mesh, kind, tree",
    [
        (Mesh(world=2, tp=2), "eagle3-mla", 0), (Mesh(world=2, tp=1, ep=2), "dflash", 7),
        (Mesh(world=4, tp=2, ep=4), "eagle3.1-mla", 7),
        *(
            pytest.param(mesh, kind, tree, marks=pytest.mark.slow)
            for mesh in (Mesh(world=2, tp=2), Mesh(world=2, tp=1, ep=2), Mesh(world=4, tp=4), Mesh(world=4, tp=2, ep=4))
            for kind in KINDS
            for tree in (0, 7)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_every_mesh_gives_the_tokens_of_one_rank(
    demo: Path, sources: Path, tmp_path: Path, want: list[list[int]], mesh: Mesh, kind: str, tree: int
) -> None:
    """Where tp < world, groups with other requests verify and accept beside each other."""
    path = drafted(demo, sources, tmp_path / "a", world=mesh.world, tp=mesh.tp, ep=mesh.ep)
    ids, found = answers(path, kind, tree)
    assert ids == want and found.drafts > 9


def run(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_generate_with_a_draft(artifact: Path) -> None:
    args = ("generate", artifact, "--device", "cpu", "--ids", "1,2,3", "--max-tokens", 8, "--json")
    plain = json.loads(run(*args).stdout)
    for more in ((), ("--spec-tree-budget", 9, "--spec-tokens", 2), ("--no-spec-adaptive",)):
        found = json.loads(run(*args, "--draft", "eagle3-mla", *more).stdout)
        assert found["ids"] == plain["ids"] and plain["drafts"] is None
        assert found["drafts"]["drafts"] > 0 and found["drafts"]["mean_accept_length"] >= 1


def test_chat_tells_the_accept_length_of_an_answer(artifact: Path) -> None:
    args = ("chat", artifact, "--device", "cpu", "--cache-tokens", 1024, "--max-tokens", 12, "--temperature", 0)
    for more, there in ((("--draft", "eagle3-llama"), True), ((), False)):
        done = CliRunner().invoke(main, [str(a) for a in (*args, *more)], input="Hello\n", catch_exceptions=False)
        assert done.exit_code == 0 and "[12 tokens, " in done.stdout
        assert (", accept length 1." in done.stdout) == there


def test_unknown_drafts_and_lone_options_are_refused(artifact: Path, demo: Path, tmp_path: Path) -> None:
    args = ("generate", artifact, "--device", "cpu", "--ids", "1")
    result = run(*args, "--draft", "other")
    assert result.exit_code == 1 and f"the artifact has {', '.join(KINDS)}" in result.stderr
    assert run(*args, "--spec-tokens", 2).exit_code == 2
    assert run(*args, "--draft", "dflash", "--spec-tokens", 15).exit_code == 1
    converted(demo, tmp_path / "bare")
    with pytest.raises(ArtifactError, match="the artifact has no drafts"):
        Engine(tmp_path / "bare", replace(LIMITS, draft="eagle3"), device="cpu")


def test_bench_spec_says_what_it_measured(artifact: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello there\n[1, 2, 3]\n\nWhat now?\n")
    args = ("bench", "spec", artifact, "--device", "cpu", "--draft", "eagle3-mla", "--prompts", prompts)
    args = (*args, "--max-tokens", 6, "--running", 2, "--cache-tokens", 600, "--no-spec-adaptive")
    facts = json.loads(run(*args, "--json").stdout)
    assert facts["prompts"] == 3 and facts["same_as_plain"] == 3 and facts["drafts"] > 0 and facts["bigrams"] == 15
    assert facts["speedup"] == pytest.approx(facts["drafted_tokens_s"] / facts["plain_tokens_s"])
    assert facts["setting"]["draft"] == "eagle3-mla" and min(facts["draft_ms_per_step"], facts["speedup"]) > 0
    said = run(*args).stdout
    assert "mean accept length" in said and "1 + accepted / drafts" in said and "distinct bigrams" in said
    prompts.write_text("[1, x]\n")
    result = run(*args)
    assert result.exit_code == 1 and f"{prompts}:1: expected a list of token ids" in result.stderr


@pytest.mark.slow
def test_accept_has_a_verdict_on_drafts(artifact: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("[5, 6, 7]\n")
    args: tuple[Any, ...] = ("accept", artifact, "--device", "cpu", "--release", "none", "--out", tmp_path / "out")
    args = (*args, "--draft", "dflash", "--prompts", prompts, "--cache-tokens", 1024)
    assert run(*args, "--length", 7.9).exit_code == 1
    found = {f["name"]: f for f in json.loads((tmp_path / "out/accept.json").read_text())["findings"]}
    assert found["drafts"]["verdict"] == "fail" and "expected a length of 7.9" in found["drafts"]["said"]
    assert found["drafts"]["facts"]["same_as_plain"] == 1 and found["drafts"]["facts"]["drafts"] > 0


def test_figures_of_the_server() -> None:
    drafts = Acceptance().plus(3, 3).plus(3, 0).took(1.0, 2.0)
    pump: Any = SimpleNamespace(busy=0, engine=SimpleNamespace(stats=Stats(drafts=drafts)))
    page = Metrics(pump).page().decode()
    for line in (
        "kiln_spec_drafts_total 2.0", "kiln_spec_draft_tokens_total 6.0", "kiln_spec_accepted_total 3.0",
        'kiln_spec_accepted_at_total{position="3"} 1.0', "kiln_spec_draft_seconds_total 0.001",
    ):  # fmt: skip
        assert line in page.splitlines()
    assert "accept length 2.50" in told(pump.engine.stats) and "accept" not in told(Stats())
    pump.engine.stats = Stats()
    assert "kiln_spec" not in Metrics(pump).page().decode()
