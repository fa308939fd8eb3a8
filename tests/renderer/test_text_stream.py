"""The text of a stream is the text of the whole, and nothing of it is ever taken back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.renderer import Renderer
from quire.sampling_params import SamplingParams

KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]


@pytest.fixture(scope="module")
def renderers(folders) -> dict[str, Renderer]:
    return {kind: Renderer.from_folder(folder) for kind, folder in folders.items()}


def chunks_of(token_ids, sizes):
    """The ids in pieces of these sizes; the last piece takes what is left."""
    chunks, start = [], 0
    for size in sizes:
        chunks.append(token_ids[start : start + size])
        start += size
    return [*chunks, token_ids[start:]]


def streamed(renderer, token_ids, sizes=None, prompt=(), **sampling) -> str:
    stream = renderer.open_stream(list(prompt), SamplingParams(**{"ignore_eos": True, **sampling}))
    chunks = chunks_of(token_ids, sizes if sizes is not None else [1] * (len(token_ids) - 1))
    return "".join(stream.push(chunk, is_last=chunk is chunks[-1]).text for chunk in chunks)


def ids_of_bytes(renderer: Renderer, data: bytes) -> list[int]:
    """A token for each byte, in the byte-level tokenizer."""
    by_byte = {renderer.token_bytes(token_id): token_id for token_id in range(renderer.vocab_size)}
    return [by_byte[bytes([byte])] for byte in data]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_split_of_any_tokens_gives_the_same_text(renderers, kind, data):
    renderer = renderers[kind]
    token_ids = data.draw(st.lists(st.integers(0, renderer.vocab_size + 2), max_size=16))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=8))
    skip = data.draw(st.booleans())
    text = streamed(renderer, token_ids, sizes, skip_special_tokens=skip)
    assert text == renderer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_texts_of_the_world_come_without_a_broken_character(renderers, texts, kind):
    renderer = renderers[kind]
    for text in texts:
        token_ids = renderer.encode(text, add_special_tokens=False)
        stream = renderer.open_stream([], SamplingParams())
        pieces = [stream.push([token_id], is_last=False).text for token_id in token_ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.push([], is_last=True).text == renderer.decode(token_ids)


@given(text=st.text(max_size=40))
def test_any_text_comes_back_token_by_token(renderers, text):
    renderer = renderers["byte_level"]
    token_ids = renderer.encode(text, add_special_tokens=False)
    assert streamed(renderer, token_ids, skip_special_tokens=False) == text


@given(data=st.binary(max_size=24))
def test_bytes_become_text_as_utf_8_says(renderers, data):
    """Also invalid ones: a replacement character for each, none for what only waits."""
    renderer = renderers["byte_level"]
    assert streamed(renderer, ids_of_bytes(renderer, data)) == data.decode("utf-8", "replace")


def test_what_is_held_back_is_less_than_a_character(renderers):
    renderer = renderers["byte_level"]
    token_ids = ids_of_bytes(renderer, b"\xff" * 200 + "😀".encode() + b"\xf0\x9f\x98")
    stream = renderer.open_stream([], SamplingParams())
    text = ""
    for position, token_id in enumerate(token_ids, 1):
        text += stream.push([token_id], is_last=False).text
        assert position - len(text.replace("😀", "abcd")) <= 3
    assert stream.push([], is_last=True).text == "\ufffd"


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("日".encode()[:2], "日".encode()[2:] + b"!", "日!"),
        ("日".encode()[:1], "日".encode()[1:], "日"),
        ("😀".encode()[:3], b"abc", "abc"),
        ("é".encode()[:1], "日本".encode(), "日本"),
        (b"\xe0", b"\x80x", "\ufffdx"),
        ("日".encode()[:1], "日".encode()[1:2], "\ufffd"),
        ("日".encode()[:2], b"", ""),
        ("日本".encode(), b"\xac", "\ufffd"),
        (b"ab", b"cd", "cd"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_prompt_that_ends_within_a_character(renderers, prompt, output, expected, at_once):
    """The character is completed if the output goes on with it; else nothing of the prompt appears."""
    renderer = renderers["byte_level"]
    prompt_ids, output_ids = ids_of_bytes(renderer, prompt), ids_of_bytes(renderer, output)
    assert streamed(renderer, output_ids, [] if at_once else None, prompt=prompt_ids) == expected


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_the_space_at_the_start_depends_on_the_prompt(renderers, kind):
    renderer = renderers[kind]
    token_ids = renderer.encode("the dog", add_special_tokens=False)
    prompt = renderer.encode("brown", add_special_tokens=False)
    assert streamed(renderer, token_ids) == "the dog"
    assert streamed(renderer, token_ids, prompt=[0]) == "the dog", "a skipped token is no text"
    assert streamed(renderer, token_ids, prompt=prompt) == " the dog"
    assert streamed(renderer, [0, *token_ids]) == "the dog"


def test_a_slow_tokenizer_takes_the_prompt_as_context(renderers):
    renderer = renderers["word_piece"]
    prompt = renderer.encode("the fox", add_special_tokens=False)
    assert streamed(renderer, renderer.encode("jumping dog", add_special_tokens=False), prompt=prompt) == " jumping dog"
    [_, suffix] = renderer.encode("foxes", add_special_tokens=False)
    assert streamed(renderer, [suffix], prompt=prompt) == "es"


def test_special_tokens_are_left_out_unless_asked_for(renderers):
    renderer = renderers["byte_level"]
    token_ids = renderer.encode("a<|im_start|>b", add_special_tokens=False)
    assert streamed(renderer, token_ids) == "ab"
    assert streamed(renderer, token_ids, skip_special_tokens=False) == "a<|im_start|>b"


def test_the_token_that_ends_a_sequence_leaves_no_text(renderers):
    renderer = renderers["byte_level"]
    [full_stop] = ids_of_bytes(renderer, b".")
    token_ids = [*ids_of_bytes(renderer, b"ab"), full_stop]
    assert streamed(renderer, token_ids) == "ab."
    assert streamed(renderer, token_ids, stop_token_ids=[full_stop]) == "ab"
    assert streamed(renderer, token_ids, stop_token_ids=[full_stop], include_stop_str_in_output=True) == "ab."
    assert streamed(renderer, [full_stop, *token_ids], stop_token_ids=[full_stop]) == ".ab"
    end = renderer.encode("</s>", add_special_tokens=False)
    assert streamed(renderer, token_ids + end, skip_special_tokens=False, ignore_eos=False) == "ab."
    assert streamed(renderer, token_ids + end, skip_special_tokens=False) == "ab.</s>"


def test_without_detokenizing_there_is_no_text(renderers):
    stream = renderers["byte_level"].open_stream([], SamplingParams(detokenize=False))
    delta = stream.push([30, 31], is_last=True)
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("", None, 2)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_stop_strings_cut_the_text_wherever_tokens_end(renderers, kind, data):
    renderer = renderers[kind]
    token_ids = data.draw(st.lists(st.integers(5, renderer.vocab_size - 1), max_size=12))
    whole = renderer.decode(token_ids)
    stops = data.draw(st.lists(st.text(min_size=1, max_size=2), max_size=2))
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 5))])
    stop = next((end for end in range(1, len(whole) + 1) if whole[:end].endswith(tuple(stops))), None)
    expected = whole
    if stop is not None:
        expected = whole[: stop - max(len(text) for text in stops if whole[:stop].endswith(text))]
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=6))
    assert streamed(renderer, token_ids, sizes, stop=stops) == expected


def test_the_delta_says_how_many_tokens_count(renderers):
    renderer = renderers["byte_level"]
    stream = renderer.open_stream([], SamplingParams(stop=["cd"]))
    assert stream.push(ids_of_bytes(renderer, b"abc"), is_last=False).num_tokens == 3
    delta = stream.push(ids_of_bytes(renderer, b"def"), is_last=True)
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("", "cd", 1)
    after = stream.push([40], is_last=True)
    assert (after.text, after.stop_string, after.num_tokens) == ("", None, 0)


def test_text_behind_a_stop_string_in_the_same_token_is_cut(renderers):
    renderer = renderers["byte_level"]
    token_ids = renderer.encode("<tool call>", add_special_tokens=False)
    assert len(token_ids) == 1
    assert streamed(renderer, token_ids, stop=["ol"]) == "<to"
    assert streamed(renderer, token_ids, stop=["ol"], include_stop_str_in_output=True) == "<tool"


def test_stop_strings_wait_for_the_least_number_of_tokens(renderers):
    renderer = renderers["byte_level"]
    token_ids = ids_of_bytes(renderer, b"a.b.c.")
    assert streamed(renderer, token_ids, stop=["."]) == "a"
    assert streamed(renderer, token_ids, stop=["."], min_tokens=2) == "a.b"
    assert streamed(renderer, token_ids, stop=["."], min_tokens=4) == "a.b.c"
    assert streamed(renderer, token_ids, [], stop=["."], min_tokens=4) == "a.b.c"


def test_a_stop_string_made_of_replaced_bytes(renderers):
    renderer = renderers["byte_level"]
    assert streamed(renderer, ids_of_bytes(renderer, b"ab\xf0"), stop=["\ufffd"]) == "ab"


def test_each_byte_is_looked_at_a_fixed_number_of_times(renderers, monkeypatch):
    """Linear on bytes that never become characters: what is decoded again each time stays within one character."""
    from quire.renderer import text_decoder

    sizes = []

    def measured(data, errors, final):
        sizes.append(len(data))
        return decode(data, errors, final)

    decode = text_decoder.utf_8_decode
    monkeypatch.setattr(text_decoder, "utf_8_decode", measured)
    renderer = renderers["byte_level"]
    streamed(renderer, ids_of_bytes(renderer, b"\xf0\x9f\x98" * 100))
    assert max(sizes) <= 4


def test_a_slow_tokenizer_decodes_a_short_window(renderers, monkeypatch):
    from quire.renderer.text_decoder import WindowDecoder

    lengths = []

    def decode(token_ids):
        lengths.append(len(token_ids))
        return "\ufffd" * len(token_ids)

    decoder = WindowDecoder(decode, range(50))
    text = decoder.push(range(300)) + decoder.finish()
    assert set(text) == {"\ufffd"}
    assert max(lengths) <= 8


def test_embedded_model_reads_and_writes():
    """The model that ships with the package."""
    renderer = Renderer.from_folder(Path(__file__).parents[2] / "src" / "quire" / "embedded")
    text = "Hello 😀, 3 plus 4?"
    assert streamed(renderer, renderer.encode(text)) == text
