"""Drafts beside an artifact: every kind on every mesh proven, added later, interrupted, cut again, refused by name."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import convert.shard.writer
from convert.cli import main
from convert.demo.drafts import DRAFT_KINDS, DraftKind, write_draft
from convert.demo.geometry import TINY
from convert.drafts import all_asked, finished, prepared, write
from convert.readers.find import find
from convert.repack.compare import Sample
from convert.repack.verify import verify
from convert.shard.journal import FOLDER
from convert.shard.plan import plan
from specs import manifest
from specs.draft import read_draft_config
from specs.errors import ConfigError, CutError, HeaderError, OutputError, PlanError
from specs.fold import unfold
from specs.mesh import Mesh
from specs.schema import load
from tests.fullsize import FIXTURES
from tests.lab import Tensors, converted, copied, tree

VARIANTS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in DRAFT_KINDS},
    "no-embed": {"kind": "eagle3-mla", "embed": False},
    "no-head": {"kind": "eagle3-mla", "head": False},
    "short": {"kind": "eagle3-llama", "vocab": 512},
    "padded": {"kind": "eagle3.1-mla", "vocab": 832},
}
RELEASED: dict[str, Any] = json.loads((FIXTURES / "drafts.json").read_text())
MESHES = [{}, {"world": 2, "tp": 2}, {"world": 4, "tp": 2, "ep": 4}, {"world": 8, "tp": 8}]


def kiln(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of every kind and variant."""
    folder = tmp_path_factory.mktemp("drafts")
    for name, how in VARIANTS.items():
        write_draft(folder / name, **how)
    return folder


@pytest.fixture(scope="module")
def target(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("target") / "artifact"
    converted(demo, out, world=2, tp=2)
    return out


@pytest.fixture
def artifact(target: Path, tmp_path: Path) -> Path:
    return copied(target, tmp_path / "artifact")


def added(artifact: Path, *drafts: Path | str) -> None:
    for draft in prepared(all_asked([str(d) for d in drafts]), finished(artifact)):
        write(draft, artifact, workers=2)


def edited(source: Path, out: Path, tensors: Tensors | None = None, **config: object) -> Path:
    """A copy of a draft with other tensors or config fields."""
    shutil.copytree(source, out)
    if tensors is not None:
        save_file({**load_file(out / "model.safetensors"), **tensors}, out / "model.safetensors")
    stated = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(stated | config))
    return out


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_draft_is_proven_on_every_mesh(demo: Path, sources: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    out = tmp_path / "artifact"
    converted(demo, out, **mesh)
    before = tree(out)
    added(out, *(sources / name for name in VARIANTS))
    assert before.items() <= tree(out).items()
    digests = {}
    for name in VARIANTS:
        verdict = verify(out / "draft" / name, "full", find(str(sources / name)), workers=2)
        assert verdict.ok and not verdict.warnings, verdict
        digests[f"draft {name}"] = verdict.logical["draft"]
    whole = verify(out, "full", workers=2)
    assert whole.ok and not whole.warnings
    assert whole.logical.items() >= digests.items() and {"text", "vision"} <= set(whole.logical)


@pytest.mark.parametrize("name", RELEASED)
def test_released_drafts_are_cut_for_eight_ranks(name: str) -> None:
    """By their headers: every byte is stored once, or once a rank what is not cut; sixteen ranks do not divide all."""
    config = read_draft_config(RELEASED[name]["config"])
    header = dict(unfold(RELEASED[name]["header"]))
    made = plan(load(config.kind), config, header, Mesh(world=8, tp=8))
    assert sum(made.data_bytes("rank", r) for r in range(8)) + made.data_bytes("common") == 2 * RELEASED[name]["params"]
    assert max(f.size for f in made.files) < 1.5e9
    if name == "dflash":
        with pytest.raises(CutError) as e:
            plan(load(config.kind), config, header, Mesh(world=16, tp=16))
        told = str(e.value)
        assert "attn.kv: axis heads=8 over tp=16" in told and "legal for this model: tp 1, 2, 4, 8;" in told


def parts(folder: Path, name: str, world: int) -> list[torch.Tensor]:
    """One stored tensor of every rank, read by the safetensors library and by nothing of ours."""
    out = []
    for rank in range(world):
        for file in sorted((folder / f"weights/rank-{rank:02d}").glob("*.safetensors")):
            with safe_open(file, "pt") as f:
                out += [f.get_tensor(name)] if name in f.keys() else []  # noqa: SIM118
    return out


def common(folder: Path, name: str) -> torch.Tensor:
    with safe_open(folder / "weights/common/part-00.safetensors", "pt") as f:
        found: torch.Tensor = f.get_tensor(name)
        return found


def heads(tensors: Tensors, stem: str, count: int) -> torch.Tensor:
    weight = tensors[f"{stem}.weight"]
    return weight.view(count, -1, weight.shape[1])


def test_stored_tensors_are_cut_by_heads_then_joined(demo: Path, sources: Path, tmp_path: Path) -> None:
    out, world = tmp_path / "artifact", 4
    converted(demo, out, world=world, tp=world)
    added(out, sources / "short", sources / "dflash", sources / "eagle3.1-mla")
    llama = load_file(sources / "short/model.safetensors")
    qkv = [heads(llama, f"midlayer.self_attn.{n}_proj", TINY.heads).chunk(world) for n in "qkv"]
    for rank, part in enumerate(parts(out / "draft/short", "attn.qkv", world)):
        assert torch.equal(part, torch.cat([w[rank] for w in qkv]))
    assert torch.equal(torch.cat(parts(out / "draft/short", "head", world)), llama["lm_head.weight"])
    assert torch.equal(common(out / "draft/short", "d2t"), llama["d2t"])
    flash = load_file(sources / "dflash/model.safetensors")
    kv = [heads(flash, f"layers.1.self_attn.{n}_proj", 8).chunk(world) for n in "kv"]
    for rank, part in enumerate(parts(out / "draft/dflash", "layers.1.attn.kv", world)):
        assert torch.equal(part, torch.cat([w[rank] for w in kv]))
    mla = load_file(sources / "eagle3.1-mla/model.safetensors")
    kv_b = heads(mla, "layers.0.self_attn.kv_b_proj", TINY.heads)
    w_uk, w_uv = (torch.cat(parts(out / "draft/eagle3.1-mla", n, world)) for n in ("attn.w_uk", "attn.w_uv"))
    assert torch.equal(torch.cat([w_uk, w_uv], dim=1), kv_b)
    both = torch.cat([mla["layers.0.self_attn.q_a_proj.weight"], mla["layers.0.self_attn.kv_a_proj_with_mqa.weight"]])
    assert torch.equal(common(out / "draft/eagle3.1-mla", "attn.qkv_a"), both)
    assert torch.equal(common(out / "draft/eagle3.1-mla", "fc_norms.2"), mla["fc_norm.2.weight"])


def test_along_and_later_give_the_same_bytes(demo: Path, sources: Path, tmp_path: Path) -> None:
    along, later = tmp_path / "along", tmp_path / "later"
    flags = ["--tp", 2, "--draft", sources / "short", "--draft", f"{sources / 'dflash'}=block", "--json"]
    result = kiln("convert", demo, "--out", along, *flags)
    facts = json.loads(result.stdout)["drafts"]
    assert result.exit_code == 0 and {n: f["kind"] for n, f in facts.items()} == {
        "short": "eagle3_llama", "block": "dflash",
    }  # fmt: skip
    assert "ids: 512 of the target's 768 tokens, by the file's table" in facts["short"]["said"]
    kiln("convert", demo, "--out", later, "--tp", 2)
    assert kiln("draft", later, sources / "short", f"{sources / 'dflash'}=block").exit_code == 0
    assert tree(along) == tree(later)
    papers = manifest.read(along / "draft/block")
    assert papers["kind"] == "dflash" and papers["target"] == manifest.read(along)["digest"]
    assert (along / "draft/block/config.json").read_bytes() == (sources / "dflash/config.json").read_bytes()
    again = kiln("convert", demo, "--out", along, *flags)
    assert all(f["already_there"] for f in json.loads(again.stdout)["drafts"].values())
    listed = json.loads(kiln("inspect", along, "--json").stdout)["drafts"]
    assert [d["name"] for d in listed] == ["block", "short"]


def test_a_name_is_one_drafts(artifact: Path, sources: Path) -> None:
    added(artifact, sources / "dflash")
    with pytest.raises(PlanError, match=r"draft/dflash: holds a finished artifact of another source.*another name"):
        added(artifact, f"{sources / 'short'}=dflash")
    with pytest.raises(ConfigError, match="draft short: the name is used twice; say PATH=NAME"):
        all_asked([str(sources / "short"), f"{sources / 'dflash'}=short"])
    with pytest.raises(ConfigError, match=r"'../x' is no name for a draft"):
        all_asked([f"{sources / 'short'}=../x"])


CHILD = """
import os, signal, sys
import convert.shard.writer as writer
from pathlib import Path
from typing import Any
from tests.test_drafts_convert import added
real, calls = writer.write_all, [0]
def counted(handle, data):
    calls[0] += 1
    if calls[0] == int(sys.argv[3]):
        real(handle, data[:len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle, data)
writer.write_all = counted
added(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def child(artifact: Path, source: Path, limit: int) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", CHILD, str(artifact), str(source), str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)


def test_killed_a_rerun_gives_the_same_bytes(target: Path, sources: Path, tmp_path: Path) -> None:
    whole, out = copied(target, tmp_path / "whole"), copied(target, tmp_path / "out")
    added(whole, sources / "dflash")
    want = tree(whole)
    assert child(out, sources / "dflash", 30).returncode == -signal.SIGKILL
    draft = out / "draft/dflash"
    left = [p for p in draft.rglob("*") if p.is_file()]
    assert any(p.name.endswith(".part") for p in left) and not (draft / "manifest.json").exists()
    for path in left:
        if FOLDER not in path.parts and not path.name.endswith(".part"):
            assert path.read_bytes() == want[str(path.relative_to(out))]
    verdict = verify(out, "quick")
    assert verdict.ok and "draft/dflash: is an unfinished draft" in verdict.warnings[0]
    added(out, sources / "dflash")
    assert tree(out) == want and verify(out, "full", workers=2).ok


def test_a_full_disk_leaves_no_final_name(artifact: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = convert.shard.writer.write_all, [0]

    def full(handle: int, data: memoryview) -> None:
        calls[0] += 1
        if calls[0] > 20:
            raise OSError(28, "No space left on device")
        real(handle, data)

    monkeypatch.setattr(convert.shard.writer, "write_all", full)
    with pytest.raises(OutputError, match="No space left on device"):
        added(artifact, sources / "dflash")
    assert not list((artifact / "draft").rglob("*.safetensors")) and not list((artifact / "draft").rglob("*.part"))


@pytest.mark.parametrize("mode", ["quick", "sample", "full"])
def test_a_flipped_byte_of_a_draft_is_found(artifact: Path, sources: Path, mode: str) -> None:
    added(artifact, sources / "dflash")
    file = artifact / "draft/dflash" / ("config.json" if mode == "quick" else "weights/rank-01/part-00.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    verdict = verify(artifact, mode, workers=2, sample=Sample(count=100) if mode == "sample" else None)  # type: ignore[arg-type]
    assert not verdict.ok and str(file) in verdict.problems[0] and all("draft/dflash" in p for p in verdict.problems)
    if mode != "quick":
        assert "tensor layers." in verdict.problems[0]
    assert kiln(
        "verify", artifact, *([] if mode == "full" else ["--quick"] if mode == "quick" else ["--sample", 100])
    ).exit_code


def test_against_finds_another_draft(artifact: Path, sources: Path, tmp_path: Path) -> None:
    added(artifact, sources / "short")
    norm = load_file(sources / "short/model.safetensors")["norm.weight"]
    norm[3] += 1
    other = edited(sources / "short", tmp_path / "other", {"norm.weight": norm})
    assert kiln("verify", artifact / "draft/short", "--against", sources / "short").exit_code == 0
    result = kiln("verify", artifact / "draft/short", "--against", other)
    assert result.exit_code == 1 and "norm.weight: 1 bytes differ" in result.stderr


def test_a_draft_of_another_target_is_not_this_ones(artifact: Path, demo: Path, sources: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    converted(demo, other, world=4, tp=4)
    added(other, sources / "dflash")
    shutil.copytree(other / "draft", artifact / "draft")
    verdict = verify(artifact, "quick")
    assert not verdict.ok and "not " + manifest.read(artifact)["digest"] in verdict.problems[0]
    assert "w4-tp4-ep1" in verdict.problems[0] and "add the draft again" in verdict.problems[0]


def test_a_reshard_takes_its_drafts_along(demo: Path, sources: Path, tmp_path: Path) -> None:
    """From the draft's own stored bytes: the sources are gone by then."""
    names = ["dflash", "eagle3.1-mla", "no-head", "padded", "short"]
    mine = tmp_path / "sources"
    for name in names:
        shutil.copytree(sources / name, mine / name)
    direct, first, again = tmp_path / "direct", tmp_path / "first", tmp_path / "again"
    drafts = [f"--draft={mine / name}" for name in names]
    assert kiln("convert", demo, "--world", 4, "--tp", 4, "--out", direct, *drafts).exit_code == 0
    assert kiln("convert", demo, "--world", 4, "--tp", 2, "--ep", 4, "--out", first, *drafts).exit_code == 0
    shutil.rmtree(mine)
    result = kiln("convert", first, "--world", 4, "--tp", 4, "--out", again)
    assert result.exit_code == 0, result.stderr
    # t2d, which nobody reads, was in that file and is in no artifact: the papers of that draft tell of it.
    differ = {n for n, d in tree(direct).items() if tree(again)[n] != d}
    assert differ == {"draft/short/manifest.json"} and tree(again).keys() == tree(direct).keys()
    logical = [manifest.read(out / "draft/short")["logical"] for out in (direct, again)]
    assert logical[0] == logical[1]
    text = kiln("plan", first, "--tp", 2).stdout
    assert all(f"draft    {name}: " in text for name in names)


def test_a_damaged_draft_is_not_cut_again(artifact: Path, sources: Path, tmp_path: Path) -> None:
    added(artifact, sources / "dflash")
    file = artifact / "draft/dflash/weights/rank-00/part-00.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    out = tmp_path / "out"
    result = kiln("convert", artifact, "--tp", 1, "--out", out)
    assert result.exit_code == 1 and "are not those it was sealed with" in result.stderr
    assert (out / "manifest.json").exists() and not (out / "draft/dflash/manifest.json").exists()


def test_some_ranks_take_their_share_of_a_draft(demo: Path, sources: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    kiln("convert", demo, "--tp", 4, "--out", whole, "--draft", sources / "short")
    assert (
        kiln("convert", demo, "--tp", 4, "--ranks", "1,2", "--out", part, "--draft", sources / "short").exit_code == 0
    )
    weights = {n: d for n, d in tree(part).items() if n.startswith("draft/") and n.endswith(".safetensors")}
    assert {n.split("/")[3] for n in weights} == {"common", "rank-01", "rank-02"}
    assert weights.items() <= tree(whole).items() and verify(part, "full", workers=2).ok


def test_a_mesh_that_does_not_divide_a_draft_is_refused(demo: Path, sources: Path, tmp_path: Path) -> None:
    """Nothing is written, not even the target, which the mesh does divide."""
    odd = tmp_path / "odd"
    write_draft(odd, "dflash", replace(TINY, heads=6))
    out = tmp_path / "out"
    result = kiln("convert", demo, "--tp", 4, "--out", out, "--draft", odd)
    assert result.exit_code == 1 and not out.exists()
    assert "draft odd: layers.{l}.attn.kv: axis heads=6 over tp=4" in result.stderr
    assert "legal for this model: tp 1, 2;" in result.stderr


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("eagle3-mla", {"hidden": 512}, "reads states of width 512, the target's have 256"),
        ("dflash", {"hidden": 512}, "hidden_size 512, the target's embedding has 256"),
        ("eagle3-llama", {"ranks": 448}, "vocab_size 704, the target has 768 tokens"),
        ("dflash", {"layers": 5}, "is for a target of 5 layers, this one has 3"),
        ("dflash", {"ranks": 640}, "mask_token_id 894 is outside the target's 768 tokens"),
        ("eagle3.1-mla", {"layers": 12}, "reads the outputs of layers 5, 8, the target's last is 2"),
    ],
)
def test_a_draft_of_another_model_is_refused_before_anything_is_written(
    artifact: Path, tmp_path: Path, kind: DraftKind, other: dict[str, int], message: str
) -> None:
    write_draft(tmp_path / "wrong", kind, replace(TINY, **other))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"draft wrong: .*{message}"):
        added(artifact, tmp_path / "wrong")
    assert not (artifact / "draft").exists()


def test_a_missing_mask_token_is_refused(artifact: Path, sources: Path, tmp_path: Path) -> None:
    wrong = edited(sources / "dflash", tmp_path / "wrong", dflash_config={"target_layer_ids": [0, 1, 2]})
    with pytest.raises(ConfigError, match=r"draft wrong: .*mask_token_id: found None, expected a token id"):
        added(artifact, wrong)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(512, dtype=torch.int64), "d2t: is all zero, but the draft has 512 of 768 tokens"),
        (torch.arange(512), "d2t: 128 entries lead outside the target's 768 tokens, the first is 384: 768"),
        (None, r"the draft has 512 of the target's 768 tokens and no id table \(d2t\)"),
    ],
)
def test_a_wrong_id_table_is_refused(
    artifact: Path, sources: Path, tmp_path: Path, table: torch.Tensor | None, message: str
) -> None:
    wrong = edited(sources / "short", tmp_path / "wrong", None if table is None else {"d2t": table})
    if table is None:
        kept = {n: t for n, t in load_file(wrong / "model.safetensors").items() if n != "d2t"}
        save_file(kept, wrong / "model.safetensors")
    with pytest.raises(ConfigError, match=f"draft wrong: {message}"):
        added(artifact, wrong)


def test_a_missing_tensor_is_refused_by_name(artifact: Path, sources: Path, tmp_path: Path) -> None:
    wrong = edited(sources / "eagle3.1-mla", tmp_path / "wrong")
    kept = {n: t for n, t in load_file(wrong / "model.safetensors").items() if n != "fc_norm.1.weight"}
    save_file({**kept, "extra.weight": torch.zeros(1)}, wrong / "model.safetensors")
    with pytest.raises(HeaderError) as e:
        added(artifact, wrong)
    assert "draft wrong: fc_norm.1.weight: missing" in str(e.value)
    assert "draft wrong: extra.weight: unexpected" in str(e.value)


def test_plan_and_probe_tell_of_drafts(demo: Path, sources: Path) -> None:
    planned = kiln("plan", demo, "--tp", 2, "--draft", sources / "short", "--json")
    facts = json.loads(planned.stdout)["drafts"]["short"]
    assert facts["kind"] == "eagle3_llama" and facts["source_bytes"] > 2_000_000 and len(facts["rank_bytes"]) == 2
    assert any("its values were not looked at" in line for line in facts["said"])
    alone = json.loads(kiln("probe", sources / "dflash", "--tp", 2, "--json").stdout)
    lines = {line["name"]: line for line in alone["lines"]}
    assert alone["go"] and lines["target"]["facts"] == {"hidden": 256, "vocab": 768, "layers": 3}
    assert lines["config"]["facts"]["kind"] == "dflash" and lines["plan"]["facts"]["rank_bytes"] > 0
    refused = json.loads(kiln("probe", sources / "dflash", "--tp", 16, "--json").stdout)
    assert not refused["go"] and "attn.kv: axis heads=8 over tp=16" in str(refused["lines"])


def test_probe_says_whether_a_draft_fits_a_model(demo: Path, sources: Path, tmp_path: Path) -> None:
    wrong = edited(sources / "dflash", tmp_path / "wrong", num_target_layers=5)
    result = kiln("probe", demo, "--tp", 2, "--draft", sources / "short", "--draft", wrong, "--json")
    good, bad = (line for line in json.loads(result.stdout)["lines"] if line["name"] == "draft")
    assert good["verdict"] == "go" and "head: the draft's own" in good["found"]
    assert bad["verdict"] == "no-go" and "is for a target of 5 layers, this one has 3" in bad["found"]


def test_demo_writes_drafts_that_fit(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.demo.checkpoint.write_demo", lambda out, *how, **named: shutil.copytree(demo, out))
    assert kiln("demo", tmp_path / "m", "--random", "--drafts").exit_code == 0
    folders = sorted(p.name for p in (tmp_path / "m-drafts").iterdir())
    assert folders == sorted(DRAFT_KINDS)
    flags = [f"--draft={tmp_path / 'm-drafts' / name}" for name in folders]
    assert kiln("convert", tmp_path / "m", "--tp", 8, "--out", tmp_path / "a", *flags).exit_code == 0
    embed = load_file(tmp_path / "m-drafts/eagle3-mla/model.safetensors")["embed_tokens.weight"]
    files = (load_file(f) for f in sorted((tmp_path / "m").glob("*.safetensors")))
    assert torch.equal(embed, next(t for f in files for n, t in f.items() if n.endswith("embed_tokens.weight")))
    before = tree(tmp_path / "m-drafts/dflash")
    shutil.rmtree(tmp_path / "m-drafts/dflash")
    write_draft(tmp_path / "m-drafts/dflash", "dflash")
    assert tree(tmp_path / "m-drafts/dflash") == before
