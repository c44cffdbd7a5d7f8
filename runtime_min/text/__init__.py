"""Text in and out of the runtime: ids, chat prompts, tool declarations. No remote code."""

from runtime_min.text.files import TokenizerError
from runtime_min.text.media import Slot
from runtime_min.text.messages import ChatError
from runtime_min.text.template import ChatTemplate
from runtime_min.text.tokenizer import Piece, Stream, Tokenizer
from runtime_min.text.tools import ToolError, declare

__all__ = [
    "ChatError",
    "ChatTemplate",
    "Piece",
    "Slot",
    "Stream",
    "Tokenizer",
    "TokenizerError",
    "ToolError",
    "declare",
]
