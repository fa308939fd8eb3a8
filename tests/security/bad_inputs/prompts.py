"""Prompts that are empty, too long, too many, or of mixed kinds. The model takes 512 tokens."""

from __future__ import annotations

from .case import Case, chat, completion, each

_LONG = [
    "a " * 2000, "x" * 20_000, "\n" * 300_000, " " * 500_000, "\u0301" * 5000, "\U0001f600" * 3000, "\u200b" * 5000,
    "\u05d0" * 5000, "\u0e01" * 5000, "\ud55c" * 5000, "<|end|>" * 2000, "0" * 100_000, "\t" * 50_000, "{" * 50_000,
]  # fmt: skip

CASES: list[Case] = [
    *each(completion, "prompt", [[], [[]], [[], []], ["", []], ["a", 1], [1, "a"], [[1], "a"], [[1], 2], [["a"]]]),
    *each(completion, "prompt", [[[1], []], [[[1]]], [[1, [2]]], [None], [True], [{"text": "a"}], [["a", 1]]]),
    completion("257 prompts", prompt=["a"] * 257),
    completion("10,000 prompts", prompt=["a"] * 10_000),
    completion("257 prompts of tokens", prompt=[[5]] * 257),
    completion("512 tokens and one to come", prompt=[5] * 512, max_tokens=1),
    completion("one more than the room", prompt=[5] * 500, max_tokens=13),
    completion("100,000 tokens", prompt=[5] * 100_000),
    completion("one of two is too long", prompt=[[5], [5] * 600]),
    completion("embeddings", prompt_embeds="AAAA"),
    completion("embeddings as numbers", prompt_embeds=[[0.1, 0.2]]),
    completion("embeddings, twice as many as prompts", prompt_embeds=["AAAA"] * 512),
    completion("embeddings without end", prompt_embeds="A" * 4_000_000),
    completion("cut the prompt to less than nothing", truncate_prompt_tokens=-5),
    *(completion(f"{len(text):,} times {text[0]!r}", prompt=text) for text in _LONG),
    *(chat(f"{len(text):,} times {text[0]!r}", messages=[{"role": "user", "content": text}]) for text in _LONG[:6]),
    completion("eight MiB", prompt="b" * 8_000_000, allowed=(400, 413)),
]
