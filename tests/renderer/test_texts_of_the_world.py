"""CONF-UTF8: texts of many scripts, token by token, in six kinds of tokenizers: the deltas are the whole text, no
character comes broken, and nothing of a prompt appears, wherever it ends."""

import random

import pytest

from quire.renderer import Renderer
from quire.sampling_params import SamplingParams

ALL_KINDS = ["byte_level", "tiktoken", "byte_fallback", "unigram_bytes", "metaspace", "word_piece"]
# those in which every text can be written
WITH_BYTES = ["byte_level", "tiktoken", "byte_fallback", "unigram_bytes"]
NUM_TEXTS = 2000
ZWJ, SELECTOR = "\u200d", "\ufe0f"
FAMILY, ASTRONAUT, RAINBOW = ZWJ.join("👩👩👧👦"), ZWJ.join("🧑🚀"), "🏳" + SELECTOR + ZWJ + "🌈"
SCRIPTS = {
    "emoji": ["😀", "🤖", "👍🏽", "❤" + SELECTOR, ASTRONAUT, FAMILY, RAINBOW, "🇩🇪"],
    "chinese": list("你好世界今天天气𠮷龘"),
    "japanese": list("こんにちはカタカナｶﾞ漢字"),
    "thai": list("สวัสดีชาวโลกำ็่้"),
    "korean": [*"안녕하세요", "한", "ㅎㅏㄴ"],
    "arabic": [*"مرحبا بالعالم", "ﷺ", "\u200f"],
    "hindi": ["नमस्ते", "क्षि", "ज्ञ"],
    "combining": ["e\u0302\u0300", "n\u0303", "a" + "\u0301" * 6, "Z\u0351\u036b"],
    "latin": ["naïve", " café", "the", " dog", "ß", "½", "𝕏", "\u00a0"],
    "white space": [" ", "  ", "\n", "\t", "\r\n", "\u2028", "\u0000", "\ufeff"],
}  # fmt: skip


def make_texts() -> list[str]:
    """Pieces of one script, or of all of them."""
    draw = random.Random(20)
    everything = [piece for pieces in SCRIPTS.values() for piece in pieces]
    texts = []
    for number in range(NUM_TEXTS):
        pieces = list(SCRIPTS.values())[number % len(SCRIPTS)] if number % 3 else everything
        texts.append("".join(draw.choices(pieces, k=draw.randint(1, 12))))
    return texts


TEXTS = make_texts()


@pytest.fixture(scope="module")
def renderers(folders) -> dict[str, Renderer]:
    return {kind: Renderer.from_folder(folder) for kind, folder in folders.items()}


def deltas(renderer, token_ids, prompt=()) -> list[str]:
    stream = renderer.open_stream(list(prompt), SamplingParams(skip_special_tokens=False))
    return [*(stream.push([token], is_last=False).text for token in token_ids), stream.push([], is_last=True).text]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_deltas_are_the_whole_text(renderers, kind):
    renderer = renderers[kind]
    for text in TEXTS:
        token_ids = renderer.encode(text, add_special_tokens=False)
        pieces = deltas(renderer, token_ids)
        assert "".join(pieces) == renderer.decode(token_ids, skip_special_tokens=False), text
        assert not any(0xD800 <= ord(letter) < 0xE000 for piece in pieces for letter in piece), text
        if kind in WITH_BYTES:
            assert not any("\ufffd" in piece for piece in pieces), text


@pytest.mark.parametrize("kind", ["byte_level", "tiktoken", "unigram_bytes"])
def test_what_was_written_comes_back(renderers, kind):
    for text in TEXTS:
        assert "".join(deltas(renderers[kind], renderers[kind].encode(text, add_special_tokens=False))) == text


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_text_that_breaks_off_is_broken_at_its_end_alone(renderers, kind):
    """U+FFFD only for bytes at the end that are no character."""
    renderer = renderers[kind]
    num_broken = 0
    for text in TEXTS[::10]:
        token_ids = renderer.encode(text, add_special_tokens=False)
        for length in range(len(token_ids)):
            pieces = deltas(renderer, token_ids[:length])
            assert "\ufffd" not in "".join(pieces[:-1]), text
            assert pieces[-1].strip("\ufffd") == "", text
            num_broken += bool(pieces[-1])
    assert num_broken > 50


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_prompt_that_ends_anywhere_never_appears(renderers, kind):
    """Prompt and answer are a text that was cut at any token; what the prompt had finished does not come again."""
    renderer = renderers[kind]
    for text in TEXTS[::25]:
        token_ids = renderer.encode(text, add_special_tokens=False)
        whole = renderer.decode(token_ids, skip_special_tokens=False)
        for cut in range(1, len(token_ids)):
            finished = "".join(deltas(renderer, token_ids[:cut])[:-1])
            answer = "".join(deltas(renderer, token_ids[cut:], prompt=token_ids[:cut]))
            assert finished + answer == whole, (text, cut)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_answer_of_another_script_holds_nothing_of_the_prompt(renderers, kind):
    """Also where the prompt's last character stays unfinished."""
    renderer = renderers[kind]
    answer = renderer.encode("the dog", add_special_tokens=False)
    alone = "".join(deltas(renderer, answer)).strip()
    for text in TEXTS[::25]:
        prompt = renderer.encode(text, add_special_tokens=False)
        for cut in range(1, len(prompt) + 1):
            assert "".join(deltas(renderer, answer, prompt=prompt[:cut])).strip() == alone, (text, cut)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_what_is_looked_at_again_does_not_grow(renderers, kind, monkeypatch):
    """Linear on bytes that never become a character, in every kind that has bytes."""
    from quire.renderer import text_decoder

    sizes = []

    def measured(data, errors, final):
        sizes.append(len(data))
        return decode(data, errors, final)

    decode = text_decoder.utf_8_decode
    monkeypatch.setattr(text_decoder, "utf_8_decode", measured)
    renderer = renderers[kind]
    by_byte = {renderer.token_bytes(token): token for token in range(renderer.vocab_size)}
    text = "".join(deltas(renderer, [by_byte[b"\xf0"], by_byte[b"\x9f"], by_byte[b"\xff"]] * 200))
    assert set(text) == {"\ufffd"}
    assert sizes
    assert max(sizes) <= 4
