"""Tokenizers read from files: the same tokens as Transformers, and every text back as it was."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from quire.errors import ContextLengthError, ModelError, RequestError
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.text_decoder import ByteDecoder, WindowDecoder
from quire.renderer.token_bytes import recognise
from quire.renderer.tokenizer import Tokenizer

FAST_KINDS = ["byte_level", "byte_fallback", "metaspace"]


def load(folder) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_every_text_comes_back(folders, texts, kind):
    tokenizer = load(folders[kind])
    for text in [*texts, " two spaces before", "</s>", "\x00\x7f\u0080"]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", FAST_KINDS)
def test_the_fast_way_is_taken_for_what_language_models_have(folders, kind):
    assert isinstance(load(folders[kind]).open_decoder((), skip_special_tokens=True), ByteDecoder)


def test_the_slow_way_is_taken_where_tokens_depend_on_their_neighbours(folders):
    tokenizer = load(folders["word_piece"])
    assert isinstance(tokenizer.open_decoder((), skip_special_tokens=True), WindowDecoder)
    token_ids = tokenizer.encode("the quick foxes jumping", add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "the quick foxes jumping"


@pytest.mark.parametrize("kind", FAST_KINDS)
@given(data=st.data())
def test_any_tokens_read_as_the_tokenizers_library_reads_them(folders, kind, data):
    backend = Backend.from_file(str(folders[kind] / "tokenizer.json"))
    tokenizer = load(folders[kind])
    token_ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=12))
    skip = data.draw(st.booleans())
    expected = backend.decode(token_ids, skip_special_tokens=skip)
    if kind == "byte_fallback" and "\ufffd" in expected:
        return  # the library gives up a whole run of bytes for one bad byte; here the good ones stay
    assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", [*FAST_KINDS, "word_piece"])
def test_a_long_text_has_the_same_tokens(folders, texts, kind):
    backend = Backend.from_file(str(folders[kind] / "tokenizer.json"))
    text = " ".join(texts) * (3000 // len(" ".join(texts)) + 1)
    for special in (False, True):
        assert (
            load(folders[kind]).encode(text, add_special_tokens=special)
            == backend.encode(text, add_special_tokens=special).ids
        )


def test_only_a_text_that_cannot_fit_is_refused_by_its_length(folders):
    tokenizer = load(folders["byte_level"])
    longest = max(tokenizer._backend.get_vocab(), key=len)
    fits = longest * 1000
    tokenizer.check_can_fit(fits, 1000, "prompt")
    with pytest.raises(ContextLengthError, match=f"{len(fits) + 1} characters") as caught:
        tokenizer.check_can_fit(fits + "a", 1000, "prompt")
    assert caught.value.param == "prompt"


def test_good_bytes_beside_a_bad_one_stay(folders):
    tokenizer = load(folders["byte_fallback"])
    token_ids = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in [*"世".encode(), 0xFF, *"界".encode()]]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "世\ufffd界"


def test_a_decoder_that_says_otherwise_is_not_trusted(folders, tmp_path, monkeypatch):
    """If the reading of `decoder` were wrong, the tokenizer itself would be asked."""
    monkeypatch.setattr(
        "quire.renderer.tokenizer.recognise", lambda _: recognise({"type": "Metaspace", "replacement": "e"})
    )
    tokenizer = load(folders["byte_level"])
    assert isinstance(tokenizer.open_decoder((), skip_special_tokens=True), WindowDecoder)
    assert (
        tokenizer.decode(tokenizer.encode("the dog", add_special_tokens=False), skip_special_tokens=True) == "the dog"
    )


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Strip(" ", 2, 0), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
    ],
)
def test_a_decoder_with_context_is_not_recognised(decoder):
    assert recognise(json.loads(decoder.__getstate__())) is None


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_what_tokenizer_json_says_about_bos_counts(make_folder, add_bos):
    from transformers import PreTrainedTokenizerFast

    folder = make_folder("byte_fallback", add_bos_token=add_bos)
    token_ids = load(folder).encode("the dog", add_special_tokens=True)
    assert token_ids == PreTrainedTokenizerFast.from_pretrained(folder)("the dog")["input_ids"]
    assert token_ids == [0, *load(folder).encode("the dog", add_special_tokens=False)]


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_where_it_says_nothing_the_config_counts(make_folder, add_bos, add_eos):
    tokenizer = load(make_folder("byte_level", add_bos_token=add_bos, add_eos_token=add_eos))
    bare = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog", add_special_tokens=True) == [0] * add_bos + bare + [1] * add_eos


def test_names_mark_tokens_as_special(make_folder):
    tokenizer = load(make_folder(eos_token={"content": "<tool call>", "__type": "AddedToken"}))
    token_id = tokenizer.id_of("<tool call>")
    assert token_id in tokenizer.special_ids
    assert tokenizer.decode([token_id], skip_special_tokens=True) == ""


def test_a_named_token_that_the_model_does_not_have_is_not_added(make_folder):
    """Transformers would add a row that the embedding lacks."""
    tokenizer = load(make_folder(pad_token="[PAD]"))
    assert tokenizer.id_of("[PAD]") is None
    assert tokenizer.vocab_size == load(make_folder()).vocab_size


def test_tokens_that_only_the_config_declares(make_folder):
    size = load(make_folder()).vocab_size
    declared = {str(size): {"content": "<new>", "special": True}, str(size + 7): {"content": "<elsewhere>"}}
    tokenizer = load(make_folder(added_tokens_decoder=declared))
    assert tokenizer.encode("a<new>", add_special_tokens=False)[-1] == size
    assert size in tokenizer.special_ids
    assert tokenizer.id_of("<elsewhere>") is None


def test_limits_from_training_are_lifted(make_folder):
    folder = make_folder()
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    text = "the quick brown fox jumps over the lazy dog"
    tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_what_is_no_text_is_a_users_mistake(folders):
    with pytest.raises(RequestError, match="text: int given, must be one text"):
        load(folders["byte_level"]).encode(5, add_special_tokens=False)


def test_a_lone_surrogate_is_a_users_mistake(folders):
    with pytest.raises(RequestError, match="surrogate"):
        load(folders["byte_level"]).encode("half \ud83d", add_special_tokens=False)


def test_a_folder_without_a_tokenizer(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_broken_tokenizer_names_its_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_config_names_its_file(make_folder):
    folder = make_folder()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_older_files_go_through_transformers(folders, tmp_path):
    """vocab.json and merges.txt, as GPT-2 has them, without a tokenizer.json."""
    Backend.from_file(str(folders["byte_level"] / "tokenizer.json")).model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load(tmp_path)
    text = "the quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text


def letters(known: str, *, special: bool) -> Tokenizer:
    """Of these letters; all others are lost."""
    vocabulary = {letter: number for number, letter in enumerate(("[B]", "[E]", *known))}
    backend = Backend(models.BPE(vocabulary, []))
    if special:
        around = [("[B]", 0), ("[E]", 1)]
        backend.post_processor = processors.TemplateProcessing(single="[B] $A [E]", special_tokens=around)
    return Tokenizer(backend, SpecialTokens())


@pytest.mark.parametrize("known", ["ad", "0d", ".d"])
def test_special_tokens_stand_around_pieces_where_line_ends_are_lost(known):
    tokenizer = letters(known, special=True)
    assert tokenizer.encode("\n", add_special_tokens=False) == []
    assert tokenizer.encode_pieces(["d", "d"], add_special_tokens=True) == [0, 3, 3, 1]


def test_pieces_where_nothing_stands_around_a_text():
    assert letters("d", special=False).encode_pieces(["d", "d"], add_special_tokens=True) == [2, 2]


def test_where_special_tokens_stand_is_not_guessed():
    with pytest.raises(RequestError, match="add_special_tokens=false"):
        letters("d", special=True).encode_pieces(["d", "d"], add_special_tokens=True)
