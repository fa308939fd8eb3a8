"""A walk through a grammar: its mask is what the grammar allows, whatever way the tokens came."""

import os
import random
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from quire.structured_output.grammar import GrammarError
from quire.structured_output.grammars import Grammars
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_output.walk import HardMaskError
from quire.structured_outputs_params import StructuredOutputsParams as Params

TEXTS = [b'{"', b'"a"', b'": ', b"true", b"false", b"}]", b"\n\n", b"abc", b"ab", b"12", "é".encode(), b""]
TOKENS = [bytes([byte]) for byte in range(256)] + TEXTS + [b"<end>", b"<stop>", b"<tool>"]
END, STOP, TOOL = range(len(TOKENS) - 3, len(TOKENS))
VOCABULARY = Vocabulary.of(TOKENS, special_ids=[TOOL], end_ids=[END, STOP])
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def grammars():
    grammars = Grammars()
    grammars.open(msgspec.msgpack.encode(VOCABULARY))
    yield grammars
    grammars.close()


def mask_after(grammars, walk, tokens, num_sure=None):
    """The allowed tokens; None: any."""
    words = np.zeros(grammars.num_words, dtype=np.int32)
    tokens = np.array(tokens, dtype=np.int32)
    if not walk.fill(tokens, len(tokens) if num_sure is None else num_sure, words):
        return None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def walk_of(grammars, **values):
    return grammars.walk(Params(**values))


def test_a_vocabulary_crosses_a_socket():
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(VOCABULARY), type=Vocabulary)
    assert sent.tokens() == TOKENS
    assert (sent.size, sent.special_ids, sent.end_ids) == (len(TOKENS), [END, STOP, TOOL], [END, STOP])


FORMS = {
    "schema": {"json": SCHEMA},
    "tight schema": {"json": SCHEMA, "disable_any_whitespace": True},
    "object": {"json_object": True},
    "regex": {"regex": "(ab|abc)*12?"},
    "choice": {"choice": ["abc", "ab", "ébc"]},
    "lark": {"grammar": 'start: "ab" start | <tool> "12"'},
    "gbnf": {"grammar": 'root ::= "a" | "b" root'},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_is_every_token_that_can_be_followed(grammars, form):
    """Against the matcher itself, asked token by token; along random ways, and back."""
    rng = random.Random(form)
    walk, checking = walk_of(grammars, **FORMS[form]), walk_of(grammars, **FORMS[form])
    matcher = checking._form.result().easy.deep_copy()
    for _ in range(6):
        tokens = []
        matcher.reset()
        for _ in range(12):
            allowed = mask_after(grammars, walk, tokens)
            text = {token for token in range(len(TOKENS)) if token not in (END, STOP)}
            assert allowed & text == {token for token in text if matcher.validate_tokens([token]) == 1}
            # an end token is allowed exactly when the grammar may end, and all of them are
            assert allowed & {END, STOP} == ({END, STOP} if matcher.is_accepting() else set())
            following = sorted(allowed - {END, STOP})
            if not following:
                break
            tokens.append(rng.choice(following))
            assert matcher.consume_token(tokens[-1])


def test_what_was_followed_is_a_function_of_the_tokens(grammars):
    walk = walk_of(grammars, json=SCHEMA)
    way = [TOKENS.index(token) for token in (b'{"', b"a", b'": ', b"true", b"}")]
    expected = [mask_after(grammars, walk_of(grammars, json=SCHEMA), way[:count]) for count in range(len(way) + 1)]
    rng = random.Random(0)
    for _ in range(60):
        count = rng.randrange(len(way) + 1)
        assert mask_after(grammars, walk, way[:count]) == expected[count]
    assert expected[-1] == {END, STOP}
    child = walk.child()
    assert mask_after(grammars, child, way[:2]) == expected[2]
    # it goes its own way
    assert mask_after(grammars, child, way) == expected[-1]
    assert walk.is_near(count)
    assert mask_after(grammars, walk, way[:count]) == expected[count]
    other = [*way[:3], TOKENS.index(b"false")]
    assert mask_after(grammars, walk, other) == expected[4]
    assert mask_after(grammars, walk, way[:4]) == expected[4]


def test_a_draft_that_is_not_allowed_does_no_harm(grammars):
    walk = walk_of(grammars, regex="(ab)*")
    a, b, x = b"abx"
    assert mask_after(grammars, walk, [a], 1) == {b}
    assert mask_after(grammars, walk, [a, x], 1) is None
    assert mask_after(grammars, walk, [a, x, b], 1) is None
    assert mask_after(grammars, walk, [a, b], 2) == {a, TOKENS.index(b"ab"), END, STOP}
    # a draft of the end, and of something behind it
    assert mask_after(grammars, walk, [a, b, END], 2) is None
    assert mask_after(grammars, walk, [a, b, END, a], 2) is None
    assert mask_after(grammars, walk, [a, b, a], 3) == {b}


def test_what_follows_the_end_is_nobodys_business(grammars):
    """With asynchronous scheduling a step is computed past it."""
    a, b = b"ab"
    for form in ("(ab)*", "ab"):
        walk = walk_of(grammars, regex=form)
        assert mask_after(grammars, walk, [a, b, STOP]) is None
        assert mask_after(grammars, walk, [a, b, STOP, a]) is None
        assert mask_after(grammars, walk, [a]) == {b}


def test_a_token_against_the_mask_is_an_error(grammars):
    walk = walk_of(grammars, regex="ab")
    with pytest.raises(GrammarError, match="against the mask"):
        mask_after(grammars, walk, list(b"x"))


def test_what_is_no_grammar_fails_when_it_is_asked(grammars):
    walk = walk_of(grammars, regex="(")
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed group"):
            mask_after(grammars, walk, [])
    lost = Grammars().walk(Params(regex="a"))
    with pytest.raises(GrammarError, match="no vocabulary"):
        lost.fill(np.empty(0, dtype=np.int32), 0, np.empty(0, dtype=np.int32))


def test_a_form_is_prepared_beside_the_steps(grammars):
    for form, fits in ((Params(regex="prepared"), True), (Params(regex="("), False)):
        sent = msgspec.msgpack.encode(form)
        deadline = time.monotonic() + 30
        while not grammars.prepare(sent):
            assert time.monotonic() < deadline, "never done"
            time.sleep(0.001)
        if fits:
            assert mask_after(grammars, grammars.walk(form), []) == {ord("p")}


def test_compiled_grammars_are_kept_within_a_bound():
    grammars = Grammars(most_bytes=300_000)
    grammars.open(msgspec.msgpack.encode(VOCABULARY))
    walks = [grammars.walk(Params(regex=f"a{number}")) for number in range(20)]
    assert 0 < grammars.num_compiled < 6
    assert grammars.num_bytes <= 300_000
    # those that were dropped are still followed by who has them
    assert all(mask_after(grammars, walk, []) == {ord("a")} for walk in walks)
    assert grammars.walk(Params(regex="a19"))._form is walks[-1]._form
    grammars.close()


# Every two tokens may stand for one or many: a mask is harder the more there are before it.
AMBIGUOUS = """
start: e
e: e e | e "+" e | "(" e ")" | /[a-z]/ | " " | e e e | e e e e
"""


def fill_beside(grammars, walk, tokens):
    words = np.zeros(grammars.num_words, dtype=np.int32)
    assert walk.fill_beside(np.array(tokens, dtype=np.int32), len(tokens), words)
    return words


def test_a_hard_mask_is_refused_by_the_step_and_made_beside_it(grammars):
    """At the same token in every run: what is counted is the parser's work."""
    words = np.zeros(grammars.num_words, dtype=np.int32)
    places = []
    for request in (1, 2):
        walk, tokens = grammars.walk(Params(grammar=AMBIGUOUS), request), []
        while len(tokens) < 40:
            try:
                assert walk.fill(np.array(tokens, dtype=np.int32), len(tokens), words)
            except HardMaskError:
                break
            tokens.append(ord("a"))
        places.append(len(tokens))
        assert walk.effort.num_hard_masks == 0
        fill_beside(grammars, walk, tokens)
        assert walk.effort.num_hard_masks == 1
        # once more, after a step back, it is not counted again
        fill_beside(grammars, walk, tokens)
        assert walk.effort.num_hard_masks == 1
    assert places[0] == places[1] < 40


def test_a_mask_beside_the_steps_is_the_mask_of_the_step(grammars):
    for form in FORMS.values():
        inline, beside = walk_of(grammars, **form), walk_of(grammars, **form)
        matcher = inline._form.result().easy.deep_copy()
        tokens, words = [], np.zeros(grammars.num_words, dtype=np.int32)
        for place in range(12):
            assert inline.fill(np.array(tokens, dtype=np.int32), len(tokens), words)
            np.testing.assert_array_equal(fill_beside(grammars, beside, tokens), words)
            following = [token for token in range(256) if words[token >> 5] >> (token & 31) & 1]
            if not following:
                break
            tokens.append(following[place % len(following)])
            matcher.consume_token(tokens[-1])
        assert beside.effort.num_hard_masks == 0


def test_a_request_may_have_so_many_hard_masks_over_all_its_outputs(grammars, monkeypatch):
    monkeypatch.setattr("quire.structured_output.walk.MOST_HARD_MASKS", 3)
    parent = grammars.walk(Params(grammar=AMBIGUOUS), 7)
    child = parent.child()
    other = grammars.walk(Params(grammar=AMBIGUOUS), 8)
    letters = [ord("a")] * 36
    walks = [parent, child, grammars.walk(Params(grammar=AMBIGUOUS), 7)]
    for walk in walks:
        fill_beside(grammars, walk, letters)
    with pytest.raises(GrammarError, match="more than 3 masks that are hard"):
        fill_beside(grammars, parent, [*letters, ord("a")])
    fill_beside(grammars, other, letters)


def test_a_mask_beyond_all_limits_says_what_to_do(grammars, monkeypatch):
    """At the same token in every run as well."""
    monkeypatch.setattr("quire.structured_output.grammar._MOST_ITEMS_IN_ROW", 300)

    def last_place(walk):
        for place in range(4, 60, 4):
            try:
                fill_beside(grammars, walk, [ord("a")] * place)
            except GrammarError as error:
                return place, str(error)
        return None

    # its own text, because a form that is compiled keeps its limits
    form = Params(grammar=AMBIGUOUS + "// 300\n")
    ends = {last_place(grammars.walk(form, request)) for request in (3, 4)}
    assert len(ends) == 1
    assert "Make the form simpler" in ends.pop()[1]


def test_a_panic_of_the_library_ends_its_request_alone(grammars, monkeypatch):
    """It is no `Exception`, so nothing else would catch it."""

    class PanicException(BaseException):
        pass

    def panicking(*given):
        raise PanicException("index out of bounds")

    walk = grammars.walk(Params(regex="abc panic"), 77)
    monkeypatch.setattr("quire.structured_output.walk._Follower.fill", panicking)
    with pytest.raises(HardMaskError):
        walk.fill(np.array([], dtype=np.int32), 0, np.zeros(grammars.num_words, dtype=np.int32))
    with pytest.raises(GrammarError, match="index out of bounds"):
        fill_beside(grammars, walk, [])


def test_a_grammar_that_takes_much_memory_is_not_kept_with_others(monkeypatch):
    """However short its text is: the process is seen to grow."""
    grown = iter(range(0, 100 << 20, 10 << 20))
    monkeypatch.setattr("quire.structured_output.grammars._resident_bytes", lambda: next(grown))
    grammars = Grammars(most_bytes=25 << 20)
    grammars.open(msgspec.msgpack.encode(VOCABULARY))
    for regex in ("a", "b", "c", "d", "e"):
        form = msgspec.msgpack.encode(Params(regex=regex))
        while not grammars.prepare(form):
            time.sleep(0.001)
    assert 1 <= grammars.num_compiled <= 3
    assert grammars.num_bytes <= 25 << 20
    grammars.close()


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_a_lexer_at_its_limit_is_told_from_a_token_that_does_not_fit(grammars, num_drafts):
    """Everything that is said here fits; what is full of it is the memory of the form, which all walks share."""
    rng = random.Random(7)
    first = walk_of(grammars, regex=f"[a-z ]*e[a-z ]{{25}}x{{{num_drafts}}}")
    words = np.zeros(grammars.num_words, dtype=np.int32)

    def follow_many():
        for _ in range(24):
            tokens = np.array([ord(rng.choice("eeeeaz x")) for _ in range(6_000)], dtype=np.int32)
            assert first.child().fill_beside(tokens, len(tokens) - num_drafts, words)

    with pytest.raises(GrammarError, match="lexer error: too many"):
        follow_many()


def test_a_form_whose_memory_is_full_is_made_anew_for_who_comes_next(grammars):
    """The states of one lexer stay; here each letter is another one."""
    form = {"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 50_000}}, "required": ["a"]}}

    def tokens_of(num_letters):
        return np.array(list(b'{"a":"' + b"a" * num_letters), dtype=np.int32)

    words = np.zeros(grammars.num_words, dtype=np.int32)
    before = walk_of(grammars, **form)
    longest = walk_of(grammars, **form)
    with pytest.raises(HardMaskError):
        longest.fill(tokens_of(40_000), 40_006, words)
    with pytest.raises(HardMaskError):
        before.fill(tokens_of(10), 16, words)
    # who is on the way goes on beside the steps, which has a memory of its own
    assert before.fill_beside(tokens_of(10), 16, words)
    assert mask_after(grammars, walk_of(grammars, **form), tokens_of(10)) >= {*range(ord("a"), ord("z"))}


def test_a_child_that_copies_nothing_has_the_same_masks(grammars):
    way = [TOKENS.index(token) for token in (b'{"', b"a", b'": ', b"true")]
    walk = walk_of(grammars, json=SCHEMA)
    expected = mask_after(grammars, walk, way)
    child = walk.child(may_copy=False)
    assert not child.is_near(len(way) + 1), "it is made beside the steps"
    assert mask_after(grammars, child, way) == expected
    assert walk.effort.copy_seconds == 0
    assert walk.child().is_near(len(way) + 1)
    assert walk.effort.copy_seconds > 0


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux'")
def test_what_is_computed_beside_gives_way_and_who_waits_for_it_does_not(grammars):
    """A thread of low priority that holds the interpreter's lock would stop everybody else on a busy machine."""
    priorities = {}

    def fill():
        before = set(os.listdir("/proc/self/task"))
        fill_beside(grammars, walk_of(grammars, json=SCHEMA), [])
        priorities["own"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        new = set(os.listdir("/proc/self/task")) - before
        priorities["others"] = [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in new]

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    assert priorities["own"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert 19 in priorities["others"]
