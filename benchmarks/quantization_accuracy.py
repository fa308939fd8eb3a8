"""What quantising costs in accuracy: divergence from float32, agreement of greedy tokens, and tasks that were learned.

    python -m benchmarks.quantization_accuracy                # the embedded model; a random one of Qwen3-0.6B's shape
    python -m benchmarks.quantization_accuracy --count 200    # as many prompts a task as in the model's card
    python -m benchmarks.quantization_accuracy --tasks 0      # divergence alone

KL is the mean over positions of sum p log(p / q) in nats, p being the probabilities of the model in float32. Agreement
is the share of positions at which both would choose the same token. Both are taken on texts of the tasks with the right
answers (the random model: on random tokens). A task's answer is right or wrong (training/evaluate.py).
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from training.answers import is_right
from training.evaluate import MAX_NEW_TOKENS, held_out, prompt
from training.render import render

from quire import LLM, SamplingParams
from quire.config.model_source import embedded_path
from quire.renderer.tokenizer import Tokenizer
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import shape_0_6b_config
from quire.worker.model_loader import load_model

# name -> options
VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8_weight_only": {"dtype": "bfloat16", "quantization": "int8_weight_only"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4_weight_only": {"dtype": "bfloat16", "quantization": "int4_weight_only"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
_LONGEST = 256


@dataclass(frozen=True)
class Divergence:
    """Of a variant from the model in float32."""

    kl: float
    agreement: float


def task_texts(count: int) -> list[list[int]]:
    """Token ids of some held-out conversations with their right answers."""
    tokenizer = Tokenizer.from_folder(embedded_path())
    examples = [example for task in held_out(2, -(-count // 8)).values() for example in task]
    texts = [
        render(example.messages, example.tools, add_generation_prompt=False)
        for example in examples[:: max(1, len(examples) // count)]
    ]
    return [tokenizer.encode(text, add_special_tokens=False)[:_LONGEST] for text in texts[:count]]


def log_probabilities(path: Path, texts: list[list[int]], options: dict[str, str], **more: object) -> torch.Tensor:
    """Of every token after every position, [positions, vocabulary]."""
    num_blocks = sum(len(text) // 4 + 1 for text in texts)
    harness = ModelHarness(load_model(worker_config(path, **{**options, **more})), num_blocks=num_blocks)
    return torch.cat([harness.run(number, text) for number, text in enumerate(texts)]).log_softmax(-1)


def divergence(found: torch.Tensor, expected: torch.Tensor) -> Divergence:
    kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
    return Divergence(kl, (found.argmax(-1) == expected.argmax(-1)).float().mean().item())


def task_accuracy(options: dict[str, str], count: int) -> tuple[int, int]:
    """Right answers of the embedded model on held-out prompts, and how many there were."""
    examples = [example for task in held_out(2, count).values() for example in task]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)
    with LLM(**options, enable_prefix_caching=False) as llm:
        outputs = llm.generate([prompt(example) for example in examples], sampling, use_tqdm=False)
    answers = [output.outputs[0].text for output in outputs]
    return sum(map(is_right, examples, answers)), len(examples)


def main() -> None:
    parser = argparse.ArgumentParser(description="What quantising costs in accuracy.")
    parser.add_argument("--texts", type=int, default=64, help="conversations for the divergence")
    parser.add_argument("--count", "--tasks", type=int, default=50, help="prompts a task; 0: no tasks")
    parser.add_argument("--layers", type=int, default=4, help="of the random model; 0: without it")
    args = parser.parse_args()
    texts = task_texts(args.texts)
    expected = log_probabilities(embedded_path(), texts, VARIANTS["float32"])
    print(f"embedded model, {len(expected):,} positions\n")
    print("| weights | KL | agreement | tasks |\n| --- | --- | --- | --- |")
    for name, options in VARIANTS.items():
        found = divergence(log_probabilities(embedded_path(), texts, options), expected)
        tasks = "-"
        if args.count:
            right, total = task_accuracy(options, args.count)
            tasks = f"{right / total:.1%} ({right} / {total})"
        print(f"| {name} | {found.kl:.2e} | {found.agreement:.2%} | {tasks} |", flush=True)
    if args.layers:
        print_random(args.layers)


def print_random(num_layers: int) -> None:
    """A random model gives flat probabilities, so that its divergence is small; what compares is the ratio of rows."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 151_936, (48,), generator=generator).tolist() for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        path = shape_0_6b_config(Path(folder), num_hidden_layers=num_layers)
        more = {"load_format": "dummy"}
        expected = log_probabilities(path, texts, VARIANTS["float32"], **more)
        uniform = math.log(expected.shape[-1])
        entropy = -(expected.exp() * expected).sum(-1).mean().item()
        print(
            f"\nrandom model, {num_layers} layers of Qwen3-0.6B's shape, entropy {entropy:.2f} of {uniform:.2f} nats\n"
        )
        print("| weights | KL | agreement |\n| --- | --- | --- |")
        for name, options in VARIANTS.items():
            found = divergence(log_probabilities(path, texts, options, **more), expected)
            print(f"| {name} | {found.kl:.2e} | {found.agreement:.2%} |", flush=True)


if __name__ == "__main__":
    main()
