"""A compiled grammar at work in a rank: which tokens may come next. Needs xgrammar (extra `grammar`)."""

import re
from collections.abc import Sequence

import torch
import xgrammar
from torch import Tensor

from runtime_min.text import Tokenizer

# Raw control characters, which no string of JSON holds, though xgrammar lets them into strings with a length. Between
# the parts of JSON a model can do without tabs.
CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
# A byte that no UTF-8 holds: a token that begins with it matches no text.
NEVER = b"\xff"


def vocabulary(tokenizer: Tokenizer) -> xgrammar.TokenizerInfo:
    """The tokens as xgrammar knows them. A special token is matched by its id or not at all."""
    first = len(tokenizer.vocabulary.ranks)
    tokens = [
        NEVER + token if i >= first or CONTROL.search(token) else token
        for i, token in enumerate(tokenizer.vocabulary.tokens)
    ]
    stops = sorted(tokenizer.stop_ids)
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=stops)


class Constraint:
    """One request's place in its grammar."""

    def __init__(self, compiled: str, info: xgrammar.TokenizerInfo) -> None:
        grammar = xgrammar.CompiledGrammar.deserialize_json(compiled, info)
        self.matcher = xgrammar.GrammarMatcher(grammar)
        self.words = -(-info.vocab_size // 32)
        self.accepted = 0

    def mask(self, output: Sequence[int]) -> Tensor:
        """int32 [vocab / 32, rounded up]: bit i of word w is whether token 32 w + i may follow `output`, the answer so
        far, which only grows."""
        for token in output[self.accepted :]:
            # Behind an id of the request's own that ends it nothing is asked for.
            self.matcher.accept_token(token)
        self.accepted = len(output)
        return self._next()

    def behind(self, output: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """`mask` of `output` and then `drafted`, which may be taken back. What follows a token that is not allowed does
        not matter, since that token will not stand."""
        mask = self.mask(output)
        taken = 0
        for token in drafted:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                break
            taken += 1
        if taken:
            mask = self._next()
            self.matcher.rollback(taken)
        return mask

    def _next(self) -> Tensor:
        mask = torch.full((1, self.words), -1, dtype=torch.int32)
        if not self.matcher.is_terminated():
            self.matcher.fill_next_token_bitmask(mask)
        return mask[0]
