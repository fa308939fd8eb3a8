"""The generated training text: answers are true, the split holds, and what is rendered is what is learned."""

import json
import random

import pytest
from training import faq, letters, stories
from training.answers import expected, is_right
from training.arithmetic import addition, subtraction
from training.example import draw, is_held_out
from training.mixture import TASKS, document
from training.render import render


@pytest.mark.parametrize("maker", [addition, subtraction])
def test_sums_are_true(maker) -> None:
    rng = random.Random(1)
    for _ in range(300):
        left, right = maker(rng).messages[-1]["content"].removesuffix(".").split(" = ")
        assert eval(left) == int(right)


def test_reverse_and_sort_answer_the_word_of_the_key() -> None:
    rng = random.Random(2)
    for _ in range(100):
        example = letters.reverse(rng)
        assert example.messages[-1]["content"] == "".join(reversed(example.key))
        example = letters.sort(rng)
        assert list(example.messages[-1]["content"]) == sorted(example.key)


@pytest.mark.parametrize("name", TASKS)
def test_every_expected_answer_counts_as_right(name: str) -> None:
    rng = random.Random(3)
    for _ in range(50):
        example = draw(TASKS[name][0], rng, held_out=True)
        assert is_held_out(example.task, example.key)
        assert is_right(example, expected(example))
        assert not is_right(example, expected(example) + "?")


def test_training_never_draws_held_out_content() -> None:
    rng = random.Random(4)
    for name, (maker, _) in TASKS.items():
        for _ in range(30):
            example = draw(maker, rng, held_out=False)
            assert not is_held_out(example.task, example.key), name


def test_no_question_of_the_faq_has_two_answers() -> None:
    answers: dict[str, str] = {}
    for entry in faq.entries():
        patterns = faq.DEFINE_PATTERNS if entry.terms else faq.QUESTION_PATTERNS
        for words in entry.terms or entry.questions:
            for pattern in patterns:
                question = pattern.format(t=words, q=words).lower()
                assert answers.setdefault(question, entry.answer) == entry.answer, question
    assert len(faq.entries()) >= 300


def test_a_story_with_a_foreign_sentence_does_not_parse() -> None:
    text = stories.write(random.Random(5), "fox", "Ada")
    assert stories.parses(text)
    assert not stories.parses(text.replace("The end.", "Good night."))
    assert not stories.parses(text.replace("Ada", "Bob", 1))


def test_the_template_renders_calls_in_the_hermes_format() -> None:
    example = next(e for e in map(TASKS["tool_call"][0], map(random.Random, range(50))) if e.task == "tool_call")
    call = example.messages[-1]["tool_calls"][0]["function"]
    line = expected(example).splitlines()
    assert (line[0], line[-1]) == ("<tool_call>", "</tool_call>")
    assert json.loads(line[1]) == {"name": call["name"], "arguments": call["arguments"]}


def test_documents_depend_on_the_seed_alone() -> None:
    first, second = ([document(random.Random(seed)) for seed in range(30)] for _ in range(2))
    assert first == second
    assert all(drawn.text or render(drawn.messages, drawn.tools) for drawn in first)
