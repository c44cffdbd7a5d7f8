"""Drafts: small models that guess the target's next tokens from its hidden states."""

from runtime_min.drafts.dflash import DFlash
from runtime_min.drafts.eagle3 import Eagle3
from runtime_min.drafts.open import Draft, Opened, open_draft, require

__all__ = ["DFlash", "Draft", "Eagle3", "Opened", "open_draft", "require"]
