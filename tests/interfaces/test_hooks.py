"""Hooks over a core without a model, which says what its prompt says: nothing that is held is ever seen."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.asked_process import AskedProcess
from quire.errors import OptionError, RequestError
from quire.hooks import FinishedSequence, Hook, HookedRequest, Refusal, SequenceTokens, Verdict
from quire.interfaces.hooks import hook_process
from quire.interfaces.hooks.banned_text import BannedText
from quire.interfaces.hooks.first_part import FirstPart
from quire.interfaces.hooks.guarded_client import open_client
from quire.interfaces.hooks.loading import hooks_of
from quire.interfaces.llm import LLM
from quire.outputs import CompletionOutput
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_config, fake_link, fake_renderer


def hooked_llm(*hooks: Hook | str, **options: Any) -> LLM:
    config = fake_config(**options)
    made = hooks_of(config, hooks)
    client = open_client(fake_link(own_process=False, **options), made)
    return LLM.from_parts(config, fake_renderer(), client, made)


def answers(llm: LLM, token_ids: list[int], **sampling: Any) -> list[CompletionOutput]:
    """What it says after these tokens: they themselves, as often as they fit."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": len(token_ids), "ignore_eos": True, **sampling})
    return llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0].outputs


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    """This file by a name that other processes find."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Path(__file__).stem


@cache
def tokens_by_first_byte() -> dict[int, list[tuple[bytes, int]]]:
    renderer = fake_renderer()
    found: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
    for token in range(fake_config().facts.vocab_size):
        data = renderer.token_bytes(token)
        if data and token not in renderer.eos_token_ids and renderer.decode([token]) != "":
            found[data[0]].append((data, token))
    return found


def any_split(text: str, draw: random.Random) -> list[int]:
    """Tokens that read as this text, cut anywhere, also within characters."""
    data = text.encode()
    token_ids = []
    while data:
        fitting = [(piece, token) for piece, token in tokens_by_first_byte()[data[0]] if data.startswith(piece)]
        piece, token = draw.choice(fitting)
        token_ids.append(token)
        data = data[len(piece) :]
    return token_ids


class Counting(Hook):
    def __init__(self) -> None:
        self.finished: list[FinishedSequence] = []
        self.is_told = threading.Semaphore(0)

    def on_finish(self, sequence: FinishedSequence) -> None:
        self.finished.append(sequence)
        self.is_told.release()


# ---- nothing leaks ---------------------------------------------------------------------------------------------------

_LETTERS = ["a", "b", "ab", "ba", " ", "é", "🙂", "\n", "secret", "s", "se", "sec", "ecret"]


def random_text(draw: random.Random, banned: str) -> str:
    pieces = [draw.choice([*_LETTERS, banned[: draw.randrange(len(banned) + 1)]]) for _ in range(draw.randrange(2, 14))]
    if draw.random() < 0.5:
        pieces.insert(draw.randrange(len(pieces) + 1), banned)
    return "".join(pieces)


def leak_of(llm: LLM, banned: str, text: str, token_ids: list[int], draw: random.Random) -> str | None:
    """What is wrong with the answer that is made of these tokens, if anything is."""
    n = draw.choice([1, 1, 3])
    stop = [draw.choice(["ab ", "🙂a", "qq"])] if draw.random() < 0.3 else []
    for one in answers(llm, token_ids, n=n, logprobs=draw.choice([None, 0]), stop=stop):
        # each sibling ends a token earlier
        said = text if not one.index else fake_renderer().decode(token_ids[: max(1, len(token_ids) - one.index)])
        place = said.find(banned)
        allowed = said if place < 0 else said[:place]
        # log-probabilities show the tokens
        shown = fake_renderer().decode(one.token_ids)
        # the length may cut a character
        seen = one.text.rstrip("\ufffd") if one.finish_reason == "length" else one.text
        if not allowed.startswith(seen):
            return f"{one.text!r} of {text!r}, where {banned!r} is banned"
        if banned in shown or not (allowed + "\ufffd").startswith(shown.rstrip("\ufffd")):
            return f"the tokens {shown!r} of {text!r}"
        if one.logprobs is not None and len(one.logprobs) != len(one.token_ids):
            return f"{len(one.logprobs)} log-probabilities of {len(one.token_ids)} tokens"
        if place >= 0 and one.finish_reason not in ("content_filter", "stop", "length"):
            return f"it ended with {one.finish_reason}"
        if place < 0 and one.finish_reason == "content_filter":
            return f"{text!r} was stopped"
        if one.index == 0 and not stop and place < 0 and one.text != text:
            return f"{one.text!r} is not all of {text!r}"
    return None


def fuzz(seeds: range) -> None:
    for banned, ahead in (("secret", 1), ("é🙂é", 2), ("aab", 3), ("secret", 64)):
        hook = BannedText([banned])
        # else all that the core says would be judged at once
        hook.ahead = ahead
        with hooked_llm(hook, max_model_len=256) as llm:
            for seed in seeds:
                draw = random.Random(f"{banned} {seed}")
                text = random_text(draw, banned)
                token_ids = any_split(text, draw)
                if len(token_ids) < 120:
                    assert leak_of(llm, banned, text, token_ids, draw) is None, f"seed {seed}"


def test_no_banned_text_leaks_over_any_split() -> None:
    fuzz(range(50))


@pytest.mark.nightly
def test_no_banned_text_leaks_over_ten_thousand_splits() -> None:
    fuzz(range(50, 2550))


def test_the_fuzz_finds_a_hook_that_holds_too_little() -> None:
    class Careless(BannedText):
        ahead = 1

        def _begins_at(self, text: str) -> int:
            return max(super()._begins_at(text), len(text) - 2)

    draw = random.Random(1)
    with hooked_llm(Careless(["secret"])) as llm:
        found = [leak_of(llm, "secret", text, any_split(text, draw), draw) for text in ["a secret"] * 20]
    assert any(found)


@pytest.mark.parametrize("skips", [True, False])
def test_a_special_token_hides_nothing(skips: bool) -> None:
    """A server's parsers show the text around it as if it were not there."""
    renderer = fake_renderer()
    special = next(token for token in range(fake_config().facts.vocab_size) if not renderer.decode([token]))
    sec, ret = (renderer.encode(text, add_special_tokens=False) for text in ("a sec", "ret"))
    with hooked_llm(BannedText(["secret"])) as llm:
        [one] = answers(llm, [*sec, special, *ret], skip_special_tokens=skips)
        assert (one.text, one.finish_reason) == ("a ", "content_filter")


# ---- verdicts --------------------------------------------------------------------------------------------------------


class Stopping(Hook):
    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        if len(tokens.token_ids) < 7:
            return Verdict(hold=4)
        return Verdict(stop="enough", keep=5)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_keeps_what_it_says_and_gives_its_reason(n: int) -> None:
    counting = Counting()
    with hooked_llm(Stopping(), counting) as llm:
        for one in answers(llm, list(range(40, 60)), n=n):
            assert (one.finish_reason, one.stop_reason) == ("content_filter", "enough")
            assert one.token_ids == list(range(40, 45))
        assert llm.statistics()["num_hook_stops_total"] == n
        for _ in range(n):
            assert counting.is_told.acquire(timeout=30)
    assert [(one.finish_reason, len(one.token_ids)) for one in counting.finished] == [("content_filter", 5)] * n


def test_the_strictest_of_several_verdicts_counts() -> None:
    class Laxer(Hook):
        def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
            return Verdict(stop="late", keep=6) if len(tokens.token_ids) >= 7 else None

    with hooked_llm(Laxer(), Stopping()) as llm:
        [one] = answers(llm, list(range(40, 60)))
        # the second holds the last of what the first would show
        assert one.token_ids == list(range(40, 45))


class Putting(Hook):
    lockstep = True

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        return Verdict(force=[70, 71]) if len(tokens.token_ids) == 3 else None


def test_tokens_that_are_forced_come_next() -> None:
    with hooked_llm(Putting()) as llm:
        [one] = answers(llm, list(range(40, 50)), logprobs=0)
        assert one.token_ids == [40, 41, 42, 70, 71, 45, 46, 47, 48, 49]


def test_beams_cannot_be_in_lockstep() -> None:
    from quire.beam_search_params import BeamSearchParams

    with hooked_llm(Putting()) as llm, pytest.raises(RequestError, match="beams"):
        llm.generate("a", BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)


def test_beams_are_held_and_stopped() -> None:
    from quire.beam_search_params import BeamSearchParams

    with hooked_llm(Stopping()) as llm:
        [output] = llm.generate("a b c", BeamSearchParams(beam_width=2, max_tokens=12), use_tqdm=False)
        for one in output.outputs:
            assert one.finish_reason == "content_filter"
            assert len(one.token_ids) == 5


# ---- admission -------------------------------------------------------------------------------------------------------


class Picky(Hook):
    def on_admit(self, request: HookedRequest) -> Refusal | None:
        return Refusal(reason="not for us") if "no" in request.prompt else None


def test_a_request_that_is_refused_never_reaches_the_engine() -> None:
    with hooked_llm(Picky()) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        [yes] = llm.generate(["yes"], params, use_tqdm=False)
        assert yes.outputs[0].finish_reason == "length"
        [no] = llm.generate(["no"], params, use_tqdm=False)
        assert (no.outputs[0].finish_reason, no.outputs[0].stop_reason) == ("error", "not for us")
        assert llm.statistics()["num_hook_refusals_total"] == 1


def test_prefixes_are_pinned_whatever_hooks_say() -> None:
    """Nobody sees what is computed for one."""

    class Forbidding(Hook):
        def on_admit(self, request: HookedRequest) -> Refusal | None:
            return Refusal(reason="nothing at all")

    with LLM(hooks=[Forbidding()]) as llm:
        assert llm.pin_prefix("Once upon a time there was a fox. " * 3).num_tokens > 16


# ---- failure ---------------------------------------------------------------------------------------------------------


class Broken(Hook):
    def __init__(self, how: str) -> None:
        self.how = how
        self.end = threading.Event()

    def on_tokens(self, tokens: SequenceTokens) -> Any:
        match self.how:
            case "raise":
                raise ZeroDivisionError("one of those days")
            case "hang":
                self.end.wait()
            case "nonsense":
                return {"stop": True}
            case "mask":
                return Verdict(ban=[3])
            case "negative":
                return Verdict(hold=-1)
        return None


@pytest.fixture(params=["raise", "hang", "nonsense", "mask", "negative"])
def broken(request: pytest.FixtureRequest) -> Iterator[Broken]:
    hook = Broken(request.param)
    yield hook
    hook.end.set()


@pytest.mark.parametrize("on_failure", ["open", "closed"])
def test_a_hook_that_fails_is_open_or_closed(broken: Broken, on_failure: str, caplog: pytest.LogCaptureFixture) -> None:
    with hooked_llm(broken, hook_timeout=0.05, hook_on_failure=on_failure) as llm:
        [one] = answers(llm, [40, 41, 42])
        statistics = llm.statistics()
    if on_failure == "open":
        assert (one.token_ids, one.finish_reason) == ([40, 41, 42], "length")
    else:
        assert (one.token_ids, one.finish_reason) == ([], "content_filter")
        assert "could not be asked" in str(one.stop_reason)
    assert statistics["num_hook_failures_total"] >= 1
    assert bool(statistics["num_hook_timeouts_total"]) == (broken.how == "hang")
    assert len([record for record in caplog.records if "hook Broken failed" in record.message]) == 1


def test_calls_that_hang_are_replaced_and_then_given_up() -> None:
    """However many requests meet it, the threads that it takes with it are bounded, and the engine goes on."""
    hook = Broken("hang")
    before = threading.active_count()
    with hooked_llm(hook, hook_timeout=0.01, hook_on_failure="open") as llm:
        for _ in range(30):
            assert len(answers(llm, [40, 41, 42])[0].token_ids) == 3
        assert llm.statistics()["num_hook_calls_lost"] <= 32
        assert threading.active_count() - before < 60
        hook.end.set()


class Crowded(Hook):
    """Counts how many of its calls run at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.002)
        with self.lock:
            self.now -= 1
        return None


def test_one_request_does_not_take_all_threads() -> None:
    hook = Crowded()
    with hooked_llm(hook) as llm:
        outputs = answers(llm, list(range(40, 80)), n=24)
        assert [one.token_ids for one in outputs] == [list(range(40, 80 - index)) for index in range(24)]
    assert 1 <= hook.most <= 8


def test_a_part_of_a_list_does_not_grow() -> None:
    numbers = [5, 6, 7]
    part = FirstPart(numbers)
    numbers.append(8)
    assert (list(part), part[-1], part[1:], part[::-1], len(part)) == ([5, 6, 7], 7, [6, 7], [7, 6, 5], 3)
    assert (part[:9], part[-2:], part[2:1], 8 in part, part == [5, 6, 7]) == ([5, 6, 7], [6, 7], [], False, True)
    with pytest.raises(IndexError):
        part[3]


# ---- in a process of its own -----------------------------------------------------------------------------------------


class Remembering(Hook):
    """Stops with its third look at a sequence."""

    ahead = 1

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        print("this is no answer")
        tokens.state["looks"] = tokens.state.get("looks", 0) + 1
        return Verdict(stop=f"{tokens.request.prompt!r}"[:6], keep=2) if tokens.state["looks"] == 3 else None


class Holding(Hook):
    """Holds the interpreter: no thread beside it gets on."""

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        if tokens.token_ids[0] == 41:
            re.match("(a+)+b", "a" * 40)
        return None


class Opening(Hook):
    def open(self, engine: Any) -> None:
        raise AssertionError("it is never asked")


def test_a_hook_in_a_process_keeps_what_belongs_to_a_sequence(named: str) -> None:
    with hooked_llm(f"{named}:Remembering", hook_process=True, hook_timeout=20.0) as llm:
        for one in answers(llm, list(range(40, 60)), n=2):
            assert (one.finish_reason, one.token_ids) == ("content_filter", [40, 41])
            assert str(one.stop_reason).startswith("'")


def test_a_process_that_holds_on_is_ended_and_the_next_question_answered(named: str) -> None:
    options = {"hook_process": True, "hook_on_failure": "open"}
    with hooked_llm(f"{named}:Holding", hook_timeout=20.0, **options) as llm:
        assert len(answers(llm, [40, 42])[0].token_ids) == 2
        assert llm.statistics()["num_hook_failures_total"] == 0
    with hooked_llm(f"{named}:Holding", hook_timeout=0.3, **options) as llm:
        assert len(answers(llm, [41, 42])[0].token_ids) == 2
        assert llm.statistics()["num_hook_failures_total"] >= 1


def test_a_process_is_sent_a_prompt_once_and_then_what_is_new(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[AskedProcess, list[int]] = {}
    ask = AskedProcess.ask

    def counted(process: AskedProcess, question: Any, seconds: float) -> bytearray:
        if process._program == hook_process._PROGRAM:
            asked.setdefault(process, []).append(sum(map(len, question)))
        return ask(process, question, seconds)

    monkeypatch.setattr(AskedProcess, "ask", counted)
    with hooked_llm(f"{named}:Looking", hook_process=True, hook_timeout=20.0) as llm:
        answers(llm, list(range(60, 200)))
    # a hook of an engine before may still be asked about its last sequence
    first, *others, last = max(asked.values(), key=len)
    assert len(others) > 60
    # a question and what is new; the last one is about the end, and has all that was shown
    assert sum(others) < 70 * len(others) + 1000 < 140 * len(others), others
    assert min(first, last) > 140


class Looking(Hook):
    """At every token."""

    ahead = 1

    def on_tokens(self, tokens: SequenceTokens) -> None: ...


class Comparing(Hook):
    """Remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_tokens(self, tokens: SequenceTokens) -> None:
        tokens.state["looks"] = tokens.state.get("looks", 0) + 1
        self.seen.append(tokens)


@pytest.mark.parametrize("most", [2, 1000])
def test_what_a_process_sees_is_what_there_is_whatever_it_forgets(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_process, "_MOST_SEQUENCES", most)
    pick = random.Random(3)
    hook = Comparing()
    there = hook_process._Asked(hook)
    told = hook_process._Told()
    requests = [
        HookedRequest(
            request_id=number,
            prompt_token_ids=list(range(number, 30 + number)),
            sampling=SamplingParams(max_tokens=number + 1),
            decode=lambda token_ids: f"prompt of {len(token_ids)}",
            encode=lambda text: [],
        )
        for number in range(4)
    ]
    tokens: dict[tuple[int, int], list[int]] = {(number, index): [] for number in range(4) for index in range(2)}
    num_looks = dict.fromkeys(tokens, 0)
    for look in range(200):
        number, index = key = pick.choice(list(tokens))
        if look % 40 == 39:
            # another process takes its place
            there = hook_process._Asked(hook)
            num_looks = dict.fromkeys(tokens, 0)
        tokens[key] += [pick.randrange(100) for _ in range(pick.randrange(4))]
        lengths = list(range(1, len(tokens[key]) + 1))
        # the last character may become another one
        text = "".join(map(chr, tokens[key][:-1])) + ("?" if tokens[key] else "")
        subject = SequenceTokens(
            request=requests[number], index=index, token_ids=tokens[key], num_shown=look, text=text, lengths=lengths,
            is_last=False, state={},
        )  # fmt: skip
        answer = there.answer(told.question("on_tokens", requests[number], subject))
        if answer.kind == "unknown":
            told = hook_process._Told()
            answer = there.answer(told.question("on_tokens", requests[number], subject))
        assert answer.kind == ""
        seen = hook.seen[-1]
        num_looks[key] += 1
        assert (list(seen.token_ids), list(seen.lengths), seen.text) == (tokens[key], lengths, text)
        assert (seen.num_shown, seen.index, seen.request.prompt) == (look, index, "prompt of 30")
        assert (seen.request.prompt_token_ids, seen.request.sampling) == (
            requests[number].prompt_token_ids,
            requests[number].sampling,
        )
        assert most == 2 or seen.state["looks"] == num_looks[key]
        assert len(there._requests) <= max(2, most)


def test_a_hook_that_asks_the_engine_cannot_be_elsewhere(named: str) -> None:
    with pytest.raises(OptionError, match="hook_process"):
        hooks_of(fake_config(hooks=(f"{named}:Opening",), hook_process=True))


# ---- names -----------------------------------------------------------------------------------------------------------


def test_hooks_are_found_by_name() -> None:
    with hooked_llm('banned_text:{"texts": ["B"]}', f"{__name__}:Stopping") as llm:
        [one] = answers(llm, fake_renderer().encode("AB", add_special_tokens=False))
        assert one.finish_reason == "content_filter"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("baned_text", "Did you mean"),
        ("no.such.module:Hook", "No module"),
        ("quire.hooks:NoSuch", "NoSuch"),
        ("quire.hooks:Verdict", "must be a quire.hooks.Hook"),
        ("banned_text:{", "JSON"),
        ("banned_text", "texts"),
    ],
)
def test_a_name_that_leads_nowhere_says_why(name: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        hooks_of(fake_config(hooks=(name,)))
