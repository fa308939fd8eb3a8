"""How much a model is to think: OpenAI's word for it, in the values that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.interfaces.server.wire.errors import invalid

NO_EFFORT = "none"
# OpenAI's, and the last one of DeepSeek and Anthropic
EFFORTS = (NO_EFFORT, "minimal", "low", "medium", "high", "xhigh", "max")
# Qwen's and most others' name; DeepSeek's and Granite's
_SWITCHES = ("enable_thinking", "thinking")


def thinking_switch(*, is_on: bool) -> dict[str, Any]:
    """Values for the template. One that has no such switch does not look at them."""
    return dict.fromkeys(_SWITCHES, is_on)


def template_kwargs_of(effort: str | None, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """The effort, and whether there is to be any; `own` are the request's values for the template, and win."""
    if effort is None:
        return dict(own or {})
    if effort not in EFFORTS:
        text = f"must be one of {', '.join(EFFORTS)}; what a level means is the model's"
        raise invalid(f"reasoning_effort={effort[:40]!r}: {text}.", "reasoning_effort")
    return {"reasoning_effort": effort, **thinking_switch(is_on=effort != NO_EFFORT), **(own or {})}
