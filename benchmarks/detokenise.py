"""Microseconds per token in the front end's TextStream.push, one token a call as a stream has it.

    python benchmarks/detokenise.py [--model FOLDER] [--num-tokens 200000]

Tokens are those of real sentences, taken round and round through many short sequences. The cases: a plain stream, stop
strings that never come, stop strings whose beginning comes all the time, bytes that never become a character, and a
tokenizer of the slow kind. The last line is one line of JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from quire.renderer import Renderer
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.tokenizer import Tokenizer as QuireTokenizer
from quire.sampling_params import SamplingParams

EMBEDDED = Path(__file__).parents[1] / "src" / "quire" / "embedded"
TEXT = "The quick brown fox jumps over the lazy dog; 12 times out of 100, 你好 😀 café.\n"
TOKENS_PER_SEQUENCE = 200
REPEATS = 5


def microseconds_per_token(
    renderer: Renderer, token_ids: list[int], num_tokens: int, sampling: SamplingParams
) -> float:
    """Median of some runs, with the opening and the end of each stream."""
    sequence = (token_ids * (TOKENS_PER_SEQUENCE // len(token_ids) + 1))[:TOKENS_PER_SEQUENCE]
    num_sequences = max(1, num_tokens // TOKENS_PER_SEQUENCE)
    runs = []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(num_sequences):
            stream = renderer.open_stream(token_ids, sampling)
            for token_id in sequence:
                stream.push([token_id], is_last=False)
            stream.push([], is_last=True)
        runs.append((time.process_time() - start) * 1e6 / (num_sequences * TOKENS_PER_SEQUENCE))
    return statistics.median(runs)


def slow_renderer() -> tuple[Renderer, list[int]]:
    """Tokens that depend on their neighbours: decoded again in a short window."""
    words = ["the", "quick", "brown", "fox", "##es", "jump", "##ing", "dog"]
    backend = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="the"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Renderer(QuireTokenizer(backend, SpecialTokens())), list(range(len(words)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="folder with a tokenizer.json")
    parser.add_argument("--num-tokens", type=int, default=200_000)
    arguments = parser.parse_args()
    renderer = Renderer.from_folder(arguments.model)
    token_ids = renderer.encode(TEXT, add_special_tokens=False)
    open_bytes = [token_id for token_id in token_ids if renderer.token_text(token_id) == "\ufffd"] or token_ids
    slow, slow_ids = slow_renderer()
    cases = {
        "plain": (renderer, token_ids, SamplingParams()),
        "stop strings that never come": (renderer, token_ids, SamplingParams(stop=["\n\nHuman:", "###", "</s>"])),
        "stop strings that often begin": (renderer, token_ids, SamplingParams(stop=["the lazy cat", " o!"])),
        "bytes without a character": (renderer, open_bytes, SamplingParams()),
        "tokenizer of the slow kind": (slow, slow_ids, SamplingParams()),
    }
    results = {}
    for name, (subject, ids, sampling) in cases.items():
        results[name] = round(microseconds_per_token(subject, ids, arguments.num_tokens, sampling), 3)
        print(f"{name:<32}{results[name]:>8.2f} us per token{1e6 / results[name]:>12,.0f} tokens/s")
    print(json.dumps({"benchmark": "detokenise", "microseconds_per_token": results}))


if __name__ == "__main__":
    main()
