"""Greedy decoding by a real core and by Transformers, to hold one against the other, token by token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.config import EngineOptions, resolve
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.launch import build_engine_core
from quire.messages import EngineRequest, split_sequence_id
from quire.sampling_params import SamplingParams

# A choice between two tokens whose logits lie closer together than this is left to rounding.
CLOSE_CALL = 1e-3


@dataclass
class Reference:
    """What Transformers generates after one prompt, and how clear each choice was."""

    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def reference_generate(model: Any, prompt: list[int], num_tokens: int) -> Reference:
    """Greedy decoding with Transformers' own cache, one sequence, no padding."""
    tokens: list[int] = []
    margins: list[float] = []
    cache = None
    # its name is changing from model to model
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    step = prompt
    # what Transformers counts from 0 in every call, unless it is told
    tells_positions = model.config.model_type == "bamba"
    for number in range(num_tokens):
        more = {name: cache}
        if tells_positions:
            first = 0 if cache is None else len(prompt) + number - 1
            more["position_ids"] = torch.arange(first, first + len(step))[None]
        result = model(torch.tensor([step]), use_cache=True, **more)
        cache = getattr(result, name)
        best = result.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        step = tokens[-1:]
    return Reference(tokens, margins)


def assert_same_tokens(ours: list[int], reference: Reference, what: str) -> None:
    """Equal up to the first close call that went the other way; after one, the texts are free to differ."""
    for position, (own, theirs) in enumerate(zip(ours, reference.token_ids, strict=True)):
        if own != theirs:
            margin = reference.margins[position]
            assert margin < CLOSE_CALL, f"{what}: token {position} is {own}, reference {theirs}, margin {margin:.4f}"
            return


def real_core(path: Path, **options: Any) -> EngineCore:
    """A core with a real worker in this process, every invariant checked after each step."""
    defaults = {"dtype": "float32", "device": "cpu", "num_threads": 1, "check_invariants": True, "burst_time": 0}
    config, _ = resolve(EngineOptions(model=str(path), **{**defaults, **options}))
    return build_engine_core(config)


def generate_greedy(
    core: EngineCore,
    prompts: list[list[int]],
    num_tokens: int,
    each_step: Callable[[], None] | None = None,
) -> list[list[int]]:
    """All prompts at once; the tokens of each, in order."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        outputs = core.step()
        for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            tokens[split_sequence_id(sequence_id)[0]].append(token)
        errors = [end.error for end in outputs.ends if end.error]
        assert not errors, errors
        if each_step is not None:
            each_step()
    return tokens
