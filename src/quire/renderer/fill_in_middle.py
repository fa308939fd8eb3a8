"""The tokens by which a model is asked for what stands between two texts, and the prompt made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.renderer.renderer import Renderer


@dataclass(frozen=True, slots=True)
class MiddleMarks:
    """Each is one token of the model's vocabulary."""

    before: str
    after: str
    middle: str

    def around(self, prefix: str, suffix: str) -> str:
        return f"{self.before}{prefix}{self.after}{suffix}{self.middle}"


# Of Qwen and Granite 4, of StarCoder, SantaCoder and older Granites, of CodeGemma, of DeepSeek, of GLM, of CodeLlama.
_KNOWN = (
    MiddleMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    MiddleMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    MiddleMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    MiddleMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    MiddleMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    MiddleMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


def middle_marks(renderer: Renderer) -> MiddleMarks | None:
    """None: the model was not trained for it."""
    if not renderer.has_tokenizer:
        return None
    return next((marks for marks in _KNOWN if renderer.has_tokens((marks.before, marks.after, marks.middle))), None)
