"""How many tokens of an answer are thoughts: `usage.completion_tokens_details.reasoning_tokens`.

A parser says which letters of the text are thoughts; the tokens are turned into text once more, one by one, to see
whose letters these are. Only answers with thoughts pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.beam_search_params import GenerationParams
from quire.interfaces.text_threads import TextThreads
from quire.renderer import Renderer
from quire.sampling_params import SamplingParams

# For fewer tokens the way to a thread and back costs more than counting.
LONG_ANSWER = 1024
# tokens, and which letters of their text are thoughts
Thoughtful = tuple[Sequence[int], Sequence[tuple[int, int]]]


async def total_reasoning_tokens(
    threads: TextThreads,
    renderer: Renderer,
    prompt: list[int],
    params: GenerationParams,
    answers: Sequence[Thoughtful],
) -> int:
    """Of all answers to one prompt; long ones are counted beside the event loop."""

    def count() -> int:
        return sum(count_reasoning_tokens(renderer, prompt, params, *answer) for answer in answers)

    if sum(len(token_ids) for token_ids, thoughts in answers if thoughts) < LONG_ANSWER:
        return count()
    return await threads.call(count)


def count_reasoning_tokens(
    renderer: Renderer,
    prompt: list[int],
    params: GenerationParams,
    token_ids: Sequence[int],
    thoughts: Sequence[tuple[int, int]],
) -> int:
    """Tokens that hold a letter of a thought; its tags are none."""
    if not thoughts:
        return 0
    # without stop strings, which hold text back
    stream = renderer.open_stream(prompt, SamplingParams(skip_special_tokens=params.skip_special_tokens))
    waiting = list(reversed(thoughts))
    num_tokens = num_open = end = 0
    for token_id in token_ids:
        start = end
        end = end + len(stream.push([token_id], is_last=False).text)
        # the parts of a character belong to it
        num_open += 1
        if end == start:
            continue
        while waiting and waiting[-1][1] <= start:
            waiting.pop()
        if waiting and waiting[-1][0] < end:
            num_tokens += num_open
        num_open = 0
    return num_tokens
