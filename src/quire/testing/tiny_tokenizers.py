"""Small real tokenizers of the kinds that language models have, trained on the spot on a few lines."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def hello(name):\n    return f'Hello, {name}!'\n\n\tprint(hello('you'))",
    "Привет, мир! Як справи? Γειά σου Κόσμε. שלום עולם، مرحبا بالعالم",
    "你好，世界。今天天气很好。こんにちは世界 안녕하세요 세계 สวัสดีชาวโลก",
    "😀😁 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 café naïve ê̂ ﷽ 𝕏 ½",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: metaspace marks, and a token for each byte."""
    letters = sorted({letter for text in TEXTS[:2] for letter in text.replace(" ", "▁")} | {"你", "é"})
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "d"), ("▁d", "o"), ("▁do", "g"), ("T", "h"), ("▁", "▁")]
    tokens += [left + right for left, right in merges]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer


def tiktoken() -> Tokenizer:
    """As GPT-4o, Llama 3 and Mistral's tekken have it: bytes, cut into words by an expression of their own."""
    tokenizer = Tokenizer(models.BPE())
    # words with the space before them, up to three digits, signs, line ends
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram_bytes() -> Tokenizer:
    """As Gemma and other models of sentencepiece's unigram kind have it: whole letters, else a token for each byte."""
    letters = sorted({letter for text in TEXTS[:2] for letter in text.replace(" ", "▁")} | {"你", "é"})
    pieces = [(text, 0.0) for text in SPECIAL]
    pieces += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    pieces += [(letter, -5.0) for letter in letters] + [("▁the", -1.0), ("▁dog", -1.5), ("▁▁", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=SPECIAL.index("<unk>"), byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """A kind whose tokens depend on their neighbours: it takes the slower way."""
    words = ["the", "quick", "brown", "fox", "##es", "jump", "##ing", "dog", ",", ".", "café"]
    vocab = {token: number for number, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "tiktoken": tiktoken,
    "byte_fallback": byte_fallback,
    "unigram_bytes": unigram_bytes,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def write_folder(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return folder
