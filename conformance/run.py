"""Runs checks against a target and says how they ended."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from conformance.registry import Check, Skip
from conformance.target import Target

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_MAX_REASON = 300


@dataclass(frozen=True)
class Result:
    """How a check ended."""

    check: Check
    outcome: str
    reason: str = ""
    seconds: float = 0.0


def run_checks(target: Target, checks: Iterable[Check]) -> Iterator[Result]:
    for check in checks:
        began = time.monotonic()
        outcome, reason = _outcome_of(check, target)
        yield Result(check, outcome, reason, time.monotonic() - began)


def _outcome_of(check: Check, target: Target) -> tuple[str, str]:
    try:
        check.run(target)
    except Skip as skip:
        return SKIPPED, str(skip)
    except Exception as error:  # whatever a server does to a check, the others are run
        text = re.sub(r"\s+", " ", str(error)) or "not as it must be"
        return FAILED, f"{type(error).__name__}: {text}"[:_MAX_REASON]
    return PASSED, ""


def score(results: Iterable[Result]) -> tuple[int, int]:
    """Passed, and how many could pass."""
    counted = [result.outcome for result in results if result.outcome != SKIPPED]
    return counted.count(PASSED), len(counted)


def table(results: list[Result]) -> str:
    """A line a check, and a line a group."""
    lines = []
    for result in results:
        mark = {PASSED: "ok", FAILED: "FAIL", SKIPPED: "skip"}[result.outcome]
        lines.append(f"{mark:<4}  {result.check.group:<10} {result.check.text}")
        if result.reason:
            lines.append(f"      {'':<10} {result.reason}")
    lines.append("")
    for group in dict.fromkeys(result.check.group for result in results):
        of_group = [result for result in results if result.check.group == group]
        num_passed, num = score(of_group)
        lines.append(f"{group:<10} {num_passed:>4}/{num}")
    return "\n".join(lines)
