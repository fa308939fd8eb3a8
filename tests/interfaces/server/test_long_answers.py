"""Answers that are long leave the event loop its turns: they are made, encoded and sent in parts."""

import asyncio
import contextlib
import json
import sys
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from quire.engine_client import TokenDelta
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.generation import Generation, Unobserved
from quire.interfaces.server.cohere import CohereEmbedAnswer, CohereMeta, CohereVectors
from quire.interfaces.server.openai.logprobs import (
    CompletionLogprobsBuilder,
    TokenNames,
    chat_logprobs,
    prompt_logprobs_json,
)
from quire.interfaces.server.openai.responses import CachedTokens, Completion, CompletionChoice, CompletionTokens, Usage
from quire.interfaces.server.openai_responses.answer import ResponseAnswer
from quire.interfaces.server.services import NothingIsKept
from quire.interfaces.server.wire.json_answer import JsonArray, json_answer, long_json_answer, pieces_of
from quire.interfaces.turnstile import Turnstile
from quire.messages import TokenLogprobs
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_renderer

# A call of a Python function takes some 0.1 us here; without parts there are 100,000 to a million of them.
MOST_CALLS_OF_A_TURN = 30_000


@contextlib.contextmanager
def calls_by_turn():
    """How many Python functions were called in each turn of the event loop, of this thread."""
    counts = []
    run_once = asyncio.events.Handle._run
    num_calls = 0

    def on_event(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call"

    def run(handle):
        nonlocal num_calls
        num_calls = 0
        try:
            return run_once(handle)
        finally:
            counts.append(num_calls)

    asyncio.events.Handle._run = run
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        asyncio.events.Handle._run = run_once


TEXT = ("word " * 60).strip()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [TEXT] * 2_000}),
        ("/v1/embeddings", {"input": [TEXT] * 2_000, "encoding_format": "base64"}),
        ("/v1/completions", {"prompt": [TEXT] * 200, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [TEXT] * 200, "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": TEXT, "n": 8, "echo": True, "logprobs": 5, "max_tokens": 2, "stream": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(name for name in value),
)
def test_no_turn_of_the_event_loop_has_much_to_do(run, served, path, body):
    async def main():
        async with served(max_num_queued_requests=4_000, max_num_queued_tokens=10**6) as server:
            # what is made once is made
            await server.http.post(path, json=body)
            with calls_by_turn() as counts:
                answer = await server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text[:400]
            assert max(counts) < MOST_CALLS_OF_A_TURN

    run(main())


class Texts:
    """As much of a renderer as log-probabilities need."""

    def token_text(self, token_id):
        return chr(97 + token_id % 26)

    def token_bytes(self, token_id):
        return self.token_text(token_id).encode()

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(self.token_text, token_ids))


NUM_TOKENS = 1_000
IDS = list(range(NUM_TOKENS))
SCORES = [{token_id + k: Logprob(-k - 0.5, k + 1, None) for k in range(4)} for token_id in IDS]


async def whole_completion():
    return await CompletionLogprobsBuilder(TokenNames(Texts()), 3, skip_special_tokens=True).build_whole(
        IDS, [None, *SCORES[1:]], Turnstile(4_000)
    )


async def whole_prompt():
    return await prompt_logprobs_json([None, *SCORES[1:]], Turnstile(4_000))


@pytest.mark.parametrize(
    ("whole", "at_once"),
    [
        (
            whole_completion,
            lambda: CompletionLogprobsBuilder(TokenNames(Texts()), 3, skip_special_tokens=True).build(
                IDS, [None, *SCORES[1:]]
            ),
        ),
        (
            whole_prompt,
            lambda: [
                None,
                *(
                    {str(t): {"logprob": e.logprob, "rank": e.rank, "decoded_token": None} for t, e in position.items()}
                    for position in SCORES[1:]
                ),
            ],
        ),
    ],
)
def test_log_probabilities_in_parts_are_the_same(run, whole, at_once):
    async def main():
        making = asyncio.ensure_future(whole())
        num_turns = 0
        while not making.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert num_turns > NUM_TOKENS // 50
        return making.result()

    assert msgspec.json.encode(run(main())) == msgspec.json.encode(at_once())


def test_wide_positions_have_turns_of_their_own(run):
    wide = {token_id: Logprob(-1.0, token_id + 1, None) for token_id in range(2_000)}

    async def main():
        making = asyncio.ensure_future(prompt_logprobs_json([None, *[wide] * 20], Turnstile(4_000)))
        num_turns = 0
        while not making.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert num_turns > 20

    run(main())


@pytest.mark.parametrize("size", [1, 7, NUM_TOKENS])
def test_a_list_that_grew_in_parts_is_the_list(size):
    grown = JsonArray()
    for start in range(0, NUM_TOKENS, size):
        part = slice(start, start + size)
        grown.extend(chat_logprobs(TokenNames(Texts()), IDS[part], SCORES[part], 3))
        grown.extend([])
    assert msgspec.json.encode(grown.value()) == msgspec.json.encode(chat_logprobs(TokenNames(Texts()), IDS, SCORES, 3))


@pytest.mark.parametrize("num_choices", [0, 1, 2, 500])
def test_an_answer_in_parts_is_the_answer(run, num_choices):
    texts = ['"choices":[', "é\\\"'", "a" * 1_000]
    choices = [CompletionChoice(n, texts[n % 3], None, "stop", None) for n in range(num_choices)]
    usage = Usage(1, 1, 2, CachedTokens(0), CompletionTokens(0))
    answer = Completion(id="a", created=1, model='"choices":[]', choices=choices, usage=usage)
    whole = json_answer(answer)

    async def main():
        sent = []

        async def send(message):
            sent.append(message)

        await (await long_json_answer(answer, "choices"))({"type": "http"}, None, send)
        return sent

    start, *bodies = run(main())
    assert sorted(start["headers"]) == sorted(whole.raw_headers)
    assert b"".join(message["body"] for message in bodies) == whole.body
    assert all(len(message["body"]) < 70_000 for message in bodies)
    assert len(bodies) > num_choices // 200
    assert msgspec.json.decode(whole.body) == json.loads(whole.body)


@pytest.mark.parametrize("num_vectors", [1, 300])
def test_an_object_of_long_lists_is_written_in_parts(run, num_vectors):
    vectors = [[number / 7 + place for place in range(200)] for number in range(num_vectors)]
    made = []

    def made_now(vector):
        made.append(len(pieces))
        return vector

    def answer_of(entries):
        return CohereEmbedAnswer("a", CohereVectors(floats=entries, base64=["b"] * num_vectors), ["é"], CohereMeta(0))

    expected = msgspec.json.encode(answer_of(vectors))
    answer = answer_of(map(made_now, vectors))
    pieces = []

    async def main():
        making = asyncio.ensure_future(pieces_of(answer, "embeddings"))
        while not making.done():
            pieces.append(None)
            await asyncio.sleep(0)
        return making.result()

    written = run(main())
    assert b"".join(written) == expected
    assert all(len(piece) < 70_000 for piece in written)
    assert len(set(made)) > num_vectors // 50, "each is made when it is written"


class Prompt:
    """A request of which so many parts are to come."""

    is_whole = True
    shows_logprobs = False
    before = ()

    def __init__(self, number, num_parts):
        self.request = SimpleNamespace(request_id=number, sampling=SamplingParams(detokenize=False))
        self.left = num_parts
        self.has_news = False
        self.num_taken = 0

    def start(self, client):
        return self

    def tell(self, reader):
        self.reader = reader

    def come(self):
        self.has_news = True
        self.reader()

    @property
    def is_done(self):
        return self.left == 0

    def take(self):
        self.num_taken += 1
        if not self.has_news:
            return []
        self.has_news = False
        self.left -= 1
        return [TokenDelta(0, [self.left])]


def test_of_many_prompts_those_are_asked_that_were_heard():
    prompts = [Prompt(number, 2) for number in range(100)]
    generation = Generation(None, None, Unobserved(), Turnstile(4_000))
    for prompt in prompts:
        generation.start(prompt, contextlib.nullcontext())
    # what came before somebody listened
    assert not generation.has_news
    prompts[3].come()
    assert generation.has_news
    assert [(delta.index, delta.token_ids) for delta in generation.take()] == [(3, [1])]
    heard = []
    generation.tell(lambda: heard.append(generation.take()))
    for prompt in prompts:
        prompt.num_taken = 0
        prompt.come()
    assert [[delta.index for delta in deltas] for deltas in heard] == [[number] for number in range(100)]
    assert sum(prompt.num_taken for prompt in prompts) == 100
    assert not generation.has_news
    assert prompts[3].is_done
    assert not generation.is_done
    for prompt in prompts:
        if not prompt.is_done:
            prompt.come()
    assert generation.is_done
    assert generation.take() == []


def test_prompts_with_many_log_probabilities_have_turns_of_their_own(run):
    positions = [TokenLogprobs([1, 2], [-0.5, -1.5], [1, 2])] * 400

    class Echoed(Prompt):
        def take(self):
            deltas = super().take()
            for delta in deltas:
                delta.prompt_logprobs = positions
            return deltas

    prompts = [Echoed(number, 1) for number in range(20)]
    taken = run(taken_by_turn(Generation(None, None, Unobserved(), Turnstile(4_000)), *prompts))
    assert len(taken) == 5
    for deltas in taken:
        assert 0 < sum(len(position) for delta in deltas for position in delta.prompt_logprobs or ()) < 4_002
    deltas = [delta for deltas in taken for delta in deltas]
    assert list(dict.fromkeys(delta.index for delta in deltas)) == list(range(20))
    for index in range(20):
        assert sum(len(delta.prompt_logprobs or ()) for delta in deltas if delta.index == index) == 400


class Beams(Prompt):
    """All outputs of a request come at once, and each is long."""

    def __init__(self, num_outputs, **settings):
        super().__init__(0, 1)
        self.prompt_token_ids = [1]
        self.shows_logprobs = True
        self.num_outputs = num_outputs
        self.request.sampling = SamplingParams(n=num_outputs, logprobs=2, **settings)

    def take(self):
        return [
            TokenDelta(
                index,
                list(range(LENGTH)),
                logprobs=[TokenLogprobs([token, 7, 8], [-0.5, -0.5, -1.5], [1, 1, 2]) for token in range(LENGTH)],
                prompt_logprobs=[TokenLogprobs([5, 6], [-0.5, -1.5], [1, 2])] * LENGTH if index == 0 else None,
                num_cached_tokens=index,
                finish_reason="length",
            )
            for index in range(self.num_outputs if super().take() else 0)
        ]


LENGTH = 3_000


async def taken_by_turn(generation, *prompts):
    for prompt in prompts:
        generation.start(prompt, contextlib.nullcontext())
    for prompt in prompts:
        prompt.come()
    taken = [generation.take()]
    generation.tell(lambda: taken.append(generation.take()))
    while not generation.is_done:
        num_taken = len(taken)
        await asyncio.sleep(0)
        assert len(taken) == num_taken + 1
    return taken


def test_outputs_with_many_log_probabilities_come_in_parts(run):
    taken = run(taken_by_turn(Generation(None, None, Unobserved(), Turnstile(4_000)), Beams(4, detokenize=False)))
    for deltas in taken:
        shown = [position for delta in deltas for position in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ()))]
        assert 0 < sum(map(len, shown)) < 10_000
    deltas = [delta for deltas in taken for delta in deltas]
    for index in range(4):
        *parts, last = [delta for delta in deltas if delta.index == index]
        assert parts
        assert [delta.finish_reason for delta in (*parts, last)] == [None] * len(parts) + ["length"]
        assert [delta.num_cached_tokens for delta in (*parts, last)] == [index] + [None] * len(parts)
        assert [token for delta in (*parts, last) for token in delta.token_ids] == list(range(LENGTH))
        positions = [position for delta in (*parts, last) for position in delta.logprobs or ()]
        assert [next(iter(position)) for position in positions] == list(range(LENGTH))
        assert sum(len(delta.prompt_logprobs or ()) for delta in (*parts, last)) == (LENGTH if index == 0 else 0)


def test_the_end_of_an_output_comes_with_its_last_token_however_many_scores_that_has(run):
    """A token that is all there is to hand over to another server is looked for in the delta that ends."""
    vocabulary = list(range(5_000))

    class Scored(Prompt):
        def take(self):
            deltas = super().take()
            for delta in deltas:
                delta.logprobs = [TokenLogprobs(vocabulary, [-8.5] * len(vocabulary), [1] * len(vocabulary))]
                delta.finish_reason = "length"
            return deltas

    (deltas,) = run(taken_by_turn(Generation(None, None, Unobserved(), Turnstile(4_000)), Scored(0, 1)))
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [([0], "length")]


def test_outputs_of_many_tokens_come_in_parts(run):
    """A stop string is looked for token by token: a microsecond each, and a slow reader finds a million of them."""

    class Long(Beams):
        def take(self):
            return [TokenDelta(delta.index, [5] * LENGTH * 3, finish_reason="length") for delta in super().take()]

    renderer = fake_renderer()
    taken = run(
        taken_by_turn(Generation(None, renderer, Unobserved(), Turnstile(4_000)), Long(4, stop=["there is none such"]))
    )
    for deltas in taken:
        assert 0 < sum(len(delta.token_ids) for delta in deltas) < 10_000
    deltas = [delta for deltas in taken for delta in deltas]
    for index in range(4):
        of_one = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in of_one) == renderer.decode([5] * LENGTH * 3)
        assert [delta.finish_reason for delta in of_one] == [None] * (len(of_one) - 1) + ["length"]


def test_of_an_output_in_parts_nothing_follows_a_stop_string(run):
    aborted = []

    class Client:
        def abort(self, request_id, index):
            aborted.append(index)

    renderer = fake_renderer()
    stop = renderer.decode([10, 11, 12])
    generation = Generation(Client(), renderer, Unobserved(), Turnstile(4_000))
    deltas = [delta for deltas in run(taken_by_turn(generation, Beams(2, stop=[stop]))) for delta in deltas]
    for index in range(2):
        *parts, last = [delta for delta in deltas if delta.index == index and delta.token_ids]
        assert [delta.finish_reason for delta in (*parts, last)] == [None] * len(parts) + ["stop"]
        assert [token for delta in (*parts, last) for token in delta.token_ids] == list(range(13))
    assert aborted == [0, 1]


def test_all_generations_together_name_so_many_in_a_turn(run):
    """A step may bring something to all of them, and tells their readers in one turn."""

    async def main():
        turns = Turnstile(4_000)
        generations = [Generation(None, None, Unobserved(), turns) for _ in range(8)]
        outputs = [Beams(2, detokenize=False) for _ in generations]
        num_positions, num_named = 0, 0

        def take(generation):
            nonlocal num_positions, num_named
            for delta in generation.take():
                positions = [*(delta.logprobs or ()), *(delta.prompt_logprobs or ())]
                num_positions += len(positions)
                num_named += sum(map(len, positions))

        for generation, output in zip(generations, outputs, strict=True):
            generation.start(output, contextlib.nullcontext())
            generation.tell(partial(take, generation))
        for output in outputs:
            output.come()
        while not all(generation.is_done for generation in generations):
            # the last position may go beyond
            assert 0 < num_named < 4_003
            num_named = 0
            await asyncio.sleep(0)
        # of each prompt, and of its two outputs
        assert num_positions == 8 * 3 * LENGTH

    run(main())


def test_who_is_a_few_tokens_behind_does_not_wait_for_large_answers(run):
    class Behind(Prompt):
        def take(self):
            return [TokenDelta(0, list(range(10))) for _ in super().take()]

    async def main():
        turns = Turnstile(4_000)
        large = Generation(None, None, Unobserved(), turns)
        large.start(output := Beams(4, detokenize=False), contextlib.nullcontext())
        output.come()
        large.take()
        assert not large.is_done
        assert not turns.left
        small = Generation(None, None, Unobserved(), turns)
        small.start(prompt := Behind(1, 1), contextlib.nullcontext())
        prompt.come()
        assert [delta.token_ids for delta in small.take()] == [list(range(10))]

    run(main())


def test_the_events_that_end_a_response_are_written_in_turns(run):
    """Each of four repeats all log-probabilities."""

    async def usage():
        return Usage(1, 1, 2, CachedTokens(0), CompletionTokens(0))

    async def main():
        model = SimpleNamespace(renderer=Texts())
        work = SimpleNamespace(generating=None, params=SimpleNamespace(logprobs=3), model=model, usage=usage)
        answer = ResponseAnswer({"id": "a"}, work, [], NothingIsKept(), num_top=3)
        answer.encode(OutputDelta(0, IDS, "a" * NUM_TOKENS, logprobs=SCORES))
        ending = asyncio.ensure_future(answer.end())
        num_turns = 0
        while not ending.done():
            num_turns += 1
            await asyncio.sleep(0)
        events = ending.result().split(b"\n\n")[:-1]
        assert num_turns >= len(events) == 4
        written = msgspec.json.encode(chat_logprobs(TokenNames(Texts()), IDS, SCORES, 3))
        assert all(written in event for event in events)

    run(main())
