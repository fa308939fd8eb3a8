"""Where a round writes what it measured, beside what the machine allows at best."""

from __future__ import annotations

from dataclasses import replace

from quire.config import EngineConfig
from quire.errors import ModelError, OptionError
from quire.interfaces.cli.bench_limits import MachineLimits, ModelCost, least_seconds
from quire.interfaces.cli.bench_numbers import Measure, new_measure
from quire.interfaces.cli.bench_workloads import Work


class Sheet:
    """Quantities by name, in the order in which they were first noted."""

    def __init__(self) -> None:
        self._measures: dict[str, Measure] = {}

    def note(self, name: str, value: float | None, unit: str, limit: float | None = None) -> None:
        if value is None:
            return
        measure = self._measures.setdefault(name, new_measure(name, unit, limit))
        measure.values.append(value)

    @property
    def measures(self) -> list[Measure]:
        return list(self._measures.values())


class Ruler:
    """Limits of one model on this machine; None where the model's shape or the machine's rates are not known."""

    def __init__(self, cost: ModelCost | None, limits: MachineLimits) -> None:
        self.cost = cost
        self.limits = limits

    @classmethod
    def of(cls, config: EngineConfig, limits: MachineLimits) -> Ruler:
        worker = config.worker
        try:
            cost = ModelCost.of(config.facts, worker.dtype, worker.quantization)
            return cls(replace(cost, kv_dtype=worker.kv_cache_dtype or worker.dtype), limits)
        except (ModelError, OptionError):
            return cls(None, limits)

    @property
    def peak(self) -> float:
        return self.limits.peaks.get(self.cost.unit, 0.0) if self.cost else 0.0

    @property
    def has_limits(self) -> bool:
        return self.cost is not None and self.peak > 0 and self.limits.bandwidth > 0

    def decode_rate(self, length: int = 0) -> float | None:
        """Tokens a second of one stream, if reading the weights and the KV of so many tokens were all."""
        if not self.cost or not self.limits.bandwidth:
            return None
        return self.limits.bandwidth / (self.cost.step_bytes(1) + length * self.cost.kv_bytes_per_token)

    def prompt_rate(self, length: int) -> float | None:
        """Tokens a second of one prompt, if arithmetic were all."""
        return length * self.peak / self.cost.prompt_operations(length) if self.cost and self.peak else None

    def seconds(self, work: Work) -> float | None:
        if self.cost is None or not self.has_limits:
            return None
        return least_seconds(work, self.cost, self.limits.bandwidth, self.peak)
