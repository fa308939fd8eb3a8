"""Which formats a model's answers have: as the options say, or by what its chat template teaches.

A format is a file in `tool_parsers` or `reasoning_parsers`; what they share is in `output_parsing`. Made by Renderer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.errors import OptionError, suggestion
from quire.renderer.output_parsing.format import ReasoningFormat, ToolFormat
from quire.renderer.output_parsing.parser import OutputParser
from quire.renderer.reasoning_parsers import REASONING_FORMATS
from quire.renderer.tool_parsers import TOOL_FORMATS

AUTO = "auto"
NONE = "none"
_PROMPT_END = 256
_Format = TypeVar("_Format", ToolFormat, ReasoningFormat)


@dataclass(frozen=True, kw_only=True)
class OutputFormats:
    """None: the text is taken as it is."""

    tool: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def choose(cls, templates: Iterable[str], *, tool: str = AUTO, reasoning: str = AUTO) -> OutputFormats:
        text = "\n".join(templates)
        return cls(
            tool=_chosen("tool_call_parser", tool, TOOL_FORMATS, text),
            reasoning=_chosen("reasoning_parser", reasoning, REASONING_FORMATS, text),
        )

    def answers(
        self,
        prompt: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continued: str | None = None,
        special_tokens: frozenset[str] = frozenset(),
        parallel_calls: bool = True,
        shows_reasoning: bool = True,
    ) -> AnswerFormats | None:
        """For the answers to one prompt. `continued`: the text of the assistant that they go on with. `special_tokens`:
        those of the tokenizer that are not to be shown. None if there is nothing to look for."""
        tool = self.tool if tools else None
        if tool is None and self.reasoning is None:
            return None
        marks = {*(tool.marks if tool else ()), *(self.reasoning.marks if self.reasoning else ())}
        return AnswerFormats(
            tool=tool,
            reasoning=self.reasoning,
            is_thinking=self.reasoning is not None and _is_thinking(self.reasoning, prompt, continued),
            tools=tools,
            hidden=special_tokens if marks & special_tokens else frozenset(),
            max_calls=None if parallel_calls else 1,
            shows_reasoning=shows_reasoning,
        )


@dataclass(frozen=True, kw_only=True)
class AnswerFormats:
    """What the parsers of all answers to one prompt are made of."""

    tool: ToolFormat | None
    reasoning: ReasoningFormat | None
    is_thinking: bool
    tools: Sequence[Mapping[str, Any]]
    hidden: frozenset[str]
    max_calls: int | None
    shows_reasoning: bool

    @property
    def needs_special_tokens(self) -> bool:
        """Marks are special tokens of this tokenizer: the text must hold them. They are taken out afterwards."""
        return bool(self.hidden)

    def open_parser(self) -> OutputParser:
        return OutputParser(
            self.tool,
            self.reasoning,
            is_thinking=self.is_thinking,
            tools=self.tools,
            hidden=self.hidden,
            max_calls=self.max_calls,
            shows_reasoning=self.shows_reasoning,
        )


def _chosen(option: str, name: str, formats: Mapping[str, _Format], template: str) -> _Format | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((one for one in formats.values() if one.is_taught_by(template)), None)
    if name not in formats:
        names = (AUTO, NONE, *formats)
        raise OptionError(f"{option}={name!r}: must be one of {', '.join(names)}.{suggestion(name, names)}")
    return formats[name]


def _is_thinking(reasoning: ReasoningFormat, prompt: str, continued: str | None) -> bool:
    if not reasoning.opening:
        return False
    if continued is not None:
        return continued.rfind(reasoning.opening) > continued.rfind(reasoning.closing)
    # of a prompt only the end counts: a user may write anything into it
    return prompt[-_PROMPT_END:].rstrip().endswith(reasoning.opening)
