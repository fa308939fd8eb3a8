"""Stop strings: the result is that of a plain search in the whole text, however the text arrives."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.renderer.stop_strings import StopAutomaton, StopMatcher, stop_automaton

letters = st.text(alphabet="ab🙂", max_size=14)
stops_of = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), min_size=1, max_size=4)


def cut(text: str, stops: list[str], includes_stop: bool) -> tuple[str, str | None]:
    """The specification: the match that ends first; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if includes_stop else end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({min(place, len(text)) for place in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(edges)]


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of the text may become a stop string."""
    return max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


@given(letters, stops_of, st.lists(st.integers(0, 14), max_size=8), st.booleans())
def test_any_split_gives_the_cut_text(text, stops, cuts, includes_stop):
    matcher = StopMatcher(stops, includes_stop=includes_stop)
    given_out, met, seen = "", None, ""
    for piece in pieces_of(text, cuts):
        new, met = matcher.push(piece)
        given_out += new
        seen += piece
        if met is not None:
            break
        # not one character more than needed is held back
        assert len(given_out) == len(seen) - longest_beginning(seen, stops)
    else:
        given_out += matcher.finish()
    assert (given_out, met) == cut(text, stops, includes_stop)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN", ["END"], "one EN"),
        ("xabc", ["ab", "abc"], "x"),
        ("xabc", ["abc", "bc"], "x"),
        ("abcd", ["bc", "abcd"], "a"),
        ("aaab", ["aab"], "a"),
        ("END", ["END"], ""),
        ("ok]^-\\", ["]^"], "ok"),
        ("日本語です", ["語で"], "日本"),
        ("👩‍👩‍👧", ["\u200d👧"], "👩‍👩"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_examples(text, stops, expected, size):
    matcher = StopMatcher(stops, includes_stop=False)
    out = ""
    for start in range(0, len(text), size):
        new, met = matcher.push(text[start : start + size])
        out += new
        if met:
            break
    else:
        out += matcher.finish()
    assert out == expected


def test_before_the_least_length_a_stop_string_is_text():
    matcher = StopMatcher(["END"], includes_stop=False)
    assert matcher.push("an END of", may_stop=False) == ("an END of", None)
    assert matcher.push(" it E", may_stop=False) == (" it ", None)
    # it counts if it ends after the least length, wherever it began
    assert matcher.push("ND!") == ("", "END")


def test_a_stop_string_that_was_passed_by_is_not_held_back():
    matcher = StopMatcher(["END"], includes_stop=False)
    assert matcher.push("END", may_stop=False) == ("END", None)


def test_time_is_linear_in_the_text():
    """Steps of the automaton, counted: falling back never costs more than was gained."""

    class Counting(dict):
        looked_up = 0

        def __contains__(self, letter):
            Counting.looked_up += 1
            return super().__contains__(letter)

    automaton = StopAutomaton(("a" * 500 + "b",))
    automaton.children = [Counting(children) for children in automaton.children]
    node = 0
    for letter in ("a" * 499 + "c") * 20:
        node = automaton.step(node, letter)
    assert Counting.looked_up <= 2 * 500 * 20


def test_equal_requests_share_an_automaton():
    assert stop_automaton(("a", "b")) is stop_automaton(("a", "b"))
