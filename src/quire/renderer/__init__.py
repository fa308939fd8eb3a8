"""RENDERER: text and chats to tokens; tokens to text (4.3.2)."""

from quire.renderer.renderer import RenderedPrompt, Renderer
from quire.renderer.text_stream import TextDelta, TextStream

__all__ = ["RenderedPrompt", "Renderer", "TextDelta", "TextStream"]
