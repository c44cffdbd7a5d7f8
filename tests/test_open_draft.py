"""Drafts of a converted artifact: opened beside their target on every rank, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from convert.demo.checkpoint import write_demo
from convert.demo.drafts import DRAFT_KINDS, DraftKind, write_draft
from convert.demo.geometry import TINY
from convert.drafts import all_asked, finished, prepared, write
from runtime_min.artifact import Artifact, sha256
from runtime_min.drafts import Eagle3, open_draft
from runtime_min.drafts.open import names, require_names
from runtime_min.kernels.choose import chooser
from runtime_min.kernels.compile import of_draft, recorded
from runtime_min.kv import batch
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_artifact
from runtime_min.ops import REF
from runtime_min.pages import Sequence
from runtime_min.ranks import Ranks
from specs import manifest
from specs.draft import read_draft_config
from specs.errors import ArtifactError, ConfigError
from tests.draft_statement import Config, W, dflash, eagle3, entered
from tests.lab import converted, copied
from tests.together import together

BOUND = 2e-4
CPU = torch.device("cpu")


def add(artifact: Path, *drafts: Path) -> None:
    for draft in prepared(all_asked([str(d) for d in drafts], artifact), finished(artifact)):
        write(draft, artifact, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts a1, a2, a4 of one demo target for 1, 2 and 4 ranks, with a draft of every kind; drafts' files in it."""
    folder = tmp_path_factory.mktemp("drafts")
    write_demo(folder / "model", TINY, seed=3)
    for kind in DRAFT_KINDS:
        # A small vocabulary of its own needs a table; without a head the target's is used.
        more: dict[str, Any] = {"eagle3-mla": {"vocab": 256}, "eagle3.1-mla": {"head": False}}.get(kind, {})
        write_draft(folder / kind, kind, TINY, seed=4, window=30, **more)
    for world in (1, 2, 4):
        converted(folder / "model", folder / f"a{world}", world=world, tp=world)
        add(folder / f"a{world}", *(folder / kind for kind in DRAFT_KINDS))
    return folder


def target(artifact: Path, ranks: Ranks) -> tuple[Artifact, Decoder]:
    opened = Artifact.open(artifact, ranks.rank)
    return opened, Decoder.load(opened, REF, ranks, Settings(dtype=torch.float32, device=CPU, positions=256))


def states(length: int, width: int) -> Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(width))


def logits(artifact: Path, kind: str, ids: list[int], ranks: Ranks) -> tuple[Tensor, list[str]]:
    """Logits of the draft after the prompt `ids`: of all its positions, or of a block behind it."""
    opened, model = target(artifact, ranks)
    found = open_draft(opened, kind, model)
    cache, sequence = model.cache(256), Sequence()
    rows, step = found.draft.cache(cache), batch(cache, [(sequence, ids)])
    h = states(len(ids), len(found.draft.taps) * TINY.hidden)
    if isinstance(found.draft, Eagle3):
        return found.draft.logits(found.draft.first(model.embedded(step.ids), h, step, rows)[1]), found.lines
    found.draft.context(h, step, rows)
    step = batch(cache, [(sequence, [ids[0]] + [found.draft.mask_id] * (found.draft.block - 1))])
    return found.draft.block_logits(model.embedded(step.ids), step, rows)[0], found.lines


def stated(folder: Path, kind: str, ids: list[int]) -> Tensor:
    """The same by the statement, from the files as they were written."""
    every = load_file(folder / kind / "model.safetensors")
    w: W = {n.replace("midlayer", "layers.0"): x.float() if x.is_floating_point() else x for n, x in every.items()}
    c: Config = json.loads((folder / kind / "config.json").read_text())
    whole: W = {}
    for file in (folder / "model").glob("*.safetensors"):
        whole |= load_file(file)
    embed, head = (whole[f"language_model.{n}.weight"].float() for n in ("model.embed_tokens", "lm_head"))
    if kind == "dflash":
        block = [ids[0]] + [c["dflash_config"]["mask_token_id"]] * (c["block_size"] - 1)
        h = states(len(ids), len(c["dflash_config"]["target_layer_ids"]) * TINY.hidden)
        return (dflash(w, c, h, embed[block]) @ head.T)[1:]
    h = entered(w, c, states(len(ids), 3 * TINY.hidden))
    out = eagle3(w, c, embed[ids], h)[1] @ w.get("lm_head.weight", head).T
    if "d2t" not in w:
        return out
    spread = torch.full((len(ids), TINY.vocab), -torch.inf)
    spread[:, torch.arange(len(w["d2t"])) + w["d2t"]] = out
    return spread


SAID: dict[DraftKind, tuple[str, ...]] = {
    "eagle3-llama": ("embedding: the target's; the file's own copy is not used", "head: the draft's own"),
    "eagle3-mla": ("head: the draft's own", "ids: 256 of the target's 768 tokens, by the file's table"),
    "eagle3.1-mla": ("head: the target's, the file has none", "ids: the target's"),
    "dflash": ("embedding: the target's, the file has none", "head: the target's", "block: 8 tokens, mask token 766"),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_every_kind_on_every_rank_equals_the_statement(made: Path, kind: DraftKind, world: int) -> None:
    ids = torch.randint(0, TINY.ranks, (70,)).tolist()
    mesh = Artifact.open(made / f"a{world}").mesh
    want = stated(made, kind, ids)
    there = want.isfinite()
    for found, lines in together(mesh, lambda ranks: logits(made / f"a{world}", kind, ids, ranks)):
        assert found.shape == want.shape and torch.equal(found.isfinite(), there)
        assert (found[there] - want[there]).abs().max() <= BOUND
        assert all(any(line.startswith(f"draft {kind}: {said}") for line in lines) for said in SAID[kind]), lines
        assert any("reads the outputs of layers" in line for line in lines)


def refused(artifact: Path, name: str, said: str, error: type[Exception] = ArtifactError) -> None:
    with pytest.raises(error, match=said):
        open_draft(*_open(artifact, name))


def _open(artifact: Path, name: str) -> tuple[Artifact, str, Decoder]:
    opened, model = target(artifact, Ranks(0, Artifact.open(artifact).mesh))
    return opened, name, model


def resealed(path: Path, change: dict[str, Any]) -> None:
    body = {k: v for k, v in manifest.read(path).items() if k != "digest"} | change
    (path / manifest.NAME).write_bytes(manifest.seal(body))


def test_what_does_not_belong_is_refused(made: Path, tmp_path: Path) -> None:
    refused(made / "a1", "other", "the artifact has dflash, eagle3-llama, eagle3-mla, eagle3.1-mla")
    copy = copied(made / "a1", tmp_path / "a")
    resealed(copy / "draft/dflash", {"target": "0" * 64})
    refused(copy, "dflash", "was made for a target of digest 0000")
    resealed(copy / "draft/eagle3-mla", {"mesh": {"world": 2, "tp": 2, "ep": 1}})
    refused(copy, "eagle3-mla", "was cut for .*'tp': 2")
    (file,) = (copy / "draft/eagle3-llama/weights/rank-00").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(copy, "eagle3-llama", "sha256")


def test_missing_and_unexpected_tensors_are_named(made: Path) -> None:
    dims = read_draft_config(json.loads((made / "eagle3.1-mla/config.json").read_text()))
    wanted = set(names(dims))
    require_names("x", dims, wanted | {"embed", "head", "d2t"})
    with pytest.raises(ArtifactError, match=r"x: fc_norms.1 is missing.*\n.*x: fc_norms.7 is not known"):
        require_names("x", dims, wanted - {"fc_norms.1"} | {"fc_norms.7"})


def test_a_draft_of_another_target_is_refused(made: Path, tmp_path: Path) -> None:
    """Whoever put it there and bound it: the sizes speak."""
    copy = copied(made / "a1", tmp_path / "a")
    path = copy / "draft/dflash"
    raw = json.loads((path / "config.json").read_text()) | {"num_target_layers": 61}
    (path / "config.json").write_text(json.dumps(raw))
    files = manifest.read(path)["files"]
    for f in files:
        if f["path"] == "config.json":
            f |= {"size": (path / "config.json").stat().st_size, "sha256": sha256(path / "config.json")}
    resealed(path, {"files": files})
    refused(copy, "dflash", "is for a target of 61 layers, this one has 3", ConfigError)


def test_kernels_of_an_artifact_s_drafts_are_recorded(made: Path) -> None:
    """Compiled ahead, they are there when a draft is opened: its products have sizes that the target's have not."""
    opened = Artifact.open(made / "a2")
    shapes = of_artifact(opened, torch.bfloat16)

    def products(*kinds: str) -> set[int]:
        drafts = [of_draft(opened, made / "a2/draft" / kind) for kind in kinds]
        text, mesh = opened.config.text, opened.mesh
        found = recorded(text, mesh, shapes, torch.bfloat16, chooser("sm90"), drafts=drafts).variants
        return {int(dict(v.constants)["K"]) for v in found if v.kernel == "linear.product"}

    found = products("eagle3.1-mla", "dflash") - products()
    assert found >= {2 * TINY.hidden, 3 * TINY.hidden}, found
