"""The tiered connector's scheduler half: names, and questions that are answered at once."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import OptionError
from quire.kv_connectors.connector import CacheLayout, NamedBlocks
from quire.kv_connectors.tiered.host import NearBlock
from quire.kv_connectors.tiered.namespace import namespace_of
from quire.kv_connectors.tiered.questions import Questions
from quire.kv_connectors.tiered.settings import ALWAYS
from quire.kv_connectors.tiered.tiers import Tiers


class TieredScheduler(NamedBlocks):
    """A name says all that decides what a block holds: layout, weights and secret, the group of layers, and by the
    chain hash the tokens, and whose they are."""

    def __init__(self, layout: CacheLayout, tiers: Tiers) -> None:
        if layout.has_states and tiers.settings.rule != ALWAYS:
            raise OptionError(
                "kv_store: this model has recurrent layers, whose state is kept where a prompt ends and output goes "
                "on elsewhere, and nowhere else yet. Give a role (docs/disaggregation.md), or leave kv_store out."
            )
        self._tiers = tiers
        self._questions = Questions(tiers)
        self._namespace = namespace_of(layout)

    def name_of(self, group: int, content: bytes) -> bytes:
        return self._namespace + bytes((group,)) + content

    def set_price(self, seconds_per_block: float) -> None:
        self._tiers.seconds_per_block = seconds_per_block

    def ask(self, number: int, names: list[bytes], *, is_expected: bool) -> bool:
        return self._questions.ask(number, names, is_expected=is_expected)

    def arrived(self) -> list[int]:
        return self._questions.arrived()

    def forget(self, number: int) -> None:
        self._questions.forget(number)

    def wait(self) -> None:
        self._questions.wait()

    def near(self, names: list[bytes]) -> Sequence[NearBlock]:
        return self._tiers.host.near(names)

    def lend(self, near: Sequence[NearBlock]) -> int:
        return self._tiers.host.lend(near)

    def wants(self, name: bytes) -> bool:
        return self._tiers.wants(name)

    def statistics(self) -> dict[str, float]:
        return {**self._tiers.statistics(), **self._questions.statistics()}
