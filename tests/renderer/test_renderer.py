"""The renderer as the interfaces see it."""

import json

import pytest

from quire.config import EngineOptions, resolve
from quire.errors import RequestError
from quire.renderer import Renderer
from quire.sampling_params import SamplingParams

CHAT = [{"role": "user", "content": "the dog"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def renderer(make_folder) -> Renderer:
    return Renderer.from_folder(make_folder("byte_fallback", chat_template=TEMPLATE))


def test_a_text_gets_the_tokens_that_the_tokenizer_adds(renderer):
    rendered = renderer.render_prompt("the dog")
    assert renderer.decode(rendered.token_ids, skip_special_tokens=False) == "<s> the dog"
    assert (rendered.text, rendered.media) == ("the dog", [])
    assert renderer.render_prompt("the dog", add_special_tokens=False).token_ids == rendered.token_ids[1:]


def test_a_chat_gets_them_from_its_template_alone(renderer):
    rendered = renderer.render_prompt(CHAT)
    assert rendered.text == "<s><|im_start|>user\nthe dog<|im_end|>"
    assert [token_id for token_id in rendered.token_ids if token_id < 5] == [0, 3, 4]
    assert renderer.render_prompt(CHAT, add_special_tokens=True).token_ids == [0, *rendered.token_ids]


def test_a_chat_is_tokenised_as_in_transformers(renderer, make_folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(make_folder("byte_fallback", chat_template=TEMPLATE))
    assert renderer.render_prompt(CHAT).token_ids == theirs.apply_chat_template(CHAT)["input_ids"]


def test_from_an_engines_configuration(make_folder):
    folder = make_folder("byte_level", chat_template="model's own")
    model = {"model_type": "llama", "vocab_size": 500, "eos_token_id": 4}
    (folder / "config.json").write_text(json.dumps(model))
    config, _ = resolve(EngineOptions(model=str(folder)))
    renderer = Renderer.from_config(config)
    assert renderer.render_prompt(CHAT).text == "model's own"
    assert renderer.eos_token_ids == [4, 1], "config.json's and the tokenizer's own"
    config, _ = resolve(EngineOptions(model=str(folder), chat_template="{{ 'mine' }}"))
    assert Renderer.from_config(config).render_prompt(CHAT).text == "mine"


def test_bad_words_at_the_beginning_and_after_a_space(folders):
    renderer = Renderer.from_folder(folders["byte_level"])
    for word in ("dog", " dog"):
        ids = renderer.bad_words_token_ids([word])
        assert {renderer.decode(token_ids) for token_ids in ids} == {"dog", " dog"}
    assert renderer.bad_words_token_ids(["dog", "dog"]) == renderer.bad_words_token_ids(["dog"])
    with pytest.raises(RequestError, match="bad_words"):
        Renderer.from_folder(folders["metaspace"]).bad_words_token_ids([" "])


def test_a_space_that_is_a_token_of_its_own_is_covered(folders):
    renderer = Renderer.from_folder(folders["byte_level"])
    [bare] = renderer.bad_words_token_ids(["\x01"])
    assert renderer.decode(bare) == "\x01"


def test_single_tokens(folders):
    renderer = Renderer.from_folder(folders["byte_level"])
    token_ids = renderer.encode("😀", add_special_tokens=False)
    assert b"".join(renderer.token_bytes(token_id) for token_id in token_ids) == "😀".encode()
    assert renderer.token_text(3) == "<|im_start|>"
    assert renderer.token_bytes(10_000) == b""
    slow = Renderer.from_folder(folders["word_piece"])
    assert slow.token_bytes(5) == b"the"


def test_without_a_tokenizer_token_ids_still_work(tmp_path):
    renderer = Renderer.from_folder(tmp_path)
    assert not renderer.has_tokenizer
    assert renderer.eos_token_ids == []
    assert renderer.open_stream([1, 2], SamplingParams()).push([3], is_last=True).num_tokens == 1
    for ask in (
        lambda: renderer.render_prompt("text"),
        lambda: renderer.render_prompt(CHAT),
        lambda: renderer.decode([1]),
        lambda: renderer.bad_words_token_ids(["x"]),
        lambda: renderer.open_stream([1], SamplingParams(stop=["x"])),
    ):
        with pytest.raises(RequestError, match="no tokenizer"):
            ask()


def test_without_a_chat_template_texts_still_work(folders):
    renderer = Renderer.from_folder(folders["byte_level"])
    assert not renderer.has_chat_template
    assert renderer.render_prompt("text").token_ids
    with pytest.raises(RequestError, match="no chat template"):
        renderer.render_prompt(CHAT)
