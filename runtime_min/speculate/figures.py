"""What became of drafted tokens, by the definitions of vLLM and LMDeploy, always from sums over all requests.

Of every step in which a request had drafts: drafts + 1, draft_tokens + what was proposed, accepted + the length of the
accepted run, accepted_at[i] + 1 for every i inside it. The token that the prompt itself gives belongs to no step here,
and of a run that a stop cuts only what was given out counts.
"""

from dataclasses import dataclass
from typing import Any

# Steps with drafts after which an acceptance next to nothing is told once.
TRIED = 256
USELESS = 1.05
CAUSES = (
    "a draft of another model or fine-tune, layers of its config read by the wrong convention (`kiln plan` tells "
    "which), a missing or wrong id table or output head, or prompts unlike those it was trained on"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Sums since the start. draft_ms, verify_ms: spent in steps that had drafts, on drafting and on the target."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    steps: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def rate(self) -> float:
        """Draft acceptance rate: accepted of proposed tokens. A tree proposes all of its nodes."""
        return self.accepted / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def length(self) -> float:
        """Mean accept length: tokens of a step, the target's own one among them."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Of all steps with drafts those in which the i-th token of the run was accepted: it never rises with i."""
        return tuple(n / self.drafts for n in self.accepted_at) if self.drafts else ()

    @property
    def conditional(self) -> tuple[float, ...]:
        """The same of those steps only in which the one before was accepted."""
        before = (self.drafts, *self.accepted_at)
        return tuple(n / b if b else 0.0 for n, b in zip(self.accepted_at, before, strict=False))

    def plus(self, proposed: int, accepted: int) -> "Acceptance":
        """With one more step of one request."""
        longest = max(len(self.accepted_at), accepted)
        at = [*self.accepted_at, *[0] * (longest - len(self.accepted_at))]
        return Acceptance(
            drafts=self.drafts + 1,
            draft_tokens=self.draft_tokens + proposed,
            accepted=self.accepted + accepted,
            accepted_at=tuple(n + (i < accepted) for i, n in enumerate(at)),
            steps=self.steps,
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
        )

    def took(self, draft_ms: float, verify_ms: float) -> "Acceptance":
        """With the times of one more step."""
        return Acceptance(
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted=self.accepted,
            accepted_at=self.accepted_at,
            steps=self.steps + 1,
            draft_ms=self.draft_ms + draft_ms,
            verify_ms=self.verify_ms + verify_ms,
        )

    def since(self, before: "Acceptance") -> "Acceptance":
        """What came after `before`, earlier sums of the same engine."""
        olds = [*before.accepted_at, *[0] * (len(self.accepted_at) - len(before.accepted_at))]
        return Acceptance(
            drafts=self.drafts - before.drafts,
            draft_tokens=self.draft_tokens - before.draft_tokens,
            accepted=self.accepted - before.accepted,
            accepted_at=tuple(n - b for n, b in zip(self.accepted_at, olds, strict=True)),
            steps=self.steps - before.steps,
            draft_ms=self.draft_ms - before.draft_ms,
            verify_ms=self.verify_ms - before.verify_ms,
        )

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        each = max(self.steps, 1)
        return {
            "drafts": self.drafts, "draft_tokens": self.draft_tokens, "accepted": self.accepted,
            "mean_accept_length": self.length, "draft_acceptance_rate": self.rate,
            "per_position": list(self.rates), "conditional": list(self.conditional), "steps": self.steps,
            "draft_ms_per_step": self.draft_ms / each, "verify_ms_per_step": self.verify_ms / each,
        }  # fmt: skip

    def line(self) -> str:
        """For people."""
        places = " / ".join(f"{100 * r:.1f}" for r in self.rates) or "none"
        return (
            f"mean accept length {self.length:.2f}, acceptance rate {100 * self.rate:.1f}%, per position {places} "
            f"({self.drafts} drafts)"
        )

    def warning(self) -> str | None:
        """One line once there were enough steps and next to nothing was accepted."""
        if self.drafts < TRIED or self.length >= USELESS:
            return None
        return f"warning: drafts are useless here: {self.line()}. Likely causes: {CAUSES}"
