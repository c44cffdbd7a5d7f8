"""What a trained model is worth, in plain torch: bits per byte, digits named, answers that end, tokens accepted."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from convert.demo.training import pictures as pics
from convert.demo.training import tokens
from convert.demo.training.chats import Chat, Turn
from convert.demo.training.corpus import Document
from convert.demo.training.dflash import blocks
from convert.demo.training.drafts import BLOCK, TAPS, Draft
from convert.demo.training.eagle import Unroll
from convert.demo.training.loop import Setup
from convert.demo.training.model import Facts, Pictures, forward, logits
from convert.demo.training.params import Params
from convert.demo.training.tower import tower

PROMPTS = (
    "Hello",
    "Who are you?",
    "What can you do?",
    "What is a list?",
    "What does math.sqrt do?",
    "What is the module `textwrap` for?",
    "Tell me about json.",
    "What is the capital of France?",
    "What does shutil.copy do?",
    "How do I open a file in Python?",
)
ANSWER = 64
K = 4


@torch.no_grad()
def bits_per_byte(facts: Facts, w: Params, biases: Tensor, documents: Sequence[Document], length: int) -> float:
    """Of the documents' text, each read from its beginning in windows of `length` tokens, which begin with [EOS]."""
    end, bits, size = tokens.IDS["[EOS]"], 0.0, 0
    windows = []
    for document in documents:
        ids = tokens.encoding().encode_ordinary(document.text)
        size += len(document.text.encode())
        windows += [[end, *ids[i : i + length]] for i in range(0, len(ids), length)]
    for i in range(0, len(windows), 16):
        group = windows[i : i + 16]
        padded = torch.tensor([r + [-1] * (length + 1 - len(r)) for r in group], device=biases.device)
        out = forward(facts, w, biases, padded[:, :-1].clamp_min(0))
        loss = cross_entropy(
            logits(w, out.hidden).flatten(0, 1), padded[:, 1:].flatten(), ignore_index=-1, reduction="sum"
        )
        bits += loss.item() / math.log(2)
    return bits / size


@torch.no_grad()
def digit_accuracy(setup: Setup, w: Params, biases: Tensor, digits: Sequence[pics.Digit]) -> float:
    """Share of digits whose whole answer is the greedy one."""
    facts, right = setup.facts(), 0
    device = biases.device
    for digit in digits:
        picture = pics.shown(digit)
        chat = Chat("", (Turn("What do you see?", "", picture.say),), False)
        ids = torch.tensor([tokens.rendered(chat, True, pics.TOKENS)], device=device)
        patches = torch.from_numpy(pics.patches(picture.pixels[None])).to(device)
        where = (ids[0] == tokens.PAD).nonzero().squeeze(1)
        shown = Pictures(where, tower(setup.geometry, w, patches).flatten(0, 1))
        best = logits(w, forward(facts, w, biases, ids[:, :-1], pictures=shown).hidden).argmax(-1)[0]
        first = (ids[0] == tokens.IDS["</think>"]).nonzero()[0].item()
        right += bool((best[int(first) :] == ids[0, int(first) + 1 :]).all())
    return right / len(digits)


def prompt_ids(ask: str) -> list[int]:
    """A question in instant mode, up to where the answer begins."""
    whole = tokens.rendered(Chat("", (Turn(ask, "", ""),), False))
    return whole[:-1]


@torch.no_grad()
def greedy(facts: Facts, w: Params, biases: Tensor, prompt: list[int], count: int = ANSWER) -> list[int]:
    """The answer's ids, with the token that ends it if it comes within `count`."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and ids[-1] != tokens.STOP:
        row = torch.tensor([ids], device=biases.device)
        ids.append(int(logits(w, forward(facts, w, biases, row).hidden[:, -1]).argmax()))
    return ids[len(prompt) :]


def accept_length(accepted: Tensor, first: int) -> tuple[int, int]:
    """(tokens, rounds) of a sequence whose position p has `accepted[p]` right proposals for p + 2 and on."""
    at, rounds = first, 0
    while at < len(accepted):
        at += 1 + int(accepted[at])
        rounds += 1
    return at - first, rounds


@torch.no_grad()
def accept_lengths(
    setup: Setup,
    w: Params,
    biases: Tensor,
    made: Mapping[str, Draft],
    params: Mapping[str, Params],
    own: Tensor,
    answers: Mapping[str, list[int]],
) -> dict[str, float]:
    """Tokens a round of each draft on the target's own greedy answers to prompts: K proposals, a block of DFlash."""
    facts, sums = setup.facts(), {name: [0, 0] for name in made}
    for ask, answer in answers.items():
        prompt = prompt_ids(ask)
        ids = torch.tensor([prompt + answer], device=biases.device)
        out = forward(facts, w, biases, ids, taps=TAPS)
        states = torch.cat(out.taps, -1).to(setup.dtype)
        for name, draft in made.items():
            u = {n: t.detach().to(torch.bfloat16).to(setup.dtype) for n, t in params[name].items()}
            if draft.kind == "dflash":
                proposed = dflash_proposals(draft, u, w, states, ids)
            else:
                proposed = eagle_proposals(draft, u, w, states, ids, own)
            got, rounds = accept_length(matches(proposed, ids[0]), len(prompt) - 1)
            sums[name] = [sums[name][0] + got, sums[name][1] + rounds]
    return {name: got / rounds for name, (got, rounds) in sums.items()}


def matches(proposed: Tensor, ids: Tensor) -> Tensor:
    """proposed [P, K]: guesses at position p for tokens p + 2 and on -> leading right ones, for p + 1 < len(ids)."""
    rows, k = proposed.shape
    at = torch.arange(rows, device=ids.device)[:, None] + 2 + torch.arange(k, device=ids.device)
    right = (at < len(ids)) & (proposed == ids[at.clamp_max(len(ids) - 1)])
    return right.int().cumprod(1).sum(1)[: len(ids) - 1]


def eagle_proposals(draft: Draft, u: Params, w: Params, states: Tensor, ids: Tensor, own: Tensor) -> Tensor:
    """[S - 1, K]: at each position, K greedy proposals that follow one another."""
    unroll = Unroll(draft, u, states[:, :-1])
    tokens_now, out = ids[:, 1:], []
    for _ in range(K):
        first = linear(unroll.step(w["embed"][tokens_now]), u.get("head", w["head"])).argmax(-1)
        tokens_now = own.to(ids.device)[first] if "head" in u else first
        out.append(tokens_now[0])
    return torch.stack(out, 1)


def dflash_proposals(draft: Draft, u: Params, w: Params, states: Tensor, ids: Tensor) -> Tensor:
    """[S - 1, BLOCK - 1]: at position p a block that begins with token p + 1."""
    starts = torch.arange(1, ids.shape[1], device=ids.device)
    masks = w["embed"][tokens.MASK].expand(1, len(starts), BLOCK - 1, -1)
    embeds = torch.cat([w["embed"][ids[:, starts]][:, :, None], masks], 2).flatten(1, 2)
    # Blocks at the end reach past the text: their rotary table must too.
    longer = torch.nn.functional.pad(states, (0, 0, 0, BLOCK))
    out = blocks(draft, u, longer, embeds, starts)[0].view(len(starts), BLOCK, -1)
    return linear(out[:, 1:], w["head"]).argmax(-1)
