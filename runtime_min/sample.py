"""From logits to the next tokens: many requests at once, on the device, each as if it were alone.

A request's random numbers depend on its seed, the position of the token and the token's id, on nothing else: the token
is the largest of log-probability plus Gumbel noise, which is a draw from the distribution (the Gumbel-max rule).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specs.errors import InputError

# Random streams of one request: what is drawn for one purpose says nothing about another.
TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)


class SamplingError(InputError):
    """Sampling parameters outside their ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request chooses tokens.

    temperature 0 is greedy. Filters act in this order: top_k keeps that many tokens, 0 all; top_p the fewest of those
    with at least that mass; min_p those at least that likely against the likeliest. Equals of the last one kept stay.
    presence and frequency are subtracted for generated tokens, once and per occurrence; repetition divides positive
    and multiplies negative logits of all tokens of prompt and output. bias: (id, added logit). seed None: any.
    logprobs: report the log-probability of each token, and of that many likeliest; of the model, before any of these.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0, 100), "top_p": (1e-9, 1), "top_k": (0, 1 << 31), "min_p": (0, 1), "presence": (-2, 2),
            "frequency": (-2, 2), "repetition": (1e-3, 1e3), "logprobs": (0, 1024),
        }  # fmt: skip
        problems = [
            f"{name}: found {value}, expected {low} to {high}"
            for name, (low, high) in ranges.items()
            if (value := getattr(self, name)) is not None and not low <= value <= high
        ]
        if problems:
            raise SamplingError(problems)

    @property
    def penalised(self) -> bool:
        return bool(self.presence or self.frequency or self.repetition != 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """n rows that are drawn at random, on the device: seeds, positions [n] int64; knobs [n, 4] float64: temperature
    (above 0), top_k, top_p, min_p. On the host: filtered, whether any row has top_k or top_p."""

    seeds: Tensor
    positions: Tensor
    knobs: Tensor
    filtered: bool


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64 bits whose output looks random (the finalizer of splitmix64). int64 products wrap."""
    x = (x ^ _right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shift right that fills with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, positions: Tensor, count: int, stream: int = TOKEN) -> Tensor:
    """[n, count] float64 inside (0, 1), a function of seed, position, stream and column."""
    state = _mixed(_mixed(seeds + stream * 0x1E3779B97F4A7C15) ^ positions)
    column = torch.arange(1, count + 1, device=seeds.device) * -0x61C8864680B583EB
    return (_right(_mixed(state[:, None] + column), 11).double() + 0.5) * 2.0**-53


def filtered(logits: Tensor, rows: Rows) -> Tensor:
    """logits [n, V] -> float64 after temperature, -inf where a filter drops a token."""
    temperature, top_k, top_p, min_p = rows.knobs[:, :, None].unbind(1)
    scaled = logits.double() / temperature
    least = scaled.amax(-1, keepdim=True) + min_p.log()
    if rows.filtered:
        ordered = scaled.sort(-1, descending=True).values
        size = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1]).long()
        kept = ordered.masked_fill(ordered < ordered.gather(-1, size - 1), -torch.inf)
        p = kept.softmax(-1)
        # A token stays if the mass before it has not reached top_p: the likeliest one always does.
        stays = ((p.cumsum(-1) - p < top_p) | (top_p >= 1)) & (kept > -torch.inf)
        last = stays.sum(-1, keepdim=True).clamp(min=1) - 1
        least = torch.maximum(least, ordered.gather(-1, last))
    return scaled.masked_fill(scaled < least, -torch.inf)


def probabilities(logits: Tensor, rows: Rows) -> Tensor:
    """The distribution [n, V] float64 that `draw` draws from."""
    return filtered(logits, rows).softmax(-1)


def draw(logits: Tensor, rows: Rows, stream: int = TOKEN) -> Tensor:
    """logits [n, V] -> ids [n] int64."""
    noise = -(-uniform(rows.seeds, rows.positions, logits.shape[1], stream).log()).log()
    return (filtered(logits, rows) + noise).argmax(-1)


def penalised(logits: Tensor, counts: Tensor, seen: Tensor, weights: Tensor) -> Tensor:
    """logits [n, V] after penalties; counts [n, V] of generated tokens, seen [n, V] bool in prompt or output, weights
    [n, 3] presence, frequency, repetition."""
    presence, frequency, repetition = weights.to(logits.dtype)[:, :, None].unbind(1)
    divided = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, divided, logits)
    return logits - frequency * counts - presence * (counts > 0)
