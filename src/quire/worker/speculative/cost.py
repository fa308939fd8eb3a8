"""What a pass takes with few tokens: T(n) = per_step + per_token * n, from one token and from some tens of them.

Measured in a profiling context: without cache, so attention's own time is left out, which a short context makes small.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.worker.capacity import Agree
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.platforms import Platform
from quire.worker.sampler.choose import best_tokens
from quire.worker.speculative.proposer import Proposer

_MANY_TOKENS = 32
# What no pass shows: the work of the host on a step (inputs, sampling, results), and what drafts add to it (verifying,
# reporting, proposing). Hardly different from model to model; of a small one it is a third of the step.
_HOST_STEP = 0.4e-3
_HOST_DRAFTS = 0.25e-3
# and for each row that is asked for some
_HOST_ROW = 20e-6
# The shortest of some runs, which other work on the machine disturbed least; of a slow model, fewer.
_NUM_RUNS = 5
_ENOUGH_SECONDS = 0.1


@torch.inference_mode()
def measure_costs(
    model: nn.Module, proposer: Proposer, platform: Platform, most_tokens: int, agree: Agree = float
) -> dict[str, float]:
    """Costs of a decode step of the model, logits and choice included, and of a pass of the proposer.

    `agree`: how ranks that compute together make one time of theirs.
    """

    def run_model(num_tokens: int) -> Tensor:
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=platform.device)
        with forward_context(profiling_context()):
            hidden_TE = model(tokens, torch.arange(num_tokens, device=platform.device))
        return best_tokens(model.compute_logits(hidden_TE).float())

    per_step, per_token = _line(run_model, most_tokens, platform, agree)
    per_draft_step, per_draft_token = _line(proposer.run_pass, most_tokens, platform, agree)
    return {
        "seconds_per_step": per_step + _HOST_STEP,
        "seconds_per_token": per_token,
        "seconds_of_drafting": _HOST_DRAFTS,
        "seconds_per_asked_row": _HOST_ROW,
        "seconds_per_draft_step": per_draft_step,
        "seconds_per_draft_token": per_draft_token,
    }


def _line(run: Callable[[int], object], most_tokens: int, platform: Platform, agree: Agree) -> tuple[float, float]:
    """(per step, per token), neither below 0."""
    many = min(_MANY_TOKENS, most_tokens)
    one = _seconds(lambda: run(1), platform, agree)
    if many < 2:
        return one, 0.0
    per_token = max(0.0, (_seconds(lambda: run(many), platform, agree) - one) / (many - 1))
    return max(0.0, one - per_token), per_token


def _seconds(run: Callable[[], object], platform: Platform, agree: Agree) -> float:
    run()  # warms up
    seconds: list[float] = []
    while len(seconds) < _NUM_RUNS and sum(seconds) < _ENOUGH_SECONDS:
        platform.synchronize()
        start = time.perf_counter()
        run()
        platform.synchronize()
        seconds.append(agree(time.perf_counter() - start))
    return min(seconds)
