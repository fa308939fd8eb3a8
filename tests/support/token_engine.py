"""An engine core reached by a blocking client: prompts in, tokens out. For tests that compare engines."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.blocking_client import BlockingClient

from quire.config import EngineOptions, resolve
from quire.engine_client import open_link
from quire.messages import EngineRequest, KVTransfer
from quire.sampling_params import SamplingParams


class TokenEngine:
    """`options` are those of EngineOptions."""

    def __init__(self, *, in_own_process: bool = False, **options: Any) -> None:
        config, _ = resolve(EngineOptions(**options))
        self.client = BlockingClient(open_link(config, in_own_process=in_own_process))
        self._ids = itertools.count()

    def run(
        self,
        prompts: list[list[int]],
        samplings: list[SamplingParams],
        transfers: list[KVTransfer] | None = None,
        **request: Any,
    ) -> list[list[int]]:
        """The tokens that each of them got here."""
        ids = [next(self._ids) for _ in prompts]
        for place, (number, prompt, sampling) in enumerate(zip(ids, prompts, samplings, strict=True)):
            transfer = transfers[place] if transfers else None
            self.client.add(
                EngineRequest(
                    request_id=number,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    seed=100 + place,
                    transfer=transfer,
                    **request,
                )
            )
        tokens: dict[int, list[int]] = {number: [] for number in ids}
        while self.client.num_open:
            for number, delta in self.client.receive():
                assert delta.error is None, delta.error
                tokens[number] += delta.token_ids
        return [tokens[number] for number in ids]

    def number(self, name: str) -> int:
        """One of its statistics."""
        return int(self.client.control("statistics")[name])

    def close(self) -> None:
        self.client.close()
