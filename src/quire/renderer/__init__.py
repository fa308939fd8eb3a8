"""RENDERER: text and chats to tokens; tokens to text (4.3.2)."""

from quire.renderer.chat_template import NotBriefError
from quire.renderer.growing_text import GrowingText
from quire.renderer.renderer import RenderedPrompt, Renderer
from quire.renderer.text_stream import TextDelta, TextStream

__all__ = ["GrowingText", "NotBriefError", "RenderedPrompt", "Renderer", "TextDelta", "TextStream"]
