"""A text in pieces: the tokens that are sent before its end are those of the whole, nearly always."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ContextLengthError, RequestError
from quire.renderer import Renderer
from quire.renderer.growing_text import GrowingText
from quire.testing.fake_llm import fake_renderer

KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]
TEXTS = [
    "Hello, my name is Quire.  I am\n\na program   that\treads.\n",
    " leading and trailing spaces  ",
    "Привет, мир! 你好，世界。今天天气很好。",
    "<s>Hi</s> <|im_start|>user\nwhat is 1234567 + 89?<|im_end|>\n",
    "cafe\u0301 naïve 👩‍👩‍👧‍👦🏳️‍🌈 it's I'LL we've",
    "\r\n \n  x=1;  y =2  # end",
]


@pytest.fixture(scope="module")
def renderers(folders):
    return {**{kind: Renderer.from_folder(folders[kind]) for kind in KINDS}, "embedded": fake_renderer()}


def fed(renderer: Renderer, pieces: list[str]) -> tuple[GrowingText, list[int]]:
    growing, sent = renderer.open_text(max_tokens=1000), []
    for piece in pieces:
        sent += growing.push(piece)
    return growing, sent


def cut(text: str, places: list[int]) -> list[str]:
    return [text[start:end] for start, end in itertools.pairwise([0, *sorted(places), len(text)])]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", [*KINDS, "embedded"])
def test_every_cut_gives_the_tokens_of_the_whole(renderers, kind, text):
    renderer = renderers[kind]
    whole = renderer.encode(text)
    for place in range(len(text) + 1):
        growing, sent = fed(renderer, cut(text, [place]))
        assert sent == growing.token_ids == whole[: len(sent)]
        rest = growing.finish()
        assert sent + rest == growing.token_ids == whole == growing.whole()
        assert growing.text == text


@pytest.mark.parametrize("kind", [*KINDS, "embedded"])
def test_a_character_at_a_time(renderers, kind):
    for text in TEXTS:
        growing, sent = fed(renderers[kind], list(text))
        growing.finish()
        assert growing.token_ids == growing.whole()
        words = len(text.split(" "))
        assert words < 3 or sent, "something is settled before the end"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "embedded"])
def test_long_words_are_settled_too(renderers, kind):
    """Text without spaces: only its end is held back."""
    text = "今天天气很好，你好世界。" * 30 + "0123456789" * 12 + "abcdefgh" * 40
    for size in (1, 3, 50):
        growing, sent = fed(renderers[kind], [text[at : at + size] for at in range(0, len(text), size)])
        settled = renderers[kind].decode(sent)
        assert len(settled) > len(text) - 100 - size
        growing.finish()
        assert growing.token_ids == growing.whole()


@pytest.mark.parametrize("kind", [*KINDS, "embedded"])
@given(data=st.data())
def test_what_was_not_foreseen_shows_at_the_end(renderers, kind, data):
    """Any text, cut anywhere: either all tokens are right, or `whole` differs from what was given out."""
    alphabet = st.sampled_from([*"ab  \n\t1'.,é你\u0301\U0001f600", "<s>", "<tool call>", "'ll", "the"])
    text = "".join(data.draw(st.lists(alphabet, max_size=80)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    growing, sent = fed(renderers[kind], cut(text, places))
    assert growing.token_ids == sent
    sent = sent + growing.finish()
    assert growing.token_ids == sent
    assert growing.whole() == renderers[kind].encode(text)


def test_right_nearly_always(renderers):
    """Restarts are what a wrong guess costs: on ordinary text there are none."""
    pick = random.Random(3)
    for kind in KINDS:
        for _ in range(60):
            text = "".join(pick.choice([*TEXTS, " ", "the ", "\n"]) for _ in range(6))
            places = [pick.randrange(len(text)) for _ in range(8)]
            growing, _ = fed(renderers[kind], cut(text, places))
            growing.finish()
            assert growing.token_ids == growing.whole(), (kind, text, places)


def test_an_added_token_with_a_space_inside_is_not_foreseen(renderers):
    """This cut is taken for one between words. The comparison at the end is there for it."""
    growing, sent = fed(renderers["byte_level"], ["a <tool", " call> b"])
    growing.finish()
    whole = growing.whole()
    assert growing.token_ids != whole or sent == whole[: len(sent)]


def test_special_tokens_around_the_text(make_folder):
    renderer = Renderer.from_folder(make_folder("byte_fallback"))
    growing = renderer.open_text(max_tokens=1000)
    first = growing.push("The dog sees")
    assert first[0] == renderer.encode("")[0]
    growing.push(" it")
    growing.finish()
    assert growing.token_ids == renderer.encode("The dog sees it")
    bare = renderer.open_text(max_tokens=1000, add_special_tokens=False)
    bare.push("The dog sees it")
    bare.finish()
    assert bare.token_ids == renderer.encode("The dog sees it", add_special_tokens=False)


def test_half_a_character_is_refused(renderers):
    growing = renderers["byte_level"].open_text(max_tokens=1000)
    with pytest.raises(RequestError, match="surrogate"):
        growing.push("a \ud83d b")


def test_what_can_never_fit_is_refused_before_its_end(renderers):
    growing = renderers["byte_level"].open_text(max_tokens=100)
    growing.push("some text " * 10)
    with pytest.raises(ContextLengthError, match="100 tokens"):
        growing.push("some text " * 1000)


def test_without_a_tokenizer():
    with pytest.raises(RequestError, match="no tokenizer"):
        Renderer(None).open_text(max_tokens=1000)
