"""Drafts on the hub: published with their artifact or after it, fetched with it, by name or not at all."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from convert.cli import main
from convert.demo.drafts import write_draft
from convert.demo.geometry import TINY
from convert.drafts import all_asked, finished, prepared, write
from convert.hub import wait
from convert.hub.bundle import bundle
from convert.hub.fetch import Wanted, fetch
from convert.hub.publish import publish
from convert.hub.wait import HubError
from convert.repack.verify import verify
from specs import manifest
from specs.errors import ArtifactError, PlanError
from tests.hub import COMMIT, Fault, FolderRepo, Hub, hub, kiln, point_at
from tests.lab import converted, copied, tree

REPO = "someone/artifact"


@pytest.fixture(scope="module")
def plain(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without drafts."""
    out = tmp_path_factory.mktemp("plain") / "artifact"
    converted(demo, out, world=2, tp=2)
    return out


@pytest.fixture(scope="module")
def sealed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two drafts."""
    folder = tmp_path_factory.mktemp("sealed")
    out = copied(plain, folder / "artifact")
    for name, kind in (("chain", "eagle3.1-mla"), ("block", "dflash")):
        write_draft(folder / name, kind)  # type: ignore[arg-type]
        add(out, folder / name)
    return out


def add(artifact: Path, source: Path) -> None:
    (draft,) = prepared(all_asked([str(source)]), finished(artifact))
    write(draft, artifact, workers=2)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub() as running:
        point_at(running, monkeypatch)
        monkeypatch.setattr(wait, "LONGEST", 0.05)
        yield running


def held(server: Hub) -> dict[str, bytes]:
    return {n: d for n, d in server.repos[REPO].files.items() if n != ".gitattributes"}


def test_drafts_are_published_and_fetched_with_their_artifact(server: Hub, sealed: Path, tmp_path: Path) -> None:
    done = publish(sealed, REPO)
    assert held(server) == tree(sealed) and done.files == len(tree(sealed))
    steps = [set(b) - set(a) for a, b in pairwise(server.repos[REPO].commits.values())]
    assert steps[-2:] == [
        {"draft/block/manifest.json", "draft/chain/manifest.json"}, {"manifest.json", "README.md"},
    ]  # fmt: skip
    got = fetch(Wanted(repo=REPO), tmp_path / "all")
    assert got.drafts == ("block", "chain") and tree(tmp_path / "all") == tree(sealed)
    assert verify(tmp_path / "all", "full", workers=2).ok
    again = fetch(Wanted(repo=REPO), tmp_path / "all")
    assert again.already == again.nbytes


def test_a_draft_is_published_later_and_fetched_later(server: Hub, plain: Path, sealed: Path, tmp_path: Path) -> None:
    """Nothing of the artifact is sent or fetched again."""
    publish(plain, REPO)
    out = tmp_path / "out"
    assert fetch(Wanted(repo=REPO), out).drafts == ()
    done = publish(sealed, REPO)
    assert all(label.startswith(("draft/", "seals of drafts")) for label in done.missing)
    got = fetch(Wanted(repo=REPO), out)
    assert got.drafts == ("block", "chain") and got.already > 0 and tree(out) == tree(sealed)


def test_a_rank_gets_its_share_of_the_drafts_that_are_named(server: Hub, sealed: Path, tmp_path: Path) -> None:
    publish(sealed, REPO)
    server.log.clear()
    fetch(Wanted(repo=REPO, ranks=(1,), drafts=("block",)), tmp_path / "one")
    want = {n: d for n, d in tree(sealed).items() if "rank-00" not in n and not n.startswith("draft/chain")}
    assert tree(tmp_path / "one") == want and not server.asked("rank-00|draft/chain")
    result = CliRunner().invoke(main, ["fetch", REPO, "--no-drafts", "--out", str(tmp_path / "none"), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["drafts"] == []
    assert not (tmp_path / "none/draft").exists()
    with pytest.raises(HubError, match="has no draft other; it has block, chain"):
        fetch(Wanted(repo=REPO, drafts=("other",)), tmp_path / "other")


def test_damaged_bytes_of_a_draft_get_no_name(server: Hub, sealed: Path, tmp_path: Path) -> None:
    publish(sealed, REPO)
    part = "draft/block/weights/rank-01/part-00.safetensors"
    oid = next(o for o, d in server.lfs.items() if d == server.repos[REPO].files[part])
    server.faults = [Fault(oid, times=2, flip=True)]
    with pytest.raises(HubError, match=rf"{part}: .* sha256 .*, expected {oid}; the hub's copy is damaged"):
        fetch(Wanted(repo=REPO), tmp_path / "a")
    assert not (tmp_path / "a" / part).exists() and not (tmp_path / "a/draft/block/manifest.json").exists()
    fetch(Wanted(repo=REPO), tmp_path / "a")
    assert tree(tmp_path / "a") == tree(sealed)


def test_another_draft_of_the_same_name_is_not_mixed_in(server: Hub, plain: Path, sealed: Path, tmp_path: Path) -> None:
    other = copied(plain, tmp_path / "other")
    write_draft(tmp_path / "block", "dflash", seed=1)
    add(other, tmp_path / "block")
    publish(sealed, REPO)
    with pytest.raises(HubError, match="draft/block: is another draft of that name; add yours under another"):
        publish(other, REPO)
    with pytest.raises(PlanError, match=r"draft/block: holds a part of another artifact"):
        fetch(Wanted(repo=REPO), other)


def test_what_keeps_a_draft_from_being_published(sealed: Path, demo: Path, tmp_path: Path) -> None:
    changed = copied(sealed, tmp_path / "changed")
    (changed / "draft/block/config.json").write_text("{}")
    (changed / "draft/chain/weights/rank-00/part-00.safetensors").unlink()
    (changed / "draft/chain/notes.txt").write_text("mine")
    with pytest.raises(ArtifactError) as e:
        bundle(changed)
    told = str(e.value)
    assert "draft/block/config.json: 2 bytes" in told and "draft/chain/notes.txt: is no part of the artifact" in told
    assert "draft/chain/weights/rank-00/part-00.safetensors: not there" in told
    unlicensed, source = copied(sealed, tmp_path / "unlicensed"), tmp_path / "source"
    write_draft(source, "eagle3-llama")
    (source / "LICENSE").unlink()
    add(unlicensed, source)
    with pytest.raises(ArtifactError, match=r"draft/source: has no LICENSE.*must not be published without"):
        bundle(unlicensed)
    foreign = tmp_path / "foreign"
    converted(demo, foreign, world=4, tp=4)
    (foreign / "draft").mkdir()
    copied(sealed / "draft/block", foreign / "draft/block")
    with pytest.raises(ArtifactError, match=f"not {manifest.read(foreign)['digest']}"):
        bundle(foreign)


def test_a_hub_id_is_a_draft_too(server: Hub, plain: Path, tmp_path: Path) -> None:
    """Pinned to its commit; one that does not fit is refused before its weights are downloaded."""
    write_draft(tmp_path / "draft", "dflash")
    write_draft(tmp_path / "wrong", "dflash", replace(TINY, layers=5))
    server.repos |= {f"someone/{n}": FolderRepo(tmp_path / n) for n in ("draft", "wrong")}
    artifact = copied(plain, tmp_path / "artifact")
    refused = kiln(server, tmp_path, "draft", "artifact", "someone/wrong")
    assert refused.returncode == 1 and "draft wrong: draft config.json: is for a target of 5 layers" in refused.stderr
    assert server.sent < (tmp_path / "wrong/model.safetensors").stat().st_size / 4
    done = kiln(server, tmp_path, "draft", "artifact", "someone/draft@main=block")
    assert done.returncode == 0, done.stderr
    assert manifest.read(artifact / "draft/block")["source"]["revision"] == COMMIT
    add(copied(plain, tmp_path / "local"), tmp_path / "draft")
    mine, local = tree(artifact / "draft/block"), tree(tmp_path / "local/draft/draft")
    assert {n for n in mine if mine[n] != local[n]} == {"manifest.json"}
