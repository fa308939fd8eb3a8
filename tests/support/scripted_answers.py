"""Answers that a test writes in place of the model: what no small model says, such as tables, tools and attacks."""

from __future__ import annotations

import json
from typing import Any

from tests.support.browser import Tab

# Between two pieces the page gets its turn, as it does between two packets.
_STUB = """
(() => {
  const real = window.fetch;
  window.asked = [];
  window.fetch = (path, options) => {
    if (path !== '/v1/chat/completions') return real(path, options);
    window.asked.push(JSON.parse(options.body));
    const deltas = [...window.deltas];
    const bytes = (data) => new TextEncoder().encode(`data: ${data}\\n\\n`);
    const event = (data) => bytes(JSON.stringify(data));
    const usage = { completion_tokens: deltas.length, prompt_tokens: 5 };
    const body = new ReadableStream({
      async pull(controller) {
        await new Promise((go) => setTimeout(go, window.pause ?? 0));
        if (options.signal.aborted) return controller.error(new DOMException('stopped', 'AbortError'));
        const delta = deltas.shift();
        if (delta !== undefined) return controller.enqueue(event({ choices: [{ delta, finish_reason: null }] }));
        controller.enqueue(event({ choices: [], usage }));
        controller.enqueue(bytes('[DONE]'));
        controller.close();
      },
    });
    return Promise.resolve(new Response(body, { headers: { 'content-type': 'text/event-stream' } }));
  };
})()
"""


def script(tab: Tab, *deltas: dict[str, Any], pause_ms: int = 0) -> None:
    """Every further answer in this tab is made of these."""
    tab.evaluate(f"window.fetch.isScripted || {_STUB}; window.fetch.isScripted = true")
    tab.evaluate(f"window.deltas = {json.dumps(deltas)}; window.pause = {pause_ms}; 0")


def pieces(text: str, length: int = 7) -> list[dict[str, Any]]:
    """A text as deltas of that many characters."""
    return [{"content": text[at : at + length]} for at in range(0, len(text), length)]


def ask(tab: Tab, question: str, *, waits: bool = True) -> None:
    """Types a question and sends it; waits for the whole answer."""
    tab.evaluate("document.querySelector('#prompt').focus()")
    tab.type(question)
    tab.press("Enter")
    if waits:
        tab.wait_until("document.querySelector('#chat-status').textContent === 'The answer is complete.'")
        tab.evaluate("document.querySelector('#chat-status').textContent = ''")
