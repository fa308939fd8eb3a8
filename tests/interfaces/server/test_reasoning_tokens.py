"""reasoning_tokens in the usage: tokens of thoughts, however their text came, and not those of tags."""

import asyncio
import threading

import pytest

from quire.interfaces.server.openai import reasoning_tokens
from quire.interfaces.server.openai.reasoning_tokens import count_reasoning_tokens, total_reasoning_tokens
from quire.interfaces.text_threads import TextThreads
from quire.renderer import Renderer
from quire.renderer.output_formats import OutputFormats
from quire.sampling_params import SamplingParams
from quire.testing.fake_engine import write_byte_checkpoint

THOUGHT = "Zwölf? \U0001f914"
ANSWER = f"<think>{THOUGHT}</think>The answer."


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer.from_folder(write_byte_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("text", "format_name", "thought"),
    [
        (ANSWER, "think", THOUGHT),
        (ANSWER.removesuffix("</think>The answer."), "think", THOUGHT),
        ("No thought.", "think", ""),
        ("  <think></think>x", "think", ""),
        ("still thinking</think>done", "deepseek_r1", "still thinking"),
        (
            "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|>"
            "<|start|>assistant<|channel|>final<|message|>d<|return|>",
            "openai_gptoss",
            "abc",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_letters_of_thoughts_whatever_pieces_they_come_in(renderer, text, format_name, thought, size):
    parser = OutputFormats.choose([], reasoning=format_name).answers("").open_parser()
    for start in range(0, len(text), size):
        parser.push(text[start : start + size], is_last=start + size >= len(text))
    assert "".join(text[start:end] for start, end in parser.thoughts) == thought
    # one token a byte
    tokens = list(text.encode())
    found = count_reasoning_tokens(renderer, [65], SamplingParams(), tokens, parser.thoughts)
    assert found == len(thought.encode())


def test_special_tokens_and_stops_are_no_thoughts(renderer):
    tokens = [*b"<think>ab", 256]
    for skip in (True, False):
        assert count_reasoning_tokens(renderer, [], SamplingParams(skip_special_tokens=skip), tokens, [(7, 9)]) == 2
    assert count_reasoning_tokens(renderer, [], SamplingParams(), tokens, []) == 0


def test_long_answers_are_counted_beside_the_event_loop(run, renderer, monkeypatch):
    threads = []

    def count(*args):
        threads.append(threading.current_thread())
        return count_reasoning_tokens(*args)

    monkeypatch.setattr(reasoning_tokens, "count_reasoning_tokens", count)

    async def main():
        for length, thoughts, is_beside in ((9, [(7, 9)], False), (2_000, [(7, 1_500)], True), (2_000, [], False)):
            answer = ([*b"<think>", *b"a" * (length - 7)], thoughts)
            found = await total_reasoning_tokens(TextThreads(), renderer, [65], SamplingParams(), [answer, answer])
            assert found == 2 * sum(end - start for start, end in thoughts)
            assert {one is not threading.main_thread() for one in threads} == {is_beside}
            threads.clear()

    run(main())


def test_the_usage_of_a_chat(run, served, events_of):
    async def main():
        async with served() as server:
            server.engine.renderer.output_formats = OutputFormats.choose([], reasoning="think")
            server.fake.reply_to = lambda request, index: ANSWER
            whole = (await server.chat(n=2)).json()
            assert whole["choices"][0]["message"]["reasoning_content"] == THOUGHT.strip()
            assert whole["choices"][0]["message"]["content"] == "The answer."
            counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert counted == 2 * len(THOUGHT.encode())
            stream = await server.chat(n=2, stream=True, stream_options={"include_usage": True})
            assert events_of(stream.text)[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted
            cut = (await server.chat(stop=["lf"])).json()
            assert cut["choices"][0]["message"]["content"] is None
            # the tokens of the stop string show nothing
            assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Zwö".encode())

    run(main())


def test_a_streamed_chat_is_counted_beside_the_event_loop_while_others_go_on(run, served, events_of, monkeypatch):
    go_on, threads = threading.Event(), []

    def count(*args):
        threads.append(threading.current_thread())
        assert go_on.wait(20)
        return count_reasoning_tokens(*args)

    monkeypatch.setattr(reasoning_tokens, "count_reasoning_tokens", count)
    monkeypatch.setattr(reasoning_tokens, "LONG_ANSWER", 10)

    async def main():
        async with served() as server:
            server.engine.renderer.output_formats = OutputFormats.choose([], reasoning="think")
            server.fake.reply_to = lambda request, index: ANSWER
            asked = asyncio.ensure_future(server.chat(stream=True, stream_options={"include_usage": True}))
            while not threads:
                await asyncio.sleep(0)
            assert (await server.complete("Hi")).status_code == 200
            assert not asked.done()
            go_on.set()
            usage = events_of((await asked).text)[-1]["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT.encode())
            assert threading.main_thread() not in threads

    run(main())


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_does_not_wait_for_the_long_texts_of_others(run, served, monkeypatch, is_stream):
    monkeypatch.setattr(reasoning_tokens, "LONG_ANSWER", 10)
    go_on = threading.Event()

    async def main():
        async with served() as server:
            server.engine.renderer.output_formats = OutputFormats.choose([], reasoning="think")
            server.fake.reply_to = lambda request, index: ANSWER
            texts = [asyncio.ensure_future(server.state.models.text_threads.call(go_on.wait, 20)) for _ in range(2)]
            await asyncio.sleep(0)
            options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
            answer = await server.chat(**options)
            assert f'"reasoning_tokens":{len(THOUGHT.encode())}' in answer.text
            assert not any(text.done() for text in texts)
            go_on.set()
            await asyncio.gather(*texts)

    run(main())
