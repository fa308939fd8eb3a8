"""Runs of features together, and the plain run that they are held against.

A run is eight requests that arrive one after the other, some with the same beginning; five of them ask for what the
features say, and the others run beside them. The plain run computes one request at a time, whole, on an engine that
does nothing else. What a run is refused with is one error, `RefusedError`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from tests.composition import features as f
from tests.support.image_processors import noise

from quire.config import EngineConfig, EngineOptions, resolve
from quire.engine_core.driver import CoreDriver
from quire.engine_core.launch import build_engine_core
from quire.engine_core.scheduler.recovery import RecoveryCosts
from quire.errors import RequestError, UserError
from quire.interfaces.requests import Limits, RequestMaker
from quire.messages import (
    DecodingSpec,
    EngineOutputs,
    EngineRequest,
    ExtendRequest,
    KVTransfer,
    Media,
    SequenceLogprobs,
    split_sequence_id,
)
from quire.renderer import Renderer
from quire.renderer.image_processor import ImageProcessor
from quire.sampling_params import SamplingParams
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_outputs_params import StructuredOutputsParams
from quire.testing.image_checkpoints import IMAGE_TOKEN_ID, make_image_checkpoint
from quire.testing.source_checkpoints import KINDS, make_source_checkpoint
from quire.testing.tiny_adapters import make_adapter
from quire.testing.tiny_checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, make_checkpoint

NUM_TOKENS = 12
SHARED = list(range(40, 74))
PROMPTS = [
    SHARED,
    [*SHARED, 9, 9, 1],
    [4, 5, 6] * 9,
    [200, 3, 77, 8, 200, 3],
    [8] * 17,
    [*SHARED, 1],
    [5, 6, 7, 8, 9, 10, 11],
    [31, 4, 31, 4, 31],
]
# the last ones ask for nothing else than tokens
NUM_FEATURED = 5
# where the placeholders of an image stand: behind tokens that several prompts share
IMAGE_START = 4
SECOND_TURN = [50, 51, 52]
FORM = StructuredOutputsParams(regex="[a-d]{7}(xy|yz)?[0-9]")
WIDTH = 3
# of the prompt of a session, before a turn of several outputs
NUM_KEPT = 3
ADAPTER = 1
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "check_invariants": True,
    "block_size": 4,
    "max_model_len": 80,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 2000,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "packed_weights_cache": 0,
}
# Blocks with which somebody has to give way: of requests of one sequence, and of several.
NUM_SCARCE = {
    "llama": (29, 29),
    "qwen2_window": (60, 150),
    "t5": (32, 60),
    "qwen2_5_vl": (34, 34),
    "qwen3_5_text": (80, 150),
    # a state is more of these blocks, which are smaller
    "qwen3_5_text with int8": (110, 200),
}
# A step costs a second, a draft nothing: every row gets as many drafts as it may have.
FREE_DRAFTS = {
    "seconds_per_step": 1.0,
    **dict.fromkeys(
        ("seconds_per_token", "seconds_of_drafting", "seconds_per_draft_step", "seconds_per_draft_token"), 0.0
    ),
}
_MOST_STEPS = 200_000
_store_names = itertools.count()


class RefusedError(Exception):
    """These features cannot be had together; the text is what the user reads."""


@dataclass
class Output:
    """What one sequence got. `prompt`: log-probabilities of the request's prompt, where it has some."""

    tokens: list[int]
    logprobs: list[tuple[list[int], list[float]]]
    prompt: list[tuple[list[int], list[float]]]
    reason: str = ""


# by request and turn
Outcome = dict[tuple[int, int], list[Output]]


class House:
    """Checkpoints and adapters, each made once, and the plain runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain: dict[frozenset[str], Outcome] = {}

    @functools.cached_property
    def _checkpoints(self) -> dict[str, Path]:
        return {}

    def model(self, name: str) -> Path:
        if name not in self._checkpoints:
            make: Any = make_source_checkpoint if name in KINDS else make_checkpoint
            make = make_image_checkpoint if name == f.IMAGE_MODEL else make
            self._checkpoints[name] = make(self._folder / name, name)
        return self._checkpoints[name]

    @functools.cached_property
    def _images(self) -> list[Media]:
        """Of 4 and of 6 tokens."""
        folder = self.model(f.IMAGE_MODEL)
        processor = ImageProcessor.find(folder, json.loads((folder / "config.json").read_text(encoding="utf-8")))
        assert processor is not None
        sources = [(noise(60, height, height), "image") for height in (60, 90)]
        try:
            return processor.expand([IMAGE_TOKEN_ID] * len(sources), sources, None)[1]
        finally:
            processor.close()

    def with_image(self, request: EngineRequest) -> EngineRequest:
        """The first two have the same one."""
        image = self._images[request.request_id > 1]
        prompt = request.prompt_token_ids
        placeholders = [IMAGE_TOKEN_ID] * image.length
        return msgspec.structs.replace(
            request,
            prompt_token_ids=[*prompt[:IMAGE_START], *placeholders, *prompt[IMAGE_START:]],
            media=[msgspec.structs.replace(image, start=IMAGE_START)],
        )

    def adapter(self, model: str) -> Path:
        path = self._folder / f"adapter of {model}"
        # a tower has none of these
        more = {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")} if model == f.IMAGE_MODEL else {}
        return path if path.exists() else make_adapter(path, self.model(model), seed=7, **more)

    def store(self) -> str:
        return f"file://{self._folder / f'blocks {next(_store_names)}'}"

    def plain(self, names: frozenset[str]) -> Outcome:
        """Of what is asked, one request after the other."""
        asked = frozenset(name for name in names if f.FEATURES[name].is_asked)
        key = asked | (names & {f.SESSIONS})
        if key not in self._plain:
            self._plain[key] = _Run(self, asked, has_two_turns=f.SESSIONS in names).plain()
        return self._plain[key]


def compare(house: House, names: frozenset[str]) -> None:
    """Runs them together, and as the plain run does. Raises RefusedError, or AssertionError where anything differs or
    what was asked for cannot be seen."""
    outcome = _Run(house, names, has_two_turns=f.SESSIONS in names).together()
    expected = house.plain(names)
    _check_asked(house, names, expected)
    # workers sum in another order, and a code of the cache may then be another one
    tolerance = 0.0 if f.TP not in names else 0.02 if f.QUANTISED_KV in names else 2e-3
    assert outcome.keys() == expected.keys()
    for key, sequences in expected.items():
        for number, (here, plain) in enumerate(zip(outcome[key], sequences, strict=True)):
            where = f"{' + '.join(sorted(names))}: request {key[0]}, turn {key[1]}, sequence {number}"
            assert (here.tokens, here.reason) == (plain.tokens, plain.reason), where
            for found, wanted in ((here.logprobs, plain.logprobs), (here.prompt, plain.prompt)):
                assert len(found) == len(wanted), where
                for (found_ids, found_values), (ids, values) in zip(found, wanted, strict=True):
                    assert found_ids[0] == ids[0], where
                    assert tolerance or found_ids == ids, where
                    difference = max(abs(a - b) for a, b in zip(found_values, values, strict=True))
                    assert difference <= tolerance, f"{where}: log-probabilities differ by {difference}"


def _check_asked(house: House, names: frozenset[str], outcome: Outcome) -> None:
    """A plain run that ignores what was asked would agree with any other that does."""
    featured = [sequences for (number, _), sequences in outcome.items() if number < NUM_FEATURED]
    if f.GRAMMAR in names:
        assert FORM.regex is not None
        for output in itertools.chain.from_iterable(featured):
            assert output.reason == "stop", output
            assert re.fullmatch(FORM.regex, bytes(output.tokens[:-1]).decode()), output
    if f.BEAMS in names or f.N in names:
        assert all(len(sequences) > 1 for sequences in featured)
    if f.LOGPROBS in names:
        assert all(len(output.logprobs) == len(output.tokens) for sequences in featured for output in sequences)
    if f.PROMPT_LOGPROBS in names:
        assert all(sequences[0].prompt for sequences in featured[::2])
    if f.LORA in names:
        assert featured[2] != house.plain(names - {f.LORA})[2, 0]


class _NotSeenError(AssertionError):
    """What was asked for did not happen."""


class _Run:
    def __init__(self, house: House, names: frozenset[str], *, has_two_turns: bool) -> None:
        self._house = house
        self._names = names
        self._has_two_turns = has_two_turns
        models = [f.FEATURES[name].model for name in sorted(names) if f.FEATURES[name].model]
        self._model = models[0] if models else "llama"

    # ---- what is asked

    def _request(self, number: int, prompt: list[int]) -> EngineRequest:
        names = self._names if number < NUM_FEATURED else frozenset()
        is_drawn = f.BEAMS not in names and (number % 2 == 1 or f.N in names)
        num_outputs = 2 if f.N in names else WIDTH if f.BEAMS in names else 1
        sampling = SamplingParams(
            n=num_outputs,
            temperature=0.8 if is_drawn else 0.0,
            max_tokens=NUM_TOKENS,
            ignore_eos=f.GRAMMAR not in names,
            logprobs=3 if f.LOGPROBS in names else 0 if f.BEAMS in names else None,
            prompt_logprobs=2 if f.PROMPT_LOGPROBS in names and number % 2 == 0 else None,
            structured_outputs=FORM if f.GRAMMAR in names else None,
        )
        request = EngineRequest(
            request_id=number,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=1000 + number,
            eos_token_ids=[EOS_TOKEN_ID] if f.GRAMMAR in names else [],
            adapter=ADAPTER if f.LORA in names else 0,
            decoding=DecodingSpec(method="beam_search", args={"width": WIDTH}) if f.BEAMS in names else None,
        )
        return self._house.with_image(request) if f.IMAGES in names else request

    def plain(self) -> Outcome:
        outcome: Outcome = {}
        with self._engine(self._options()) as engine:
            for number, prompt in enumerate(PROMPTS):
                for turn in range(1 + self._has_two_turns):
                    outcome |= engine.serve([[self._request(number, prompt)]], turn)
                    prompt = [*prompt, *outcome[number, turn][0].tokens, *SECOND_TURN]
        return outcome

    # ---- how it is computed

    def together(self) -> Outcome:
        # When blocks of elsewhere come is not ours to say; while some requests wait for them, others may have room.
        num_tries = 3 if f.DISAGGREGATION in self._names and self._names & f.SCARCE else 1
        for _ in range(num_tries - 1):
            with suppress(_NotSeenError):
                return self._together_once()
        return self._together_once()

    def _together_once(self) -> Outcome:
        options = self._options()
        with self._nothing_that_was_timed_decides():
            if f.TIERS in self._names:
                # what one computes, another finds
                with self._engine(options) as engine:
                    self._served(engine)
                    engine.wait_written()
            elsewhere: dict[int, Output] = {}
            keys = [f"kv {number}" for number in range(len(PROMPTS))]
            if f.DISAGGREGATION in self._names:
                elsewhere = self._computed_elsewhere(options, keys)
            with self._engine(options) as engine:
                outcome = self._served(engine, elsewhere, keys)
                if f.PREFIX_CACHE in self._names and not elsewhere:
                    again = self._served(engine)
                    assert again == outcome, "the second time, with a warm cache"
                self._check_signs(engine)
        return outcome

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for name in sorted(self._names):
            options |= f.FEATURES[name].options
        if self._names & f.SCARCE:
            kind = f"{self._model} with int8" if {f.STATES, f.QUANTISED_KV} <= self._names else self._model
            options["num_gpu_blocks_override"] = NUM_SCARCE[kind][bool(self._names & {f.N, f.BEAMS})]
        if self._names & {f.DISAGGREGATION, f.TIERS}:
            # nothing is too cheap to be moved; of states, only where a prompt goes on elsewhere
            rule = "cost" if {f.STATES, f.TIERS} <= self._names else "always"
            options["kv_connector"] = {
                "name": "tiered",
                "stores": [self._house.store()],
                "rule": rule,
                "max_wait": 60.0,
            }
        return options

    def _has_one_output(self, number: int) -> bool:
        return number >= NUM_FEATURED or not self._names & {f.N, f.BEAMS}

    def _begin_session(self, engine: _Engine, request: EngineRequest) -> None:
        """Of several outputs none is kept: the session goes on from where it was, with the first of them."""
        number = request.request_id
        handle = f"session {number}"
        first = msgspec.structs.replace(request, sampling=SamplingParams(max_tokens=1), decoding=None, keep=handle)
        engine.serve([[first]], -1)
        engine.control("rewind_kept", handle=handle, num_tokens=NUM_KEPT)
        request.prompt_token_ids = PROMPTS[number][NUM_KEPT:]
        request.continues = handle

    def _computed_elsewhere(self, options: dict[str, Any], keys: list[str]) -> dict[int, Output]:
        """The first token of each, and its prompt's KV, by another engine."""
        requests = []
        for number, prompt in enumerate(PROMPTS):
            request = self._request(number, prompt)
            request.sampling = request.sampling.replace(max_tokens=1, min_tokens=0)
            request.transfer = KVTransfer(store=keys[number])
            requests.append(request)
        with self._engine(options) as engine:
            outcome = engine.serve(self._arrivals(requests), 0)
            engine.wait_written()
        return {number: outcome[number, 0][0] for number in range(len(PROMPTS))}

    def _served(
        self, engine: _Engine, elsewhere: dict[int, Output] | None = None, keys: list[str] | None = None
    ) -> Outcome:
        requests = [self._request(number, prompt) for number, prompt in enumerate(PROMPTS)]
        for request in requests:
            number = request.request_id
            if elsewhere:
                assert keys is not None
                self._hand_over(request, keys[number], elsewhere[number])
            if self._has_two_turns and self._has_one_output(number):
                request.keep = f"session {number}"
            elif self._has_two_turns:
                self._begin_session(engine, request)
        pieces = f.STREAMED in self._names and not elsewhere
        outcome = engine.serve(self._arrivals(requests, in_pieces=pieces), 0)
        for number, first in (elsewhere or {}).items():
            if requests[number].transfer.num_output_tokens:  # type: ignore[union-attr]
                own = outcome[number, 0][0]
                own.tokens = [*first.tokens, *own.tokens]
                own.logprobs = [*first.logprobs, *own.logprobs]
                own.prompt = first.prompt
        if self._has_two_turns:
            second = [self._request(number, list(SECOND_TURN)) for number in range(len(PROMPTS))]
            for request in second:
                number = request.request_id
                request.continues = f"session {number}"
                if self._has_one_output(number):
                    request.keep = request.continues
                else:
                    said = outcome[number, 0][0].tokens
                    request.prompt_token_ids = [*PROMPTS[number][NUM_KEPT:], *said, *SECOND_TURN]
            outcome |= engine.serve(self._arrivals(second, in_pieces=f.STREAMED in self._names), 1)
            for number in range(len(PROMPTS)):
                engine.control("release_kept", handle=f"session {number}")
        return outcome

    def _hand_over(self, request: EngineRequest, key: str, first: Output) -> None:
        """One sequence goes on behind its first token; several begin behind the prompt."""
        length = len(request.prompt_token_ids)
        is_one = request.sampling.n == 1 and request.decoding is None
        request.transfer = KVTransfer(fetch=key, num_fetch_tokens=length, num_output_tokens=int(is_one))
        if is_one:
            request.prompt_token_ids = [*request.prompt_token_ids, *first.tokens]

    def _arrivals(self, requests: list[EngineRequest], *, in_pieces: bool | None = None) -> list[list[Any]]:
        """What arrives before each step."""
        in_pieces = f.STREAMED in self._names if in_pieces is None else in_pieces
        arrivals: list[list[Any]] = [[] for _ in range(80)]
        for place, request in enumerate(requests):
            prompt = request.prompt_token_ids
            if not in_pieces:
                arrivals[place].append(request)
                continue
            pieces = [prompt[start : start + 5] for start in range(0, len(prompt), 5)]
            request.prompt_token_ids = pieces[0]
            request.is_final = len(pieces) == 1
            arrivals[place].append(request)
            for number, piece in enumerate(pieces[1:], start=1):
                extension = ExtendRequest(
                    request_id=request.request_id, token_ids=piece, is_final=number == len(pieces) - 1
                )
                arrivals[place + number].append(extension)
        return arrivals

    def _check_signs(self, engine: _Engine) -> None:
        """That it has happened: a run in which nobody gave way says nothing about giving way."""
        statistics = engine.control("statistics")
        for name in sorted(self._names):
            sign = f.FEATURES[name].sign
            if sign and name not in self._unseen() and not statistics[sign] > 0:
                raise _NotSeenError(f"{name}: {sign} is 0")
        # whoever waits for what nobody has written waits in vain
        assert not statistics.get("kv_tiers_late_total"), "kv_tiers_late_total is not 0"

    def _unseen(self) -> frozenset[str]:
        """What need not happen in this company."""
        has_workers = bool(self._names & {f.TP, f.PP})
        unseen = {f.DRAFTS} if has_workers else set()
        if {f.STATES, f.STREAMED} <= self._names:
            # what is known of a prompt when it begins ends before the first checkpoint
            unseen.add(f.PREFIX_CACHE)
        if f.STATES in self._names and self._names & f.SCARCE:
            # checkpoints of states give way first; and a worker's part of a state is fewer blocks
            unseen |= {f.PREFIX_CACHE, *(f.SCARCE if has_workers else ())}
        if f.SOURCES in self._names and self._names & f.SCARCE:
            # an encoder reads a prompt whole, so that it shares nothing with others, and it is gone when it comes again
            unseen.add(f.PREFIX_CACHE)
        return frozenset(unseen)

    @contextmanager
    def _nothing_that_was_timed_decides(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patch("quire.engine_core.launch.RecoveryCosts", lambda *_: RecoveryCosts(1e-3, 1e-5)))
            # workers of other processes measure it together, and a row may get no draft there
            if not self._names & {f.TP, f.PP}:
                stack.enter_context(patch("quire.worker.worker.measure_costs", lambda *_: FREE_DRAFTS))
            yield

    @contextmanager
    def _engine(self, options: dict[str, Any]) -> Iterator[_Engine]:
        path = str(self._house.model(self._model))
        try:
            config, _ = resolve(EngineOptions(model=path, **{**OPTIONS, **options}))
            core = build_engine_core(config)
        except UserError as error:
            raise RefusedError(str(error)) from error
        engine = _Engine(core, _maker_of_sources(config))
        try:
            if f.LORA in self._names:
                engine.load_adapter(self._house.adapter(self._model))
            if f.GRAMMAR in self._names:
                engine.learn_vocabulary(config)
            yield engine
        finally:
            core.shutdown()


def _maker_of_sources(config: EngineConfig) -> RequestMaker | None:
    if not config.facts.has_sources:
        return None
    limits = Limits(
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len,
        max_logprobs=config.max_logprobs,
        max_num_seqs=config.max_num_seqs,
        decoder_start_token_id=config.facts.decoder_start_token_id,
    )
    return RequestMaker(limits, bad_words_token_ids=lambda words: [])


class _Engine:
    """A core that is stepped here, with what has come of it."""

    def __init__(self, core: Any, maker: RequestMaker | None) -> None:
        """`maker`: of a model whose prompts an encoder reads, which the core is told by the front end."""
        self._core = core
        self._maker = maker
        self._driver = CoreDriver(core)
        self._driver.take()

    def control(self, operation: str, **args: Any) -> Any:
        return self._core.control(operation, args)

    def load_adapter(self, path: Path) -> None:
        assert self.control("load_adapter", name="a", path=str(path)) == ADAPTER
        while self.control("adapter_state", number=ADAPTER) == "loading":
            pass

    def learn_vocabulary(self, config: EngineConfig) -> None:
        """As a client tells it before the first form."""
        renderer = Renderer.from_config(config)
        tokens, special = renderer.token_table(VOCAB_SIZE)
        vocabulary = Vocabulary.of(tokens, special, [EOS_TOKEN_ID])
        self.control("worker.open_vocabulary", vocabulary=msgspec.msgpack.encode(vocabulary))
        form = msgspec.msgpack.encode(FORM)
        while not self.control("worker.prepare_form", form=form):
            pass

    def wait_written(self) -> None:
        while self.control("statistics")["kv_tiers_waiting_bytes"]:
            pass

    def _with_source(self, request: EngineRequest) -> EngineRequest:
        if self._maker is None:
            return request
        prompt, sampling = request.prompt_token_ids, request.sampling
        try:
            made = self._maker.make(prompt, sampling, keep=request.keep, is_final=request.is_final)
        except RequestError as error:
            raise RefusedError(str(error)) from error
        return msgspec.structs.replace(request, prompt_token_ids=made.prompt_token_ids, media=made.media)

    def serve(self, arrivals: list[list[Any]], turn: int) -> Outcome:
        """Until all have ended. The first error is what the run is refused with."""
        outcome: Outcome = {}
        num_open = 0
        for number, messages in enumerate(itertools.chain(arrivals, itertools.repeat([]))):
            for message in messages:
                if isinstance(message, EngineRequest):
                    message = self._with_source(message)
                    outcome[message.request_id, turn] = [Output([], [], []) for _ in range(message.sampling.n)]
                    num_open += message.sampling.n
                self._driver.handle(message)
            self._driver.step()
            assert not self._driver.is_dead, self._driver.take()
            for answer in self._driver.take():
                if isinstance(answer, EngineOutputs):
                    num_open -= _collect(answer, outcome, turn)
            if not num_open and number >= _last(arrivals):
                return outcome
            assert number < _MOST_STEPS, "still at work"
        raise AssertionError("there is always another step")


def _last(arrivals: list[list[Any]]) -> int:
    return max(number for number, messages in enumerate(arrivals) if messages)


def _collect(outputs: EngineOutputs, outcome: Outcome, turn: int) -> int:
    """How many sequences have ended."""

    def of(sequence_id: int) -> Output:
        request, index = split_sequence_id(sequence_id)
        return outcome[request, turn][index]

    for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
        of(sequence_id).tokens.append(token)
    for entry in outputs.logprobs:
        of(entry.sequence_id).logprobs += _positions(entry)
    for entry in outputs.prompt_logprobs:
        of(entry.sequence_id).prompt += _positions(entry)
    for end in outputs.ends:
        if end.error is not None:
            raise RefusedError(end.error)
        of(end.sequence_id).reason = end.finish_reason
    return len(outputs.ends)


def _positions(entry: SequenceLogprobs) -> list[tuple[list[int], list[float]]]:
    return [(position.token_ids, position.logprobs) for position in entry.positions]
