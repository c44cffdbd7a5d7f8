"""Forward passes of drafts against a statement of them that shares nothing with the runtime."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_min.drafts import DFlash, Eagle3
from runtime_min.kernels.gqa import launch as gqa_launch
from runtime_min.kernels.gqa import ref as gqa_ref
from runtime_min.kernels.jit import Jit
from runtime_min.kv import ancestors
from runtime_min.ops import REF, Ops, triton_ops
from runtime_min.ranks import Ranks
from specs.mesh import Mesh
from tests.draft_statement import DFLASH, LLAMA, MLA, MLA31, Config, W, dflash, eagle3, entered, randomized
from tests.drafts import VOCAB, Feed, opened
from tests.kernels.test_mla_decode import case
from tests.together import together

BOUND = 2e-4
EAGLES = {"llama": LLAMA, "mla": MLA, "mla 3.1": MLA31}
ALONE = Ranks(0, Mesh(world=1, tp=1))
LENGTHS = (40, 3, 77)
CHAIN = 4
HEAD = randomized(MLA, 9, lm_head=(VOCAB, 64))["lm_head.weight"]


def given(length: int, width: int, seed: int) -> Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, want: Tensor) -> None:
    assert found.shape == want.shape and (found - want).abs().max() <= BOUND, (found - want).abs().max()


class Past:
    """What one sequence has been given: pairs that stand, and what the statement makes of them."""

    def __init__(self, w: W, c: Config, length: int, seed: int) -> None:
        self.w, self.c = w, c
        self.embeds, self.states = given(length + 2 * CHAIN, 64, seed), given(length + 2 * CHAIN, 192, seed + 1)
        self.e, self.h = self.embeds[:length], entered(w, c, self.states[:length])

    def guess(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """One step on from the last state: the statement over the whole sequence once more."""
        state, _ = eagle3(self.w, self.c, self.e, self.h)
        self.e, self.h = torch.cat([self.e, e]), torch.cat([self.h, state[-1:]])
        return tuple(x[-1] for x in eagle3(self.w, self.c, self.e, self.h))  # type: ignore[return-value]

    def back(self, length: int) -> None:
        """Only pairs with target states stand."""
        self.e, self.h = self.embeds[:length], entered(self.w, self.c, self.states[:length])


def chains(draft: Any, w: W, c: Config, chunk: int) -> None:
    """Prompts of mixed lengths in chunks, a chain on all of them together, a rollback with other pairs, a chain."""
    assert isinstance(draft, Eagle3)
    pasts = [Past(w, c, n, 10 * i) for i, n in enumerate(LENGTHS)]
    feed = Feed(len(pasts))
    cache = draft.cache(feed.cache)
    last: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(until: list[int]) -> None:
        while any(s.length < n for s, n in zip(feed.sequences, until, strict=True)):
            at = [s.length for s in feed.sequences]
            counts = {i: min(chunk, n - at[i]) for i, n in enumerate(until) if n > at[i]}
            step = feed.step(counts, padding=2)
            rows = {i: slice(at[i], at[i] + n) for i, n in counts.items()}
            e, h = (torch.cat([getattr(pasts[i], x)[r] for i, r in rows.items()]) for x in ("embeds", "states"))
            found = draft.first(torch.cat([e, e[:2]]), torch.cat([h, h[:2]]), step, cache)
            states, outs = (x[:-2].split(list(counts.values())) for x in found)
            for i, state, out in zip(rows, states, outs, strict=True):
                want = eagle3(w, c, pasts[i].e, pasts[i].h)
                close(state, want[0][rows[i]])
                close(out, want[1][rows[i]])
                last[i] = state[-1:], out[-1:]

    def propose() -> None:
        for k in range(CHAIN):
            e = given(len(pasts), 64, 100 + k)
            state = torch.cat([last[i][0] for i in range(len(pasts))])
            found = draft.next(e, state, feed.step(dict.fromkeys(range(len(pasts)), 1)), cache)
            for i, past in enumerate(pasts):
                for got, want in zip(found, past.guess(e[i : i + 1]), strict=True):
                    close(got[i], want)
                last[i] = found[0][i : i + 1], found[1][i : i + 1]

    extend(list(LENGTHS))
    propose()
    for i, (sequence, past) in enumerate(zip(feed.sequences, pasts, strict=True)):
        sequence.length = LENGTHS[i]
        past.back(LENGTHS[i] + 1 + i)
    extend([n + 1 + i for i, n in enumerate(LENGTHS)])
    propose()
    assert not cache.rows[:, : cache.page_tokens].any()


@pytest.mark.parametrize("chunk", [100, 11])
@pytest.mark.parametrize("kind", EAGLES)
def test_eagle3_chains_equal_the_statement(kind: str, chunk: int) -> None:
    c = EAGLES[kind]
    w = randomized(c, 1)
    chains(opened(w, c, HEAD, ALONE), w, c, chunk)


@pytest.mark.parametrize("mesh", [Mesh(world=2, tp=2), Mesh(world=4, tp=4)], ids=str)
@pytest.mark.parametrize("kind", EAGLES)
def test_eagle3_chains_on_several_ranks(kind: str, mesh: Mesh) -> None:
    c = EAGLES[kind]
    w = randomized(c, 2)
    together(mesh, lambda ranks: chains(opened(w, c, HEAD, ranks), w, c, 30))


@pytest.mark.parametrize("kind", ["llama", "mla 3.1"])
def test_eagle3_by_the_card_s_ops(kind: str) -> None:
    """The kernels that a card runs, by Triton's interpreter."""
    c = EAGLES[kind]
    w = randomized(c, 3)
    chains(opened(w, c, HEAD, ALONE, ops=triton_ops(Jit())), w, c, 30)


def nodes(draft: Any, w: W, c: Config) -> None:
    """T64: a tree grown level by level behind two sequences gives each node what a chain of its ancestors gives."""
    parents = [-1, 0, 0, 1, 1, 2, 3, 5]
    bits, depth = ancestors(parents)
    feed, lengths = Feed(2), (21, 34)
    cache = draft.cache(feed.cache)
    states = []
    for i, n in enumerate(lengths):
        found = draft.first(given(n, 64, i), given(n, 192, i + 50), feed.step({i: n}), cache)
        states.append(found[0][-1:])
    grown: list[list[Tensor]] = [[], []]
    e = [given(len(parents), 64, 70 + i) for i in range(2)]
    for level in range(max(depth) + 1):
        mine = [j for j in range(len(parents)) if depth[j] == level]
        whole = feed.step({0: len(mine), 1: len(mine)}, parents=[[-1] * len(mine)] * 2)
        (part,) = whole.parts
        assert part.tree is not None
        visible = torch.tensor([int(bits[j]) for j in mine] * 2)
        tree = replace(part.tree, prefix=torch.tensor(lengths, dtype=torch.int32), visible=visible)
        places = torch.tensor([n + level for n in lengths]).repeat_interleave(len(mine))
        step = replace(whole, positions=places, parts=(replace(part, tree=tree),))
        before = [states[i] if parents[j] < 0 else grown[i][parents[j]] for i in range(2) for j in mine]
        found = draft.next(torch.cat([e[i][mine] for i in range(2)]), torch.cat(before), step, cache)[0]
        for i, rows in enumerate(found.chunk(2)):
            grown[i] += list(rows.split(1))
    for i, n in enumerate(lengths):
        past_e, past_h = given(n, 64, i), entered(w, c, given(n, 192, i + 50))
        for j in range(len(parents)):
            path = [k for k in range(len(parents)) if int(bits[j]) >> k & 1]
            seen_e, seen_h = past_e, past_h
            for k in path:
                state = eagle3(w, c, seen_e, seen_h)[0]
                seen_e, seen_h = torch.cat([seen_e, e[i][k : k + 1]]), torch.cat([seen_h, state[-1:]])
            close(grown[i][j][0], eagle3(w, c, seen_e, seen_h)[0][-1])


@pytest.mark.parametrize("ops", ["definitions", "card's"])
@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_a_tree_s_nodes_equal_chains(kind: str, ops: str) -> None:
    c = EAGLES[kind]
    w = randomized(c, 4)
    nodes(opened(w, c, HEAD, ALONE, ops=REF if ops == "definitions" else triton_ops(Jit())), w, c)


def blocks(draft: Any, w: W, c: Config, chunk: int = 100, causal: bool = False, amplitude: float = 1.0) -> list[Tensor]:
    """Two rounds over three sequences, context in chunks between: the largest difference to the statement each."""
    assert isinstance(draft, DFlash)
    feed, counts = Feed(3), (40, 5, 77)
    cache = draft.cache(feed.cache)
    states = [given(n + 3, 256, 20 + i) for i, n in enumerate(counts)]
    off = []
    for round_ in range(2):
        until = [n + round_ * (1 + i) for i, n in enumerate(counts)]
        while any(s.length < n for s, n in zip(feed.sequences, until, strict=True)):
            at = [s.length for s in feed.sequences]
            taken = {i: min(chunk, n - at[i]) for i, n in enumerate(until) if n > at[i]}
            step = feed.step(taken, padding=1)
            h = torch.cat([*(states[i][at[i] : at[i] + n] for i, n in taken.items()), torch.randn(1, 256)])
            draft.context(h, step, cache)
        kept = cache.rows.clone()
        embeds = given(3 * 4, 64, 90 + round_)
        step = feed.step(dict.fromkeys(range(3), 4))
        for sequence in feed.sequences:
            sequence.length -= 4
        found = draft.block_logits(embeds, step, cache)
        assert torch.equal(cache.rows, kept) and found.shape == (3, 3, VOCAB)
        for i, n in enumerate(until):
            rows = dflash(w, c, states[i][:n], embeds[4 * i : 4 * i + 4], causal, amplitude)
            off.append((found[i] - (rows @ HEAD.T)[1:]).abs().max())
    return off


@pytest.mark.parametrize("chunk", [100, 9])
def test_dflash_blocks_equal_the_statement(chunk: int) -> None:
    w = randomized(DFLASH, 5)
    assert max(blocks(opened(w, DFLASH, HEAD, ALONE), w, DFLASH, chunk)) <= BOUND


def test_dflash_by_the_card_s_ops() -> None:
    w = randomized(DFLASH, 5)
    assert max(blocks(opened(w, DFLASH, HEAD, ALONE, ops=triton_ops(Jit())), w, DFLASH)) <= BOUND


@pytest.mark.parametrize("world", [2, 4])
def test_dflash_blocks_on_several_ranks(world: int) -> None:
    w = randomized(DFLASH, 6)
    every = together(Mesh(world=world, tp=world), lambda ranks: blocks(opened(w, DFLASH, HEAD, ranks), w, DFLASH, 30))
    assert max(map(max, every)) <= BOUND


def test_what_is_disputed_of_dflash_is_a_switch() -> None:
    w, causal = randomized(DFLASH, 7), (True,) * 3
    assert max(blocks(opened(w, DFLASH, HEAD, ALONE, causal=causal), w, DFLASH, causal=True)) <= BOUND
    assert max(blocks(opened(w, DFLASH, HEAD, ALONE, rope_amplitude=1.4), w, DFLASH, amplitude=1.4)) <= BOUND
    assert max(blocks(opened(w, DFLASH, HEAD, ALONE, rope_amplitude=1.4), w, DFLASH)) > 10 * BOUND


def test_a_swapped_first_token_or_a_causal_block_is_found() -> None:
    """T63: the comparison can tell."""
    w = randomized(DFLASH, 8)
    assert max(blocks(opened(w, DFLASH, HEAD, ALONE, causal=(True,) * 3), w, DFLASH)) > 10 * BOUND
    assert max(blocks(opened(w, DFLASH, HEAD, ALONE, windows=(0, 0, 0)), w, DFLASH)) > 10 * BOUND
    draft: Any = opened(w, DFLASH, HEAD, ALONE)
    whole = draft.block_logits

    def swapped(embeds: Tensor, *rest: Any) -> Tensor:
        every = embeds.view(-1, 4, 64).clone()
        every[:, 0] = every[:, 1]
        return whole(every.view(-1, 64), *rest)

    draft.block_logits = swapped
    assert min(blocks(draft, w, DFLASH)) > 10 * BOUND


def test_head_and_ids() -> None:
    """Its own head or the target's, padded or with a table, whole or cut: ids the draft lacks are never proposed."""
    x = given(5, 64, 3)
    w = randomized(MLA, 1, lm_head=(48, 64))
    ids = torch.randperm(VOCAB)[:48].sort().values
    w["d2t"] = ids - torch.arange(48)
    small = MLA | {"draft_vocab_size": 48}
    want = torch.full((5, VOCAB), -torch.inf)
    want[:, ids] = x @ w["lm_head.weight"].T
    padded = randomized(MLA, 1, lm_head=(128, 64))
    wide = MLA | {"vocab_size": 128}
    for mesh in (Mesh(world=1, tp=1), Mesh(world=4, tp=4)):

        def logits(ranks: Ranks) -> list[Tensor]:
            drafts = [opened(w, small, HEAD, ranks), opened(padded, wide, HEAD, ranks)]
            drafts.append(opened(randomized(MLA, 1), MLA, HEAD, ranks))
            return [d.logits(x) for d in drafts]

        for found in together(mesh, logits):
            assert torch.equal(found[0].isinf(), want.isinf())
            close(found[0][:, ids], want[:, ids])
            close(found[1], x @ padded["lm_head.weight"][:VOCAB].T)
            close(found[2], x @ HEAD.T)


def test_float64_is_float64_throughout() -> None:
    """Where greedy runs are compared token for token, only the order of sums may differ."""
    w = randomized(MLA, 1)
    e, h = given(30, 64, 1).double(), given(30, 192, 2).double()
    outs = []
    for chunk in (30, 7):
        draft: Any = opened(w, MLA, HEAD, ALONE, torch.float64)
        feed = Feed(1, torch.float64)
        cache, found = draft.cache(feed.cache), []
        for at in range(0, 30, chunk):
            n = min(chunk, 30 - at)
            found.append(draft.first(e[at : at + n], h[at : at + n], feed.step({0: n}), cache)[1])
        outs.append(torch.cat(found))
    assert outs[0].dtype == torch.float64 and (outs[0] - outs[1]).abs().max() < 1e-12


CASES: list[tuple[Config, bool]] = [
    ({}, False), ({"window": 9}, False), ({"causal": False}, True), ({"causal": False, "window": 9}, True),
    ({"window": 40}, True), ({}, True),
]  # fmt: skip


@pytest.mark.parametrize(("how", "block"), CASES, ids=str)
def test_gqa_over_pages(device: str, how: Config, block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no token owns are NaN; several slices of queries."""
    monkeypatch.setattr(gqa_launch, "SLICE", 5)
    made = case(device, torch.float32, [4, 0, 12, 1], [70, 20, 12, 33], 8, 48, 80, 16)
    q = torch.randn(17, 8, 16, device=device)
    inputs = {k: made[k] for k in ("rows", "pages", "cu_q", "lengths", "page_tokens")} | {"scale": 0.25, "longest": 12}
    own = torch.randn(17, 128, device=device) if block else None
    want = gqa_ref.gqa(q, **inputs, block=own, **how)
    found = gqa_launch.gqa(q, **inputs, block=own, **how)
    assert found.isfinite().all() and (found - want).abs().max() <= 1e-5


def test_gqa_trees(device: str) -> None:
    made = case(device, torch.float32, [7, 2], [70, 40], 8, 48, 80, 16)
    q = torch.randn(9, 8, 16, device=device)
    visible = [*ancestors([-1, 0, 0, 1, 1, 2, 3])[0], *ancestors([-1, -1])[0]]
    tree = (torch.tensor([63, 38], dtype=torch.int32, device=device), torch.tensor(visible, device=device))
    inputs = {k: made[k] for k in ("rows", "pages", "cu_q", "lengths", "page_tokens")} | {"scale": 0.25, "longest": 7}
    want = gqa_ref.gqa(q, **inputs, tree=tree)
    assert (gqa_launch.gqa(q, **inputs, tree=tree) - want).abs().max() <= 1e-5
    assert (gqa_ref.gqa(q, **inputs) - want).abs().max() > 0.1


def test_no_tokens_of_gqa(device: str) -> None:
    made = case(device, torch.float32, [0], [5], 2, 64, 16, 16)
    q = torch.empty(0, 2, 20, device=device)
    where = [made[k] for k in ("rows", "pages", "cu_q", "lengths", "page_tokens")]
    ops: Ops = triton_ops(Jit())
    assert ops.gqa(q, *where, 1.0, 1).shape == (0, 2, 20)


def test_dflash_equals_transformers() -> None:
    """A DFlash draft that transformers carries for another target: the same layers under mostly the same names. Its
    window counts how far a key may be away, ours from where on it is not seen."""
    import transformers
    from transformers.cache_utils import DFlashCache

    rope = {k: v for k, v in DFLASH["rope_scaling"].items() if k != "type"}
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=64, num_hidden_layers=3, intermediate_size=96, vocab_size=120, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-5, block_size=4, mask_token_id=118, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, target_layer_ids=[0, 2, 3, 4], layer_types=DFLASH["layer_types"],
        sliding_window=DFLASH["sliding_window"] - 1, hidden_act="silu", attn_implementation="eager",
        rope_parameters=rope | {"rope_type": "yarn", "rope_theta": 100.0},
    )  # fmt: skip
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    w = randomized(DFLASH, 11)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({names.get(n, n): x for n, x in w.items()})
    states, embeds = given(77, 256, 1), given(4, 64, 2)
    past = DFlashCache(config=config)
    past.activate_past_recording()
    past.set_previous_accepted_tokens(77)
    with torch.no_grad():
        want = model(noise_embeds=embeds[None], context_hidden_states=states[None], cache=past).last_hidden_state[0]
    close(dflash(w, DFLASH, states, embeds), want)
    draft: Any = opened(w, DFLASH, HEAD, ALONE)
    feed = Feed(1)
    cache = draft.cache(feed.cache)
    draft.context(states, feed.step({0: 77}), cache)
    close(draft.block_logits(embeds, feed.step({0: 4}), cache)[0], (want @ HEAD.T)[1:])
