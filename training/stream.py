"""Batches of packed documents. A batch is a function of (seed, step), so a resumed run sees the same stream."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.mixture import Document, conversation, document
from training.render import render
from training.tokenizer import ASSISTANT, END, END_OF_TEXT

SHORT = (16, 256)
# Every 20th batch holds long conversations, so that late positions are trained as well.
LONG = (4, 1024)
LONG_EVERY = 20


@dataclass(frozen=True)
class Batch:
    """`targets` is -1 where nothing is to be learned; `segments` numbers the documents of a row."""

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    segments_BT: Tensor

    def mask(self) -> Tensor:
        """A token sees the tokens before it in its own document."""
        length = self.tokens_BT.shape[1]
        same = self.segments_BT[:, :, None] == self.segments_BT[:, None, :]
        return (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]


def encode(tokenizer: Tokenizer, drawn: Document) -> tuple[list[int], list[float]]:
    """Tokens, and for each the weight of predicting it: assistant turns only, 1/sqrt(length) for each of its tokens.

    A plain mean would let long sentences outweigh the one digit on which a count depends.
    """
    if drawn.text is not None:
        given, learned = tokenizer.encode(drawn.given).ids, [*tokenizer.encode(drawn.text).ids, END_OF_TEXT]
        return given + learned, [0.0] * len(given) + [len(learned) ** -0.5] * len(learned)
    tokens = tokenizer.encode(render(drawn.messages, drawn.tools)).ids
    weights = [0.0] * len(tokens)
    start: int | None = None
    for index, token in enumerate(tokens):
        if token == ASSISTANT:
            start = index + 1
        elif token == END and start is not None:
            weights[start : index + 1] = [(index + 1 - start) ** -0.5] * (index + 1 - start)
            start = None
    return tokens, weights


def draw_document(rng: random.Random, *, long: bool) -> Document:
    return conversation(rng, rng.randint(6, 20)) if long and rng.random() < 0.8 else document(rng)


def batch(tokenizer: Tokenizer, seed: int, step: int) -> Batch:
    rng = random.Random(f"{seed}:{step}")
    is_long = step % LONG_EVERY == LONG_EVERY - 1
    rows, length = LONG if is_long else SHORT
    tokens = np.full((rows, length + 1), END_OF_TEXT, dtype=np.int64)
    weights = np.zeros((rows, length + 1), dtype=np.float32)
    segments = np.zeros((rows, length + 1), dtype=np.int64)
    used, counts, misses = [0] * rows, [0] * rows, 0
    # First fit; after some documents found no place the batch is full enough.
    while misses < 16:
        ids, weight = encode(tokenizer, draw_document(rng, long=is_long))
        row = next((r for r in range(rows) if used[r] + len(ids) <= length + 1), None)
        if row is None:
            misses += 1
            continue
        counts[row] += 1
        place = slice(used[row], used[row] + len(ids))
        tokens[row, place], weights[row, place], segments[row, place] = ids, weight, counts[row]
        used[row] += len(ids)
    following = torch.from_numpy(weights[:, 1:].copy())
    targets = torch.where(following > 0, torch.from_numpy(tokens[:, 1:].copy()), -1)
    return Batch(torch.from_numpy(tokens[:, :-1].copy()), targets, following, torch.from_numpy(segments[:, :-1].copy()))
