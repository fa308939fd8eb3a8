"""Learning from rewards alone (GRPO) with one model: the engine samples, the same kernels differentiate.

python examples/reinforce.py --rounds 30

The model that ships with Quire tells stories. It is rewarded for short ones: of several stories about one animal those
that are shorter than the others become more probable. What is sampled and what is learned from are the same numbers,
so the ratio of new to old probability is exactly 1 at the first step after each sampling: no correction is needed.
"""

import argparse
import itertools
import sys

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.modeling import TrainedModel, load_for_training
from quire.outputs import CompletionOutput, RequestOutput

ANIMALS = ("fox", "cat", "dog", "bear", "owl", "frog", "mouse", "bird")
CLIP = 0.2


def reward_of(story: CompletionOutput) -> float:
    """Anybody can check it: one hundredth less for each token, and one less for a story without an end."""
    return -len(story.token_ids) / 100 - (story.finish_reason != "stop")


def advantages_of(rewards: list[float]) -> Tensor:
    """How much better each answer is than the others to the same prompt."""
    told = torch.tensor(rewards)
    return (told - told.mean()) / (told.std() + 1e-6)


def old_logprobs(story: CompletionOutput) -> Tensor:
    assert story.logprobs is not None
    return torch.tensor([entry[token].logprob for entry, token in zip(story.logprobs, story.token_ids, strict=True)])


def learn(model: TrainedModel, optimizer: torch.optim.Optimizer, outputs: list[RequestOutput], num_steps: int) -> float:
    """Some steps on what was sampled; how far the ratio was from 1 before the first of them."""
    groups = [advantages_of([reward_of(story) for story in output.outputs]) for output in outputs]
    advantages = torch.cat(groups)
    stories = [(output.prompt_token_ids, story) for output in outputs for story in output.outputs]
    old = [old_logprobs(story) for _, story in stories]
    distance = 0.0
    for step in range(num_steps):
        optimizer.zero_grad()
        logprobs = model.logprobs([[*prompt, *story.token_ids] for prompt, story in stories])
        ratios = [(new[-len(before) :] - before).exp() for new, before in zip(logprobs, old, strict=True)]
        if step == 0:
            distance = max(float((ratio.detach() - 1).abs().max()) for ratio in ratios)
        gains = [
            torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            for ratio, advantage in zip(ratios, advantages, strict=True)
        ]
        (-torch.stack(gains).mean()).backward()
        optimizer.step()
        model.update()
    return distance


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=2, help="of a round")
    parser.add_argument("--stories", type=int, default=6, help="about each animal")
    parser.add_argument("--steps", type=int, default=2, help="on what was sampled")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--gain", type=float, default=0.2, help="of the mean reward, from the first to the last round")
    arguments = parser.parse_args()
    animals = itertools.cycle(ANIMALS)
    model = load_for_training("embedded", num_threads=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, weight_decay=0.0)
    means: list[float] = []
    with LLM("embedded", num_threads=1) as llm:
        for number in range(arguments.rounds):
            sampling = SamplingParams(n=arguments.stories, temperature=1.0, max_tokens=160, logprobs=0, seed=number)
            asked = [f"Tell me a story about a {next(animals)}." for _ in range(arguments.prompts)]
            chats = [[{"role": "user", "content": question}] for question in asked]
            outputs = llm.chat(chats, sampling, use_tqdm=False)
            rewards = [reward_of(story) for output in outputs for story in output.outputs]
            means.append(sum(rewards) / len(rewards))
            distance = learn(model, optimizer, outputs, arguments.steps)
            print(f"round {number:3d}  reward {means[-1]:6.3f}  |ratio - 1| at the first step: {distance}", flush=True)
            if distance:
                sys.exit("the engine and the model that learns are not the same one")
            llm.update_weights(model.state_dict())
    gain = means[-1] - means[0]
    print(f"reward: {means[0]:.3f} at first, {means[-1]:.3f} in the end")
    sys.exit(gain < arguments.gain)


if __name__ == "__main__":
    main()
