"""The progress bar of a batch: prompts done, and the tokens per second that they brought."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

UseTqdm = bool | Callable[..., Any]


class Progress:
    """A bar made by tqdm or by a callable of the same signature; nothing at all for use_tqdm=False."""

    def __init__(self, total: int, use_tqdm: UseTqdm, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._bar = _make_bar(total, use_tqdm) if use_tqdm and total else None

    def finish_one(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if self._bar is None:
            return
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens
        seconds = max(self._clock() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_prompt_tokens / seconds:.0f} tokens/s, "
            f"output {self._num_output_tokens / seconds:.0f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _make_bar(total: int, use_tqdm: UseTqdm) -> Any:
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Prompts")
    from tqdm import tqdm

    return tqdm(total=total, desc="Prompts", dynamic_ncols=True)
