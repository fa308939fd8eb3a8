"""Tokenizers out of the metadata of a GGUF file: the same tokens as from the tokenizer they were made of."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from quire.errors import ModelError
from quire.renderer.chat_template import ChatTemplates
from quire.renderer.renderer import Renderer
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.tokenizer import Tokenizer
from quire.testing.tiny_tokenizers import SPECIAL, TEXTS, byte_level

gguf = pytest.importorskip("gguf")
MORE = [
    "Numbers 123 45678 9, it's don't WE'LL  spaces   \n\n tabs\t x",
    "CamelCase HTTPServer fooBar ÉCOLE straße 한글 test_case",
    "#include <x> .field 漢字かなカナ2024年 (yes)\n\n",
]
# Composed letters only, because one of the cuts composes first.
LETTERS = sorted({letter for text in TEXTS + MORE for letter in text})
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# As the tokenizer.json files of these models have them.
PATTERNS = {
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2": None,
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def texts(count=300):
    rng = random.Random(0)
    drawn = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 30))) for _ in range(count)]
    return TEXTS + MORE + drawn + [text + "<|im_end|> x<|im_start|>" for text in drawn[:20]]


def write(path, metadata):
    """A file with metadata and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parts_of(backend, pre=None):
    """The metadata of a BPE tokenizer."""
    content = json.loads(backend.to_str())
    vocabulary = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    special = {token["content"]: token["special"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [1 if token not in special else 3 if special[token] else 4 for token in tokens]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocabulary["<s>"],
        "tokenizer.ggml.eos_token_id": vocabulary["</s>"],
    }
    return found | ({"tokenizer.ggml.pre": pre} if pre else {})


def trained(pattern):
    backend = Backend(models.BPE(ignore_merges=pattern == PATTERNS["llama-bpe"]))
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        from tokenizers import Regex

        patterns = (pattern,) if isinstance(pattern, str) else pattern
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
        own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, own])
    if pattern == PATTERNS["qwen2"]:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator((TEXTS + MORE) * 3, trainer)
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return backend


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_level_tokens_are_the_same(pre, tmp_path):
    backend = trained(PATTERNS[pre])
    tokenizer = Tokenizer.from_folder(write(tmp_path / "x.gguf", parts_of(backend, pre)))
    for text in [*texts(), "a <tool call> b"]:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) == backend.decode(
            expected, skip_special_tokens=False
        )
    assert tokenizer.special_ids == {backend.token_to_id(token) for token in SPECIAL}
    begins = pre == "llama-bpe"
    assert (tokenizer.encode("x", add_special_tokens=True)[0] == backend.token_to_id("<s>")) is begins


def test_the_digits_of_code_models_stand_alone(tmp_path):
    backend = byte_level()
    tokenizer = Tokenizer.from_folder(write(tmp_path / "x.gguf", parts_of(backend, "smollm")))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in texts(100):
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


def test_a_whole_tokenizer_json_comes_first(tmp_path):
    backend = byte_level()
    metadata = {**parts_of(backend, "qwen2"), "tokenizer.huggingface.json": backend.to_str()}
    tokenizer = Tokenizer.from_folder(write(tmp_path / "x.gguf", metadata))
    for text in texts(50):
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


def test_a_whole_tokenizer_json_may_hold_only_what_is_known_to_be_harmless(tmp_path):
    bomb = {**json.loads(byte_level().to_str()), "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}}}
    metadata = {**parts_of(byte_level(), "qwen2"), "tokenizer.huggingface.json": json.dumps(bomb)}
    with pytest.raises(ModelError, match="pre_tokenizer of the type Split, and what a GGUF file holds"):
        Tokenizer.from_folder(write(tmp_path / "x.gguf", metadata))


# ---- SentencePiece --------------------------------------------------------------------------------------------------


def pieces():
    """A vocabulary with scores, as SentencePiece trains one: earlier merges have the better scores."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    letters = sorted({letter for text in TEXTS[:2] + MORE for letter in text.replace(" ", "▁")})
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator(["▁" + text for text in (TEXTS[:2] + MORE) * 3], trainer)
    vocabulary = backend.get_vocab()
    learned = sorted(vocabulary, key=vocabulary.get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    types = [2, 3, 3, *[6] * 256, *[1] * len(learned)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(learned))]
    return tokens, types, scores


def joined_by_score(text, tokens, scores):
    """What SentencePiece does, written down: join the best pair of neighbours until none is a piece."""
    score_of = dict(zip(tokens, scores, strict=True))
    symbols = list(text)
    while True:
        pairs = [
            (-score_of[left + right], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in score_of
        ]
        if not pairs:
            break
        _, place = min(pairs)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids = []
    for symbol in symbols:
        if symbol in score_of:
            ids.append(tokens.index(symbol))
        else:
            ids += [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return ids


def sentencepiece_file(path, **changes):
    tokens, types, scores = pieces()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return write(path, metadata | changes), tokens, scores


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_join_by_their_scores(has_prefix, tmp_path):
    changes = {} if has_prefix else {"tokenizer.ggml.add_space_prefix": False}
    path, tokens, scores = sentencepiece_file(tmp_path / "x.gguf", **changes)
    tokenizer = Tokenizer.from_folder(path)
    for text in TEXTS + MORE + texts(150)[7:157]:
        expected = joined_by_score(("▁" if has_prefix else "") + text.replace(" ", "▁"), tokens, scores)
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == text
    assert tokenizer.encode("dog", add_special_tokens=True)[0] == 1


def test_a_text_begins_as_the_file_says(tmp_path):
    path, _, _ = sentencepiece_file(
        tmp_path / "x.gguf", **{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    )
    ids = Tokenizer.from_folder(path).encode("dog", add_special_tokens=True)
    assert ids[0] != 1
    assert ids[-1] == 2


# ---- templates and damage -------------------------------------------------------------------------------------------


def test_chat_templates_are_found(tmp_path):
    default = "{{ messages[0]['content'] }}!"
    texts_by_name = {"tokenizer.chat_template": default, "tokenizer.chat_template.tool_use": "t"}
    path = write(tmp_path / "x.gguf", {**parts_of(byte_level(), "gpt-2"), **texts_by_name})
    special = SpecialTokens.read(path)
    assert special.by_name == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplates.find([path], special).texts == {"default": "{{ messages[0]['content'] }}!", "tool_use": "t"}
    renderer = Renderer.from_folder(path)
    assert renderer.render_prompt([{"role": "user", "content": "Hi"}]).text == "Hi!"
    assert renderer.eos_token_ids == [byte_level().token_to_id("</s>")]


def test_without_a_vocabulary_there_is_no_tokenizer(tmp_path):
    assert Tokenizer.from_folder(write(tmp_path / "x.gguf", {"tokenizer.ggml.model": "no_vocab"})) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5' is not read"),
        ({"tokenizer.ggml.pre": "qwen3000"}, "tokenizer.ggml.pre='qwen3000' is not among"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 types of tokens"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "tokenizers library does not accept"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokenizer.huggingface.json": "{}"}, "max_input_chars_per_word, and what a GGUF file holds"),
        ({"tokenizer.huggingface.json": "{"}, "tokenizer.huggingface.json: cannot be read as JSON"),
        ({"tokenizer.huggingface.json": '{"model": {"type": "BPE"}}'}, "tokenizers library does not accept"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores"),
    ],
)
def test_what_cannot_be_read_says_what_to_give_instead(changes, message, tmp_path):
    metadata = {key: value for key, value in (parts_of(byte_level(), "gpt-2") | changes).items() if value != []}
    with pytest.raises(ModelError, match=f"{message}.*tokenizer=FOLDER"):
        Tokenizer.from_folder(write(tmp_path / "x.gguf", metadata))
