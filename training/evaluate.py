"""Measures a checkpoint on prompts that training never saw, and writes the table into its model card.

    python -m training.evaluate src/quire/embedded --write

The checkpoint is read by Transformers and decoded greedily: what is measured is what a user gets.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.answers import expected, is_right
from training.example import Example, draw
from training.mixture import TASKS
from training.render import render

Generate = Callable[[list[str]], list[str]]

MAX_NEW_TOKENS = 160
TITLES = {
    "addition": "addition, 0 to 99",
    "subtraction": "subtraction, 0 to 99",
    "spell": "spell a word of 3 to 8 letters",
    "reverse": "reverse a word of 3 to 6 letters",
    "sort": "sort the letters of a word of 3 to 6 letters",
    "count_letter": "count one letter in a word of 3 to 10 letters",
    "count_letters": "count the letters of a word of 3 to 10 letters",
    "count_items": "count the items of a list of 1 to 8",
    "count_up": "count up or down over 3 to 11 numbers",
    "form": "fill a JSON form of 2 to 4 fields",
    "faq": "questions about Quire",
    "tool_call": "call a tool",
    "tool_answer": "answer from the result of a tool",
    "tool_two_calls": "call a tool twice",
    "tool_unneeded": "answer without the tools at hand",
    "story": "a story that follows the grammar",
    "talk": "greetings and small talk",
    "unknown": "say that it does not know",
    "later_turn": "a task in the third turn of a chat",
}
LATER = ("addition", "subtraction", "spell", "reverse", "sort", "count_letters", "count_up", "form", "faq")
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"


def later_turn(rng: random.Random) -> Example:
    """A held-out task after two other turns."""
    turns = [draw(TASKS[rng.choice(LATER)][0], rng, held_out=True) for _ in range(3)]
    messages = [message for turn in turns for message in turn.messages]
    # The task of the last turn decides how its answer is judged.
    return Example(turns[-1].task, "later", messages)


def held_out(seed: int, count: int) -> dict[str, list[Example]]:
    """Up to `count` different prompts for each task; small talk has fewer."""
    chosen: dict[str, dict[str, Example]] = {title: {} for title in TITLES}
    rng = random.Random(f"evaluation:{seed}")
    for name, (maker, _) in TASKS.items():
        for _ in range(8 * count):
            if len(chosen[name]) >= count and (name != "tool_call" or len(chosen["tool_answer"]) >= count):
                break
            example = draw(maker, rng, held_out=True)
            if len(chosen[example.task]) < count:
                chosen[example.task].setdefault(prompt(example), example)
    while len(chosen["later_turn"]) < count:
        example = later_turn(rng)
        chosen["later_turn"][prompt(example)] = example
    return {name: list(examples.values()) for name, examples in chosen.items()}


def prompt(example: Example) -> str:
    return render(example.messages[:-1], example.tools, add_generation_prompt=True)


def generator(model_dir: Path, batch_size: int) -> Generate:
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def generate(prompts: list[str]) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(prompts), batch_size):
            inputs = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True)
            inputs.pop("token_type_ids", None)
            with torch.inference_mode():
                output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            width = inputs["input_ids"].shape[1]
            answers += tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        return answers

    return generate


def measure(generate: Generate, sets: dict[str, list[Example]], show: int) -> dict[str, tuple[int, int]]:
    results = {}
    for name, examples in sets.items():
        answers = generate([prompt(example) for example in examples])
        right = [is_right(example, answer) for example, answer in zip(examples, answers, strict=True)]
        results[name] = (sum(right), len(right))
        print(f"{name:16} {sum(right):4} / {len(right):4}  {sum(right) / max(1, len(right)):.1%}", flush=True)
        wrong = [(e, a) for e, a, ok in zip(examples, answers, right, strict=True) if not ok]
        for example, answer in wrong[:show]:
            print(
                f"    asked    {example.messages[-2]['content']!r}\n    expected {expected(example)!r}\n    got      {answer!r}"
            )
    return results


def table(results: dict[str, tuple[int, int]]) -> str:
    rows = [f"| {TITLES[name]} | {right} / {total} | {right / total:.1%} |" for name, (right, total) in results.items()]
    return "\n".join(["| task (held-out prompts) | right | accuracy |", "| --- | --- | --- |", *rows])


def write_card(card: Path, text: str) -> None:
    """Only the part between the two marks is replaced."""
    before, rest = card.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    card.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a checkpoint on held-out prompts.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--count", type=int, default=200, help="prompts per task")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per task")
    parser.add_argument("--tasks", nargs="*", default=None, choices=list(TITLES), help="only these")
    parser.add_argument("--write", action="store_true", help="write the table into README.md beside the model")
    args = parser.parse_args()
    sets = held_out(args.seed, args.count)
    if args.tasks:
        sets = {name: sets[name] for name in args.tasks}
    results = measure(generator(args.model_dir, args.batch_size), sets, args.show)
    if args.write:
        write_card(args.model_dir / "README.md", table(results))


if __name__ == "__main__":
    main()
