"""Measures how often a draft guesses what its target says, on prompts that training never saw.

    python -m training.acceptance src/quire/embedded_draft --target src/quire/embedded --write

The target answers greedily; then the draft is asked for each token of the answer, with the right tokens before it. That
is the chance with which a draft is accepted once those before it were. How many come out of one step follows from the
order of hits and misses.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.evaluate import MAX_NEW_TOKENS, TITLES, held_out, prompt, write_card

MOST_DRAFTS = 6


@dataclass(frozen=True)
class Answer:
    """What the target says to a prompt, its end included."""

    prompt: list[int]
    tokens: list[int]


def greedy_answers(model_dir: Path, prompts: list[str], batch_size: int = 50) -> list[Answer]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    answers = []
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        inputs = tokenizer(part, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        for text, tokens in zip(part, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            end = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
            answers.append(Answer(tokenizer(text).input_ids, tokens[:end]))
    return answers


def hits(draft: torch.nn.Module, answer: Answer) -> list[bool]:
    """For each token of the answer whether the draft would have said it."""
    tokens = torch.tensor([answer.prompt + answer.tokens])
    with torch.inference_mode():
        guessed = draft(tokens).logits[0, len(answer.prompt) - 1 : -1].argmax(-1)
    return (guessed == tokens[0, len(answer.prompt) :]).tolist()


def num_steps(hit: list[bool], num_drafts: int) -> int:
    """Steps of the target for an answer: in each the accepted drafts come out, and one token of its own.

    The first token comes from the prompt, before anything was proposed.
    """
    place, steps = 1, 1
    while place < len(hit):
        run = hit[place : place + num_drafts]
        place += (run.index(False) if False in run else len(run)) + 1
        steps += 1
    return steps


def measure(
    target: Path, draft_dir: Path, count: int, seed: int, tasks: list[str] | None
) -> dict[str, list[list[bool]]]:
    sets = {name: examples for name, examples in held_out(seed, count).items() if not tasks or name in tasks}
    draft = AutoModelForCausalLM.from_pretrained(draft_dir, dtype=torch.float32).eval()
    measured = {}
    for name, examples in sets.items():
        answers = greedy_answers(target, [prompt(example) for example in examples])
        measured[name] = [hits(draft, answer) for answer in answers]
        print(f"{name:16} {cells(measured[name])}", flush=True)
    return measured


def cells(answers: list[list[bool]]) -> str:
    tokens = sum(len(hit) for hit in answers)
    right = sum(sum(hit) for hit in answers)
    pace = [tokens / sum(num_steps(hit, most) for hit in answers) for most in (2, 4, MOST_DRAFTS)]
    return " | ".join([f"{right / tokens:.1%}", *(f"{value:.2f}" for value in pace)])


def table(measured: dict[str, list[list[bool]]]) -> str:
    every = [hit for answers in measured.values() for hit in answers]
    rows = [f"| {TITLES[name]} | {cells(answers)} |" for name, answers in measured.items()]
    head = f"| task (held-out prompts) | accepted | 2 drafts | 4 drafts | {MOST_DRAFTS} drafts |"
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *rows, f"| all | {cells(every)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance of a draft, greedy, on held-out prompts.")
    parser.add_argument("draft_dir", type=Path)
    parser.add_argument("--target", type=Path, default=Path("src/quire/embedded"))
    parser.add_argument("--count", type=int, default=100, help="prompts per task")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--tasks", nargs="*", default=None, choices=list(TITLES), help="only these")
    parser.add_argument("--write", action="store_true", help="write the table into README.md beside the draft")
    args = parser.parse_args()
    text = table(measure(args.target, args.draft_dir, args.count, args.seed, args.tasks))
    print(text)
    if args.write:
        write_card(args.draft_dir / "README.md", text)


if __name__ == "__main__":
    main()
