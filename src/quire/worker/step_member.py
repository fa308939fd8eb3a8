"""What takes part in every step beside the model: connectors, proposers, work that goes on beside the steps."""

from __future__ import annotations

from collections.abc import Iterable

from quire.messages import IntArray, SchedulerOutput, StepOutput


class StepMember:
    """Hooks over a step, in their order; each does nothing unless a member says otherwise. Called by ModelRunner."""

    def begin(self) -> None:
        """Nothing was applied yet."""

    def prepare(self, scheduled: SchedulerOutput) -> dict[int, str]:
        """The differences are applied. Rows that cannot be computed, with the reason."""
        return {}

    def without_waiting(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """The rows that compute something in this step; the others wait for what goes on beside it."""
        return rows, num_tokens

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        """The step has its answer."""

    def weights_changed(self) -> None:
        """The model has others: what was made with the old ones is void."""

    def close(self) -> None:
        """There are no more steps."""


def having(hook: str, members: Iterable[StepMember]) -> tuple[StepMember, ...]:
    """Those that have this hook: the others are not asked in every step."""
    return tuple(member for member in members if getattr(type(member), hook) is not getattr(StepMember, hook))
