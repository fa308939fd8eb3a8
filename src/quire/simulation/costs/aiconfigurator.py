"""A step by NVIDIA's tables of operators, which were measured on their GPUs and need none here (`aiconfigurator-core`,
an extra).

    seconds = fixed + matrices(tokens) + head(sampled) + attention(a prompt) + attention(rows that decode) + moves

A step that computes more tokens than it has rows computes a prompt; where it computes several, they are priced as one
of their length. The rows that decode are priced with their mean context, between knots at powers of two.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from quire.config import EngineConfig
from quire.config.device_sheets import DeviceSheet
from quire.engine_core.executor.modelled import Amount, Floats, StepWork
from quire.errors import OptionError, one_line
from quire.simulation.costs.roofline import Efficiency, ModelPart, RooflineCosts

# data sheets and tables call the same device by different names
_SYSTEMS = {"a100-80gb": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
# whose kernels were measured
_BACKEND = "vllm"
_MS = 1e-3


class AiConfiguratorCosts:
    """Of one model on one device."""

    def __init__(self, config: EngineConfig, device: DeviceSheet, part: ModelPart) -> None:
        """Raises an OptionError where the tables have no such device, model or form of weights."""
        _check(config, device, part)
        self._part = part
        # what no table has
        self._rest = RooflineCosts(device, part, Efficiency())
        self._engine = _engine(config, _SYSTEMS[device.name])
        names = [name for name, *_ in self._engine.decode_step_per_op(1, 1, 2)]
        (self._attention,) = (place for place, name in enumerate(names) if name.endswith("_attention"))
        (self._head,) = (place for place, name in enumerate(names) if "logits" in name)
        self._matrices_places = [place for place in range(len(names)) if place not in (self._attention, self._head)]
        longest = config.max_model_len
        self._knots = 2.0 ** np.arange((longest - 1).bit_length() + 1)
        # numbers repeat from step to step
        self._matrices = cache(partial(self._of_tokens, self._matrices_places))
        self._heads = cache(partial(self._of_tokens, [self._head]))
        self._decoding = cache(self._at_knots)

    def seconds(self, work: StepWork) -> Amount:
        rest = self._rest
        seconds = rest.efficiency.seconds_per_step + rest.seconds_of_blocks(work) + self._matrices(work.num_tokens)
        if work.num_sampled:
            seconds += self._heads(work.num_sampled)
        more = work.num_tokens - work.num_rows
        if more <= 0:
            return seconds + self._decode(work.num_rows, work.context_tokens)
        pairs = float(work.attention_pairs) / self._part.shape.num_layers
        length = more + 1
        # a row that decodes has as many pairs as context, so what is over is the prompt's
        end = (pairs - float(work.context_tokens)) / more + length / 2
        behind = max(0, round(end) - length)
        place = self._attention
        seconds += _sum(self._engine.evaluate_context_ops([place], batch_size=1, s=length, prefix=behind))
        others = max(0.0, float(work.context_tokens) - behind - length)
        return seconds + self._decode(work.num_rows - 1, others)

    def _decode(self, num_rows: int, context_tokens: Amount) -> Amount:
        if not num_rows:
            return 0.0
        times: Floats = np.interp(np.asarray(context_tokens) / num_rows, self._knots, self._decoding(num_rows))
        return times if times.ndim else float(times)

    def _at_knots(self, num_rows: int) -> Floats:
        evaluate = self._engine.evaluate_generation_ops
        return np.array([_sum(evaluate([self._attention], batch_size=num_rows, s=int(knot))) for knot in self._knots])

    def _of_tokens(self, places: list[int], num_tokens: int) -> float:
        return _sum(self._engine.evaluate_generation_ops(places, batch_size=num_tokens, s=1))


def _check(config: EngineConfig, device: DeviceSheet, part: ModelPart) -> None:
    if device.name not in _SYSTEMS:
        raise OptionError(f"costs=aiconfigurator: has no tables of {device.name}, only of {', '.join(_SYSTEMS)}.")
    shape, worker = part.shape, config.worker
    if shape.latent or shape.mixed or shape.recurrent or shape.num_windowed_layers:
        raise OptionError("costs=aiconfigurator: layers that do not attend to all tokens have no price. Leave it out.")
    if worker.quantization or worker.kv_cache_dtype not in (None, worker.dtype) or worker.dtype == "float32":
        raise OptionError("costs=aiconfigurator: prices bfloat16 and float16 alone. Leave quantization and dtypes out.")
    if part.num_stages > 1:
        raise OptionError("costs=aiconfigurator: prices no pipeline. Leave pipeline_parallel_size out.")


def _engine(config: EngineConfig, system: str) -> Any:
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise OptionError(
            f"costs=aiconfigurator: a library is missing ({error}). Install it: pip install 'quire[aiconfigurator]'."
        ) from error
    ranks = config.worker.grid.tensor
    folder = config.worker.model_path
    try:
        return EngineHandle.compile(folder, system, _BACKEND, tp_size=ranks, moe_tp_size=ranks, moe_ep_size=1)
    except Exception as error:  # it raises what it likes
        raise OptionError(f"costs=aiconfigurator: {one_line(error)}") from error


def _sum(values: list[tuple[str, float, float, str]]) -> float:
    """Milliseconds of several operators."""
    return sum(latency for _, latency, *_ in values) * _MS
