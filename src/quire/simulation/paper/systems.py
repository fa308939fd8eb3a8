"""The five systems of the evaluation, each the engine's own core: they differ in who gives memory and who lets in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.config import EngineOptions, ModelFacts
from quire.config.arithmetic import ModelShape
from quire.config.device_sheets import device_sheet
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.executor.modelled import Amount, CostModel, StepWork, VirtualClock
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.launch import build_engine_core
from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.simulation.baselines.buddy_manager import with_buddies
from quire.simulation.baselines.reservations import longest, oracle, power_of_two_output
from quire.simulation.baselines.run_to_end import RunToEnd
from quire.simulation.costs.roofline import Efficiency
from quire.simulation.deployment import Deployment, deploy
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.workloads import MAX_MODEL_LEN
from quire.simulation.shapes import model_folder

MakeManager = Callable[..., KVCacheManager]

# the engine itself, and what it is compared with
PAGED, ORACLE, POW2, MAX, FASTER_TRANSFORMER = "vLLM", "Orca (Oracle)", "Orca (Pow2)", "Orca (Max)", "FasterTransformer"
ORCAS = (MAX, POW2, ORACLE)
# all prompts of a batch start together there, however long they are
_WHOLE_BATCH = 64 * MAX_MODEL_LEN
_STEP_TOKENS = 2560


def manager_of(system: str, max_model_len: int = MAX_MODEL_LEN) -> MakeManager:
    """Who gives memory there."""
    if system == PAGED:
        return KVCacheManager
    reservations = {ORACLE: oracle, POW2: power_of_two_output(max_model_len)}
    return with_buddies(reservations.get(system, longest(max_model_len)))


@dataclass(frozen=True)
class Setup:
    """A column of Table 3.1."""

    model: str
    device: str
    num_devices: int


OPT_13B = Setup("opt-13b", "a100-40gb", 1)
OPT_66B = Setup("opt-66b", "a100-40gb", 4)
OPT_175B = Setup("opt-175b", "a100-80gb", 8)
LLAMA_13B = Setup("llama-13b", "a100-40gb", 1)


@dataclass(frozen=True)
class HostCosts:
    """A device's time, and what the host does for each sequence of a step."""

    device: CostModel
    seconds_per_sequence: float

    def seconds(self, work: StepWork) -> Amount:
        return self.device.seconds(work) + self.seconds_per_sequence * work.num_rows


@dataclass(frozen=True)
class SystemDeployment(Deployment):
    """An engine with the memory and the admission of one of the systems."""

    system: str = PAGED
    confidence: float = 1.0

    def core(self, clock: VirtualClock) -> EngineCore:
        policy = RunToEnd() if self.system == FASTER_TRANSFORMER else Fifo()
        executor = self.executor(clock)
        executor.confidence = self.confidence
        return build_engine_core(self.config, executor, policy=policy, make_manager=manager_of(self.system))


def deploy_system(
    system: str, setup: Setup, assumed: Assumptions, options: dict[str, Any] | None = None
) -> SystemDeployment:
    """`options`: further ones of the engine."""
    is_paged = system == PAGED
    asked = {
        "tensor_parallel_size": setup.num_devices,
        "gpu_memory_utilization": assumed.memory_share,
        "dtype": "float16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": _STEP_TOKENS,
        "enable_prefix_caching": False,
        **(options or {}),
        # whoever keeps its piece to the end is never swapped out
        **({} if is_paged else {"swap_space": 0.0}),
    }
    device = device_sheet(setup.device)
    base = deploy(setup.model, device, asked, efficiency=_efficiency(setup, assumed, asked))
    config = base.config
    if system == FASTER_TRANSFORMER:
        config = replace(config, max_num_batched_tokens=_WHOLE_BATCH)
    parts = {field.name: getattr(base, field.name) for field in fields(base)}
    costs = HostCosts(base.costs, assumed.seconds_per_sequence)
    return SystemDeployment(**{**parts, "config": config, "costs": costs}, system=system, confidence=assumed.confidence)


def _efficiency(setup: Setup, assumed: Assumptions, options: dict[str, Any]) -> Efficiency:
    """Small blocks are many small copies between device and host (3.7.3)."""
    general = Efficiency()
    shape = ModelShape.of(ModelFacts.read(model_folder(setup.model)).hf_config).of_worker(setup.num_devices, 1)
    block_bytes = shape.kv_bytes_per_token("float16") * options.get("block_size", EngineOptions.block_size)
    copying = 2 * shape.num_layers * assumed.seconds_per_copy
    seconds = block_bytes / general.host_bytes_per_second + copying
    return replace(
        general,
        compute=assumed.compute_share,
        memory=assumed.bandwidth_share,
        seconds_per_layer=assumed.seconds_per_layer,
        host_bytes_per_second=block_bytes / seconds,
    )
