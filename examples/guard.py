"""A judge that is a part of the engine it judges: a linear head over its own vectors ends answers in mid-stream.

python examples/guard.py

The embedded model tells stories and explains itself. Here it is to tell stories alone. A head is trained in a second on
what the model says itself; the hook has each answer's last words made into a vector, by a request that shares the steps
of the answers, and stops those that are no story.
"""

import numpy as np

from quire import LLM, PoolingParams, SamplingParams
from quire.hooks import Hook, HookEngine, SequenceTokens, Verdict

ANIMALS = ("fox", "dog", "cat", "bird", "bear", "mouse", "frog", "cow")
WORDS = ("block", "request", "sequence", "step", "row", "grant", "slot", "batch")
NUM_TOKENS = 40
STRIDE = 8


def questions(animals: tuple[str, ...], words: tuple[str, ...]) -> list[tuple[str, bool]]:
    """What is asked, and whether the answer is a story."""
    stories = [(f"Tell me a story about a {animal}.", True) for animal in animals]
    return stories + [(f"What is a {word}?", False) for word in words]


def ask(llm: LLM, asked: list[str], **sampling: float) -> list:
    params = SamplingParams(max_tokens=NUM_TOKENS, **sampling)
    chats = [[{"role": "user", "content": question}] for question in asked]
    return [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]


def windows(token_ids: list[int]) -> list[list[int]]:
    """What the hook will see of an answer: its last tokens at each look."""
    return [token_ids[max(0, end - 2 * STRIDE) : end] for end in range(STRIDE, len(token_ids) + 1, STRIDE)]


def vectors(llm: LLM, pieces: list[list[int]]) -> np.ndarray:
    prompts = [{"prompt_token_ids": piece} for piece in pieces]
    outputs = llm.embed(prompts, PoolingParams(pooling="mean"), use_tqdm=False)
    return np.array([output.outputs.vector for output in outputs])


def examples(llm: LLM, asked: list[tuple[str, bool]], seed: int) -> tuple[np.ndarray, np.ndarray]:
    answers = ask(llm, [question for question, _ in asked], temperature=0.8, seed=seed)
    pieces = [windows(answer.token_ids) for answer in answers]
    labels = [is_story for (_, is_story), ones in zip(asked, pieces, strict=True) for _ in ones]
    return vectors(llm, [piece for ones in pieces for piece in ones]), np.array(labels)


def train(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Logistic regression, by gradient descent; the last weight is the bias."""
    inputs = np.hstack([features, np.ones((len(features), 1))])
    weights = np.zeros(inputs.shape[1])
    for _ in range(3000):
        chances = 1 / (1 + np.exp(-inputs @ weights))
        weights -= 5.0 * (inputs.T @ (chances - labels) / len(labels) + 1e-4 * weights)
    return weights


class StoriesOnly(Hook):
    """Stops an answer that twice in a row does not read as a story."""

    stride = STRIDE
    ahead = STRIDE

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights

    def open(self, engine: HookEngine) -> None:
        self.engine = engine

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        if len(tokens.token_ids) < STRIDE:
            return None
        [vector] = self.engine.embed([tokens.token_ids[-2 * STRIDE :]], pooling="mean")
        chance = 1 / (1 + np.exp(-(np.dot(self.weights[:-1], vector) + self.weights[-1])))
        tokens.state["strikes"] = tokens.state.get("strikes", 0) + 1 if chance < 0.5 else 0
        return Verdict(stop="no story", keep=tokens.num_shown) if tokens.state["strikes"] == 2 else None


def main() -> None:
    with LLM() as llm:
        weights = train(*examples(llm, questions(ANIMALS[:6], WORDS[:6]), seed=1))
        features, labels = examples(llm, questions(ANIMALS[6:], WORDS[6:]), seed=2)
        right = (features @ weights[:-1] + weights[-1] > 0) == labels
        print(f"held out: {right.mean():.0%} of {len(right)} pieces are judged right")
    asked = [question for question, _ in questions(ANIMALS[6:], WORDS[6:])]
    with LLM(hooks=[StoriesOnly(weights)]) as llm:
        for question, answer in zip(asked, ask(llm, asked, temperature=0), strict=True):
            print(f"{question}\n  {answer.text!r} ({answer.finish_reason}, {len(answer.token_ids)} tokens)")


if __name__ == "__main__":
    main()
