"""What is rendered beside the event loop, and what within it."""

import json

import pytest

LONG = "a" * 2500
PART = {"type": "text", "text": "a" * 1300}


def calls_in_threads(server, monkeypatch) -> list:
    """Grows with each one."""
    texts = server.state.models.text_threads
    calls, call = [], texts.call
    monkeypatch.setattr(texts, "call", lambda *args, **options: calls.append(args) or call(*args, **options))
    return calls


@pytest.mark.parametrize(
    ("content", "is_long"), [("a", False), (LONG, True), ([PART], False), ([PART, PART], True), (None, False)]
)
def test_long_texts_are_rendered_beside_the_event_loop(run, served, monkeypatch, content, is_long):
    async def main():
        async with served(max_model_len=4096) as server:
            calls = calls_in_threads(server, monkeypatch)
            role = "user" if content else "assistant"
            extra = {} if content else {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
            messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": content, **extra}]
            answer = await server.post("/v1/chat/completions", {"messages": messages})
            assert answer.status_code == 200, answer.text
            assert len(calls) == is_long

    run(main())


CALL = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"text": LONG})}}


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, {}),
        ({"role": "assistant", "content": "a"}, {"chat_template_kwargs": {"mood": LONG}}),
    ],
)
def test_so_are_long_texts_elsewhere_in_a_chat(run, served, monkeypatch, message, options):
    async def main():
        async with served(max_model_len=8192) as server:
            calls = calls_in_threads(server, monkeypatch)
            messages = [{"role": "user", "content": "Hi"}, message]
            answer = await server.post("/v1/chat/completions", {"messages": messages, **options})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] > len(LONG)
            assert len(calls) == 1

    run(main())


@pytest.mark.parametrize(("num_tokens", "is_long"), [(10, False), (4050, True)])
def test_many_tokens_become_text_beside_the_event_loop(run, served, monkeypatch, num_tokens, is_long):
    async def main():
        async with served(max_model_len=8192) as server:
            calls = calls_in_threads(server, monkeypatch)
            tokens = [5] * num_tokens
            text = server.state.serving.engine.renderer.decode(tokens)
            answer = await server.post("/detokenize", {"tokens": tokens})
            assert answer.json() == {"prompt": text}
            assert len(calls) == is_long
            answer = await server.post("/v1/completions", {"prompt": tokens, "echo": True, "max_tokens": 0})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text
            assert len(calls) == 2 * is_long

    run(main())
