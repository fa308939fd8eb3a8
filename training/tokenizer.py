"""The tokenizer: byte-level BPE without merges.

A common word of the documentation is one token; every other word falls apart into its letters. So tasks on letters
become tasks on tokens, and any input can be encoded. Digits are always single tokens.
"""

import argparse
import random
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from training.mixture import document
from training.render import render
from training.words import CITIES, COUNTRIES, LETTERS, NAMES, WORDS

VOCAB_SIZE = 1856
SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
MARKERS = ("<tool_call>", "</tool_call>")
END_OF_TEXT, SYSTEM, USER, ASSISTANT, TOOL, END = range(len(SPECIAL))
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
# A word seen less often than this in the sample is a word of one document, not of the language.
MIN_COUNT = 8


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def common_words(seed: int, num_documents: int, size: int) -> list[str]:
    """The most frequent pieces, less the words that the tasks on letters are made of."""
    lettered = {word.lower() for word in (*WORDS, *NAMES, *CITIES, *COUNTRIES)}
    lettered |= {word[::-1] for word in WORDS} | {"".join(sorted(word)) for word in WORDS}
    lettered |= {f"{letter}s" for letter in LETTERS} - {"is", "as", "us"}
    rng = random.Random(seed)
    splitter = pre_tokenizer()
    counts: Counter[str] = Counter()
    for _ in range(num_documents):
        drawn = document(rng)
        text = drawn.given + drawn.text if drawn.text else render(drawn.messages, drawn.tools)
        for marker in (*SPECIAL, *MARKERS):
            text = text.replace(marker, "\n")
        counts.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    kept = [
        (piece, count)
        for piece, count in counts.items()
        if len(piece) > 1 and count >= MIN_COUNT and piece.removeprefix("Ġ").lower() not in lettered
    ]
    # Ties by spelling, so that the same seed gives the same tokenizer.
    return [piece for piece, _ in sorted(kept, key=lambda pair: (-pair[1], pair[0]))[:size]]


def build(seed: int, num_documents: int = 120_000) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = VOCAB_SIZE - len(SPECIAL) - len(MARKERS) - len(alphabet)
    words = common_words(seed, num_documents, room)
    names = [*SPECIAL, *MARKERS, *alphabet, *words]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    # Not special: a tool parser must see them in the decoded text.
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKERS])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Makes a new tokenizer; a checkpoint trained with another cannot use it."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    build(args.seed).save(str(args.file))


if __name__ == "__main__":
    main()
