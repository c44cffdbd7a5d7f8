"""Training of the shipped model on a small scale: its mathematics, its files, and that it learns and resumes."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from convert import cli
from convert.demo import shipped
from convert.demo import weights as random_weights
from convert.demo.geometry import TRAINED, Geometry, config
from convert.demo.inventory import shards
from convert.demo.train import Job, held_out, train
from convert.demo.training import bpe, chats, corpus, data, experts, loop, measure, model, muon, pictures, quant, tokens
from convert.demo.training import drafts as drafting
from convert.demo.training import params as weights
from convert.demo.training.dflash import blocks
from convert.demo.training.eagle import Unroll
from convert.demo.training.export import write_target
from convert.demo.training.loop import Setup
from convert.demo.training.rope import Rope, rotated_halves
from convert.demo.training.tower import tower, units
from runtime_min.artifact import Artifact
from runtime_min.models import rope as runtime_rope
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF
from runtime_min.ranks import Ranks
from runtime_min.score import score
from runtime_min.text import ChatTemplate, Tokenizer
from runtime_min.vision.items import normalized, patches, picture
from specs.config import read_config
from tests.lab import converted, tree
from tests.pictures import RULE, saved
from tests.reference import dequantized, reference

CPU = torch.device("cpu")
SMALL = Geometry(
    hidden=64,
    layers=4,
    heads=4,
    q_lora=32,
    kv_lora=32,
    qk_nope=16,
    qk_rope=16,
    v_head=16,
    dense_ff=64,
    experts=8,
    top_k=2,
    moe_ff=64,
    ranks=TRAINED.ranks,
)
SETUP = Setup(
    geometry=SMALL,
    device=CPU,
    dtype=torch.float32,
    mix=data.Mix(python=1, packages=1, code=1, chats=1, pictures=1),
    warm=2,
)
DRAFT_MIX = data.Mix(python=1, packages=0, code=0, chats=1, pictures=0)


def noisy(rows: list[weights.Row], seed: int) -> weights.Params:
    """Weights as at the beginning, none of them exactly one or zero."""
    draw = torch.Generator().manual_seed(seed)
    made = weights.begin(rows, seed, CPU)
    return {n: (t + 0.05 * torch.randn(t.shape, generator=draw)).detach() for n, t in made.items()}


def random_ids(rows: int, length: int, seed: int = 7) -> Tensor:
    return torch.randint(0, SMALL.ranks, (rows, length), generator=torch.Generator().manual_seed(seed))


# --- the mathematics


def test_fake_quantization_is_what_the_file_holds() -> None:
    """Codes, scales and words against the compressed-tensors library."""
    weight = torch.randn(24, 96)
    weight[3, 32:64] = 0
    words, scale = quant.packed(weight)
    codes = unpack_from_int32(words, 4, weight.shape)
    assert torch.equal(codes.float() * scale.float().repeat_interleave(32, 1), quant.int4(weight, torch.float32))
    how = random_weights.scheme(config(SMALL)["text_config"]["quantization_config"])
    theirs = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, how)
    assert torch.equal(words, theirs["weight_packed"])
    error = (quant.int4(weight, torch.float32) - weight).abs()
    assert (error <= scale.float().repeat_interleave(32, 1) * 0.53).all()
    leaf = weight.clone().requires_grad_()
    quant.int4(leaf, torch.bfloat16).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad, torch.ones_like(leaf))  # type: ignore[arg-type]


def test_rope_equals_the_runtimes() -> None:
    text = config(TRAINED)["text_config"]
    dims = read_config(config(TRAINED)).text
    mine = Rope.of(text)
    assert torch.equal(mine.frequencies(32), runtime_rope.frequencies(dims.rope, 32))
    assert mine.softmax_scale(dims.qk_head) == runtime_rope.softmax_scale(dims)


def plainly_routed(x: Tensor, scores: Tensor, bias: Tensor, three: tuple[Tensor, ...], k: int, scale: float) -> Tensor:
    """Token by token, expert by expert."""
    out = []
    for token, score_row in zip(x, scores, strict=True):
        chosen = (score_row.detach() + bias).topk(k).indices
        share = score_row[chosen] / score_row[chosen].sum() * scale
        each = [three[2][e] @ (silu(three[0][e] @ token) * (three[1][e] @ token)) for e in chosen]
        out.append(sum(w * y for w, y in zip(share, each, strict=True)))
    return torch.stack(out)  # type: ignore[arg-type]


def test_experts_and_their_gradients_equal_a_plain_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (21, 16), (21, 8), (8, 24, 16), (8, 24, 16), (8, 16, 24)
    leaves = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
    x, logits, *three = leaves
    bias = 0.1 * torch.randn(8, generator=draw, dtype=torch.float64)
    made = experts.routed(x, logits.sigmoid(), bias, tuple(three), 3, 2.5, None)  # type: ignore[arg-type]
    want = plainly_routed(x, logits.sigmoid(), bias, tuple(three), 3, 2.5)
    assert made.lost == 0 and made.loads.sum() == 63
    assert (made.out - want).abs().max() <= 2e-5
    probe = torch.randn(want.shape, generator=draw, dtype=torch.float64)
    got = torch.autograd.grad((made.out * probe).sum(), leaves)
    wanted = torch.autograd.grad((want * probe).sum(), leaves)
    assert all((a - b).abs().max() <= 2e-4 for a, b in zip(got, wanted, strict=True))


def test_a_full_expert_drops_the_latest_tokens_and_says_how_many() -> None:
    ids = torch.zeros(100, 1, dtype=torch.long)
    found = experts.places(ids, 2, 64)
    assert found.slot[:64, 0].tolist() == list(range(64)) and (found.slot[64:] == 128).all()
    assert found.source[:64].tolist() == list(range(64)) and (found.source[64:] == 100).all()
    assert found.loads.tolist() == [100, 0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, weights.Params, Tensor]:
    """A checkpoint of untrained weights, the weights, the router's biases."""
    folder = tmp_path_factory.mktemp("written")
    params = noisy(weights.rows(SMALL), 3)
    biases = 0.05 * torch.randn(3, SMALL.experts, generator=torch.Generator().manual_seed(1))
    write_target(folder / "model", SMALL, weights.stored(params, biases, SMALL))
    return folder, params, biases


def test_the_files_tensors_are_exactly_the_formats(written: tuple[Path, weights.Params, Tensor]) -> None:
    _, params, biases = written
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}
    wanted = {t.name: (t.shape, kinds[t.dtype]) for part in shards(SMALL) for t in part}
    found = weights.stored(params, biases, SMALL)
    assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == wanted


def test_text_and_pictures_equal_transformers(written: tuple[Path, weights.Params, Tensor]) -> None:
    """Logits of the training model, in float32, against the exported checkpoint with dequantized experts."""
    folder, params, biases = written
    theirs = reference(dequantized(folder / "model", folder / "dense"))
    w, ids = weights.used(params, torch.float32), random_ids(2, 100)
    raw = torch.randint(0, 256, (3, 16, 3, 14, 14), dtype=torch.uint8)
    with torch.no_grad():
        want = theirs(input_ids=ids).logits
        got = model.logits(w, model.forward(SETUP.facts(), w, biases, ids).hidden)
        pixels = units(raw, torch.float32).view(-1, 3, 14, 14)
        seen = theirs.model.get_image_features(pixels, torch.tensor([[1, 4, 4]] * 3)).pooler_output
        seen = torch.cat(list(seen))
        rows = tower(SMALL, w, raw).flatten(0, 1)
    assert want.std() > 0.2 and (got - want).abs().max() <= 2e-5
    assert seen.std() > 0.2 and (rows - seen).abs().max() <= 2e-5


def test_orthogonal_keeps_directions_and_levels_their_sizes() -> None:
    x = torch.randn(2, 40, 24)
    sizes = torch.linalg.svdvals(muon.orthogonal(x))
    assert sizes.min() > 0.5 and sizes.max() < 1.3
    assert (muon.orthogonal(x) * x).sum() > 0


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [muon.rate_factor(i, 100, 10) for i in range(101)]
    assert rates[0] == 0.1 and rates[10:40] == [1.0] * 30 and rates[100] == 0
    assert all(a > b for a, b in pairwise(rates[40:]))


# --- the drafts' mathematics, one sequence and one step at a time


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query [heads, D] over keys [n, heads, D]."""
    shares = (torch.einsum("hd,nhd->hn", q, k) * scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", shares, v)


@pytest.mark.parametrize("kind", ["eagle3_mla", "eagle3_llama"])
def test_unrolled_steps_equal_decoding_with_a_cache(kind: str) -> None:
    """A row of step j sees what the draft's cache holds there when it has run j steps on its own states."""
    draft = drafting.drafts(SMALL, config(SMALL)["text_config"])[kind]
    w = noisy(drafting.rows(draft), 5)
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(1, 9, 3 * SMALL.hidden, generator=draw)
    embeds = torch.randn(1, 12, SMALL.hidden, generator=draw)
    whole = Unroll(draft, w, states)
    got = [whole.step(embeds[:, j : j + 9]) for j in range(3)]
    for p in (0, 4, 8):
        alone = Unroll(draft, w, states[:, : p + 1])
        first = alone.step(embeds[:, : p + 1])
        assert (first[0, p] - got[0][0, p]).abs().max() <= 1e-5
        keys, state = alone.past[0], alone.state[0, p]
        cache_k, cache_v = keys.k[0].transpose(0, 1), keys.v[0].transpose(0, 1)
        for j in (1, 2):
            out, state, cache_k, cache_v = decoded(draft, w, embeds[0, p + j], state, p + j, cache_k, cache_v)
            assert (out - got[j][0, p]).abs().max() <= 1e-5


def decoded(
    draft: drafting.Draft, w: weights.Params, embed: Tensor, h: Tensor, position: int, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(what the head reads, the next state, both caches with this position) of one token."""

    def rms(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + draft.eps).rsqrt() * w[name]

    g, u = SMALL, torch.cat([rms(embed, "input_norm"), rms(h, "hidden_norm")])
    if draft.kind == "eagle3_llama":
        table = draft.rope.table(drafting.HEAD_DIM, position + 1, CPU)[-1:]
        q, key, value = (linear(u, w[f"attn.{m}"]).view(g.heads, -1) for m in "qkv")
        q, key = (rotated_halves(t[None, None], table)[0, 0] for t in (q, key))
        scale = drafting.HEAD_DIM**-0.5
    else:
        cos, sin = draft.rope.table(g.qk_rope, position + 1, CPU)[-1]

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

        q = linear(rms(linear(u, w["attn.q_a"]), "attn.q_a_norm"), w["attn.q_b"]).view(g.heads, -1)
        q = torch.cat([q[:, : g.qk_nope], turned(q[:, g.qk_nope :])], -1)
        latent = linear(u, w["attn.kv_a"])
        kv = linear(rms(latent[: g.kv_lora], "attn.kv_a_norm"), w["attn.kv_b"]).view(g.heads, -1)
        key = torch.cat([kv[:, : g.qk_nope], turned(latent[g.kv_lora :]).expand(g.heads, -1)], -1)
        value = kv[:, g.qk_nope :]
        scale = draft.rope.softmax_scale(g.qk_nope + g.qk_rope)
    k, v = torch.cat([k, key[None]]), torch.cat([v, value[None]])
    r = h + linear(plain_attention(q, k, v, scale).flatten(), w["attn.o"])
    x = rms(r, "ffn_norm")
    pre = r + linear(silu(linear(x, w["mlp.gate"])) * linear(x, w["mlp.up"]), w["mlp.down"])
    out = rms(pre, "norm")
    return out, out if draft.config.get("norm_output") else pre, k, v


def test_blocks_side_by_side_equal_each_block_with_its_own_context() -> None:
    draft = drafting.drafts(SMALL, config(SMALL)["text_config"])["dflash"]
    draft = replace(draft, config={**draft.config, "sliding_window": 6})
    w = noisy(drafting.rows(draft), 6)
    draw = torch.Generator().manual_seed(3)
    states = torch.randn(1, 40, 3 * SMALL.hidden, generator=draw)
    starts = torch.tensor([3, 11, 30])
    embeds = torch.randn(1, 3 * drafting.BLOCK, SMALL.hidden, generator=draw)
    together = blocks(draft, w, states, embeds, starts)[0].view(3, drafting.BLOCK, -1)
    for i, start in enumerate(starts.tolist()):
        rows = embeds[0].view(3, drafting.BLOCK, -1)[i]
        assert (plain_block(draft, w, states[0, :start], rows, start) - together[i]).abs().max() <= 1e-5


def plain_block(draft: drafting.Draft, w: weights.Params, states: Tensor, x: Tensor, start: int) -> Tensor:
    """What the head reads of one block [BLOCK, hidden] after a context of `start` tokens."""

    def rms(t: Tensor, weight: Tensor) -> Tensor:
        return t * (t.square().mean(-1, keepdim=True) + draft.eps).rsqrt() * weight

    table = draft.rope.table(drafting.HEAD_DIM, start + len(x), CPU)
    ctx = rms(linear(states, w["fc"]), w["hidden_norm"])
    for i, window in enumerate((6, 0)):
        z = rms(x, w["input_norm"][i])
        both = torch.cat([ctx, z])

        def heads(t: Tensor, name: str, i: int = i) -> Tensor:
            return linear(t, w[f"attn.{name}"][i]).view(len(t), SMALL.heads, -1)

        k = rotated_halves(rms(heads(both, "k"), w["attn.k_norm"][i])[None], table)[0]
        q = rotated_halves(rms(heads(z, "q"), w["attn.q_norm"][i])[None], table[start:])[0]
        v, outs = heads(both, "v"), []
        for r in range(len(x)):
            near = [p for p in range(len(both)) if not window or abs(p - start - r) < window]
            outs.append(plain_attention(q[r], k[near], v[near], drafting.HEAD_DIM**-0.5).flatten())
        x = x + linear(torch.stack(outs), w["attn.o"][i])
        y = rms(x, w["ffn_norm"][i])
        x = x + linear(silu(linear(y, w["mlp.gate"][i])) * linear(y, w["mlp.up"][i]), w["mlp.down"][i])
    return rms(x, w["norm"])


def test_accept_length_walks_from_round_to_round() -> None:
    ids = torch.tensor([5, 6, 7, 8, 9, 1])
    proposed = torch.tensor([[7, 8, 0], [8, 9, 1], [9, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    accepted = measure.matches(proposed, ids)
    assert accepted.tolist() == [2, 3, 2, 0, 0]
    assert measure.accept_length(accepted, 0) == (5, 3)


# --- the data


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_conversations_are_rendered_as_the_runtime_renders_them(
    written: tuple[Path, weights.Params, Tensor], thinking: bool, system: str
) -> None:
    """Up to the last answer; no name of a special token in a user's words becomes one."""
    folder = written[0] / "model"
    template, tokenizer = ChatTemplate.open(folder), Tokenizer.open(folder)
    turns = (chats.Turn("Hi <|im_end|> \u00e9", "hm", "Yes."), chats.Turn("And?", "I see.", "No."))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": turns[0].ask}, {"role": "assistant", "content": "Yes."}]
    messages += [{"role": "user", "content": turns[1].ask}]
    prompt = tokenizer.encode_pieces(template.pieces(messages, thinking=thinking))
    answer = [*tokenizer.encode_ordinary("I see."), tokens.IDS["</think>"]] if thinking else []
    answer += [*tokenizer.encode_ordinary("No."), tokens.STOP]
    assert tokens.rendered(chats.Chat(system, turns, thinking)) == prompt + answer


def test_pictures_are_cut_and_scaled_as_the_runtime_does() -> None:
    drawn = next(pictures.pictures([pictures.Digit(np.arange(64, dtype=np.uint8).reshape(8, 8) % 17, 3)], 1, 0))
    item = picture("here", saved(Image.fromarray(drawn.pixels)), RULE).items[0]  # type: ignore[union-attr]
    theirs = patches(item, 14)
    mine = torch.from_numpy(pictures.patches(drawn.pixels[None]))[0]
    assert item.tokens == pictures.TOKENS and torch.equal(mine, theirs)
    assert (units(mine, torch.float32) - normalized(theirs, RULE).flatten(1)).abs().max() <= 1e-6


def test_first_paragraphs_become_plain_sentences() -> None:
    assert chats.paragraph("Join two\npaths :func:`os.walk`.\n\nMore.") == "Join two paths os.walk."
    assert chats.paragraph(">>> f(1)\n1\n\nSays what it is") == "Says what it is."
    assert chats.paragraph("x" * 400) == ""


def test_ranks_are_learnt_most_frequent_first() -> None:
    learnt = bpe.learn(bpe.counted([("the newest newest newest newest lower lower lower", 1)]), 262)
    assert learnt[:256] == [bytes([b]) for b in range(256)]
    # The pairs of " newest" come four times each, so by their bytes; "we" of both words comes seven times.
    assert learnt[256:258] == [b"we", b" n"]
    ids = tokens.encoding().encode_ordinary("def textwrap.wrap(text, width=70): caf\u00e9")
    assert tokens.encoding().decode(ids) == "def textwrap.wrap(text, width=70): caf\u00e9" and max(ids) < TRAINED.ranks


@pytest.fixture(scope="module")
def texts() -> corpus.Corpus:
    """The json package's own words in all three kinds, and a document that is held out."""
    read = corpus.read(corpus.stdlib() / "json", "json", 1)
    documents = [corpus.document("python", p) for p in read if p.entities]
    documents += [replace(d, kind="packages") for d in documents]
    documents += [corpus.Document("code", p.name, p.source) for p in read]
    hidden = next(n for n in (f"held/{i}.py" for i in range(1000)) if corpus.Document("code", n, "").held_out)
    documents.append(corpus.Document("code", hidden, "def secret():\n    return 1\n" * 20))
    documents = [d for d in documents if not d.held_out or d.name == hidden]
    return corpus.Corpus(tuple(documents), tuple(e for p in read for e in p.entities))


def drawn_digits() -> list[pictures.Digit]:
    draw = np.random.Generator(np.random.PCG64(0))
    return [pictures.Digit(draw.integers(0, 17, (8, 8)).astype(np.uint8), i % 10) for i in range(60)]


def test_a_batch_depends_on_seed_and_step_alone(texts: corpus.Corpus) -> None:
    amounts = data.Amounts(chats=64, pictures=32)
    one, two = (data.dataset(texts, drawn_digits(), amounts, 96, 0, n) for n in (1, 2))
    assert torch.equal(one.stream, two.stream) and torch.equal(one.patches, two.patches)
    batch = one.batch(SETUP.mix, 0, 5)
    assert torch.equal(batch.ids, two.batch(SETUP.mix, 0, 5).ids)
    assert not torch.equal(batch.ids, one.batch(SETUP.mix, 0, 6).ids)
    assert batch.ids.shape == (5, 97)
    places = (batch.inputs.flatten() == tokens.PAD).nonzero().squeeze(1)
    assert torch.equal(places, batch.pads) and len(places) == pictures.TOKENS * len(batch.patches)
    assert (batch.targets != tokens.PAD).all()
    secret = tokens.encoding().encode_ordinary("def secret")
    assert str(secret)[1:-1] not in str(one.stream.tolist())
    assert [d.text[:10] for d in held_out(texts)] == ["def secret"]


# --- a whole run


@pytest.fixture(scope="module")
def ran(texts: corpus.Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of a few steps, with its state kept."""
    folder = tmp_path_factory.mktemp("ran")
    return folder, train(job(folder), texts, drawn_digits(), "as tested")


def job(folder: Path, state: bool = True) -> Job:
    return Job(
        out=folder / "out",
        setup=replace(SETUP, state=folder / "state" if state else None),
        draft_mix=DRAFT_MIX,
        length=96,
        steps=14,
        draft_steps=4,
        amounts=data.Amounts(chats=64, pictures=32),
    )


def test_losses_fall_and_the_log_tells_how_it_was_made(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = ran
    curve = facts["target"]["curve"]
    assert curve[0]["loss"] > 7 and curve[-1]["loss"] < curve[0]["loss"] - 0.5
    drafts = facts["drafts"]["curve"]
    assert all(drafts[-1][f"{k}.loss"] < drafts[0][f"{k}.loss"] for k in ("eagle3_mla", "eagle3_llama", "dflash"))
    assert facts["command"] == "as tested" and facts["target"]["steps"] == 14 and facts["seed"] == 0
    assert json.loads((folder / "out" / "log.json").read_text()) == json.loads(json.dumps(facts))
    assert 0 < facts["measured"]["bits_per_byte"] < 16 and set(facts["answers"]) == set(measure.PROMPTS)
    assert all(1 <= n <= 8 for n in facts["tokens_a_round"].values())


def test_the_trained_checkpoint_converts_and_the_runtime_agrees_with_transformers(
    ran: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = ran
    converted(folder / "out" / "target", tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact")
    settings = Settings(dtype=torch.float32, device=CPU, positions=128)
    decoder = Decoder.load(artifact, REF, Ranks(0, artifact.mesh), settings)
    ids = random_ids(1, 60)
    with torch.no_grad():
        want = reference(dequantized(folder / "out" / "target", tmp_path / "dense"))(input_ids=ids).logits
    assert (score(decoder, ids) - want).abs().max() <= 2e-4


@pytest.mark.slow
def test_a_run_that_was_broken_off_ends_with_the_same_weights(
    ran: tuple[Path, dict[str, Any]], texts: corpus.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = ran
    step = loop.Clock.tick

    def broken(clock: loop.Clock, at: int) -> None:
        if at == 9:
            raise KeyboardInterrupt
        step(clock, at)

    stopped = job(tmp_path)
    stopped = replace(stopped, setup=replace(stopped.setup, saved_every=0.0))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop.Clock, "tick", broken)
        train(stopped, texts, drawn_digits())
    train(stopped, texts, drawn_digits())
    for file in sorted((folder / "out").rglob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "out" / file.relative_to(folder / "out")).read_bytes(), file.name


def expected(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a draft's file, spelled out."""
    h, heads, ff, wide = SMALL.hidden, SMALL.heads, drafting.FF, SMALL.heads * drafting.HEAD_DIM
    ends = {"fc.weight": (h, 3 * h), "norm.weight": (h,)}
    if kind == "dflash":
        names: dict[str, tuple[int, ...]] = {**ends, "hidden_norm.weight": (h,)}
        for i in range(2):
            at = f"layers.{i}"
            names |= {f"{at}.{n}.weight": (h,) for n in ("input_layernorm", "post_attention_layernorm")}
            names |= {f"{at}.self_attn.{m}_proj.weight": (wide, h) for m in "qkv"}
            names |= {f"{at}.self_attn.o_proj.weight": (h, wide)}
            names |= {f"{at}.self_attn.{m}_norm.weight": (drafting.HEAD_DIM,) for m in "qk"}
            names |= {f"{at}.mlp.{m}_proj.weight": (ff, h) for m in ("gate", "up")}
            names |= {f"{at}.mlp.down_proj.weight": (h, ff)}
        return names
    at = "layers.0" if kind == "eagle3_mla" else "midlayer"
    names = {**ends, **{f"{at}.{n}.weight": (h,) for n in ("input_layernorm", "hidden_norm")}}
    names |= {f"{at}.post_attention_layernorm.weight": (h,)}
    names |= {f"{at}.mlp.{m}_proj.weight": (ff, h) for m in ("gate", "up")} | {f"{at}.mlp.down_proj.weight": (h, ff)}
    if kind == "eagle3_llama":
        names |= {f"{at}.self_attn.{m}_proj.weight": (wide, 2 * h) for m in "qkv"}
        own = drafting.OWN_VOCAB
        return names | {f"{at}.self_attn.o_proj.weight": (h, wide), "lm_head.weight": (own, h), "d2t": (own,)}
    attention = {
        "q_a_proj": (32, 2 * h), "q_a_layernorm": (32,), "q_b_proj": (heads * 32, 32),
        "kv_a_proj_with_mqa": (48, 2 * h), "kv_a_layernorm": (32,), "kv_b_proj": (heads * 32, 32),
        "o_proj": (h, heads * 16),
    }  # fmt: skip
    names |= {f"fc_norm.{i}.weight": (h,) for i in range(3)}
    return names | {f"{at}.self_attn.{n}.weight": s for n, s in attention.items()}


@pytest.mark.parametrize("kind", ["eagle3_mla", "eagle3_llama", "dflash"])
def test_the_drafts_files_hold_exactly_the_formats_tensors(ran: tuple[Path, dict[str, Any]], kind: str) -> None:
    folder = ran[0] / "out" / kind
    found = load_file(folder / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in found.items()} == expected(kind)
    assert all(t.dtype == (torch.int64 if n == "d2t" else torch.bfloat16) for n, t in found.items())
    if kind == "eagle3_llama":
        ids = found["d2t"] + torch.arange(len(found["d2t"]))
        assert (ids.diff() > 0).all() and ids.max() < SMALL.vocab and tokens.STOP in ids.tolist()


def test_the_trained_model_with_its_drafts_stays_within_sixteen_megabytes() -> None:
    target = sum(t.nbytes for part in shards(TRAINED) for t in part)
    drafts = 0
    for draft in drafting.drafts(TRAINED, config(TRAINED)["text_config"]).values():
        drafts += sum(2 * int(np.prod(r.shape)) for r in drafting.rows(draft))
    assert target + drafts + 8 * drafting.OWN_VOCAB + len(tokens.rank_text()) <= 15_800_000


# --- what `kiln demo` writes


def kiln(*args: object) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, args)))


def test_demo_writes_the_trained_model_with_its_drafts(
    ran: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "folder", lambda: ran[0] / "out")
    monkeypatch.chdir(tmp_path)
    assert kiln("demo", "model").exit_code == 0
    for made, trained in (("model", "target"), *((f"model-drafts/{d}", d) for d in shipped.DRAFTS)):
        assert tree(tmp_path / made) == tree(ran[0] / "out" / trained)
    again = kiln("demo", "model")
    assert again.exit_code == 1 and "model: already holds files" in again.stderr
    assert kiln("demo", "drawn", "--random", "--seed", 3).exit_code == 0
    assert json.loads((tmp_path / "drawn/config.json").read_text())["text_config"]["hidden_size"] == 256
    assert "random" not in kiln("convert", "--tp", 2, "--out", "a").stderr
    assert tree(tmp_path / "build/demo/checkpoint") == tree(tmp_path / "model")


def test_demo_stops_where_the_trained_files_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "folder", lambda: tmp_path / "nothing")
    result = kiln("demo", tmp_path / "model")
    assert result.exit_code == 1 and str(tmp_path / "nothing") in result.stderr and "random" not in result.stderr
    assert not (tmp_path / "model").exists()
