"""A worker: one device, one model, one KV cache. Loads, measures, then executes steps.

Owns everything of torch. Must never decide what runs: it does what a SchedulerOutput says. Called by an executor, in
this order: load, measure_capacity, initialize_cache, then execute and control at will, shutdown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from quire.config import WorkerConfig
from quire.config.kv_store import TIERED
from quire.errors import EngineError, ModelError, UserError, one_line
from quire.kv_connectors import make_worker_half
from quire.kv_connectors.connector import CacheLayout, NoWorkerHalf
from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity
from quire.state_layout import state_layout
from quire.structured_output.grammars import Grammars
from quire.worker.adapter_slots import AdapterMember, Adapters, attach
from quire.worker.attention import Attention, attention_layers
from quire.worker.attention.cpu import CpuBackend
from quire.worker.capacity import bytes_of_state_copies, capacity, measure_largest_step, with_draft, with_encoder
from quire.worker.compilation import compile_layers, record_model
from quire.worker.host_memory import host_memory
from quire.worker.image_rows import ImageRows
from quire.worker.input_batch import BatchBuilder
from quire.worker.kv_cache import KVCache
from quire.worker.layers.embedding import LMHead
from quire.worker.layers.experts import expert_tokens, forget_expert_tokens
from quire.worker.layers.quantization import find_scheme
from quire.worker.layers.ranks import Ranks, among
from quire.worker.model_loader import load_model, plan_of_model
from quire.worker.model_runner import ModelRunner
from quire.worker.packed_store import num_mapped_bytes, wait_until_kept
from quire.worker.patience import Patience
from quire.worker.pipeline import StageInputs, StageOutputs
from quire.worker.platforms import current_platform
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors import RowFollower
from quire.worker.sampler.sampler import Sampler
from quire.worker.speculative import Drafting, NoProposer, Proposer, ProposerContext, make_proposer
from quire.worker.speculative.cost import measure_costs
from quire.worker.state_cache import StateTables, recurrent_layers
from quire.worker.step_computation import StepComputation, StepSampler, TokenInputs
from quire.worker.step_isolation import StepIsolation
from quire.worker.step_member import StepMember
from quire.worker.transfers import Transfers
from quire.worker.trial_step import try_step
from quire.worker.weight_update import WeightUpdate

# what a step may take beyond its tokens: less than a server waits before it takes the engine for stalled
_PATIENCE_SECONDS = 8.0
_PATIENCE_SECONDS_OF_A_DEVICE = 30.0


class Worker:
    """`model_loader` is a seam for tests: it makes the model out of the configuration."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        model_loader: Callable[[WorkerConfig], nn.Module] = load_model,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: with whom it shares the model."""
        self._config = config
        self._ranks = ranks or Ranks.of(config)
        self._model_loader = model_loader
        self._platform = current_platform(config.device)
        self._host_memory = host_memory(config.device, config.swap_directory)
        self._model: nn.Module | None = None
        self._proposer: Proposer = NoProposer()
        self._inputs: TokenInputs | ImageRows | StageInputs = TokenInputs()
        self._grammars = Grammars()
        self._connector = make_worker_half(config.kv_connector)
        self._adapters: Adapters | None = None
        self._runner: ModelRunner | None = None
        # of a stage of a pipeline that is not the last one
        self._outputs: StageOutputs | None = None
        # that were checked, and not taken yet
        self._weights: WeightUpdate | None = None
        self._seconds_per_token = 0.0
        self._counters = dict.fromkeys(("num_steps", "num_tokens", "num_sampled_tokens", "num_failures"), 0)
        self._controls: dict[str, Callable[..., Any]] = {
            "ping": lambda: "pong",
            "statistics": self.statistics,
            "expert_tokens": lambda: expert_tokens(self._loaded_model()),
            "check_invariants": self._check_invariants,
            "measure_speculation": self._measure_speculation,
            "measure_swap": self._measure_swap,
            "open_vocabulary": self._grammars.open,
            "prepare_form": self._grammars.prepare,
            "check_weights": self._check_weights,
            "digest_weights": self._digest_weights,
            "update_weights": self._update_weights,
        }

    def load(self) -> None:
        self._platform.set_threads(self._config.num_threads, self._config.processors)
        with among(self._ranks):
            self._model = self._model_loader(self._config)
        self._adapters = self._open_adapters(self._model)
        # A draft is whole on every rank: it is small, and all draft the same. What it keeps of a token lies in blocks
        # that are shared.
        with among(Ranks(context=self._ranks.context)):
            self._proposer = make_proposer(self._config, self._model)

    def measure_capacity(self) -> WorkerCapacity:
        model = self._loaded_model()
        step = with_draft(
            measure_largest_step(model, self._platform, self._config, self._ranks.agree),
            self._proposer.largest_step(self._platform, self._config),
        )
        if _takes_images(model) and self._ranks.stages.is_first:
            step = with_encoder(step, model, self._platform, self._config)
        states = [layer.spec for layer in recurrent_layers(model).values()]
        step = replace(step, state_bytes=bytes_of_state_copies(states, self._config))
        memory = self._platform.memory()
        mapped = num_mapped_bytes(model)
        memory = replace(memory, free_bytes=max(0, memory.free_bytes - mapped))
        host_bytes = max(0, self._host_memory.free_bytes() - mapped)
        found = capacity(model, memory, step, self._config.gpu_memory_utilization, host_bytes)
        self._seconds_per_token = found.seconds_per_token
        found.layers += [layer.spec for layer in self._proposer.layers.values()]
        return found

    def initialize_cache(
        self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0, num_state_blocks: int = 0
    ) -> None:
        """Blocks 0 ... num_blocks - 1 for the layers of all groups, and swap space for as many as num_host_blocks. A
        stage of a pipeline keeps its own layers only: it is told how many blocks the states of a sequence have.

        The worker is ready for steps after this.
        """
        config = self._config
        model = self._loaded_model()
        device = self._platform.device
        layers = attention_layers(model)
        if config.compile:
            # Not earlier: what is measured is the model uncompiled, which needs no less memory.
            compile_layers(model)
        cache = KVCache()
        cached_layers = layers | self._proposer.layers
        recurrent = recurrent_layers(model)
        if self._ranks.stages.size > 1:
            groups = [[name for name in names if name in cached_layers or name in recurrent] for names in groups]
        cache.allocate(cached_layers, groups, num_blocks, config.slots_per_block, device, recurrent, num_state_blocks)
        cache.open_swap_space(num_host_blocks, self._host_memory)
        specs = [layer.spec for layer in cached_layers.values()]
        specs += [layer.spec for layer in recurrent.values()]
        states = state_layout(specs, groups, config.slots_per_block, num_state_blocks)
        num_state_blocks = num_state_blocks or (states.num_blocks if states else 0)
        kv_dtype = config.kv_cache_dtype or config.dtype
        layout = CacheLayout.of(config.model_as_run, kv_dtype, config.block_size, groups, specs)
        self._connector.open(layout, cache.tensors)
        if self._platform.name == "cpu" and not (config.compile or config.enforce_eager):
            for module in self._proposer.recordable(model):
                self._record(module)
        table = RowTable(config.max_num_seqs, config.max_model_len, *_vocab_sizes(model))
        of_attention = groups[: len(groups) - (num_state_blocks > 0)]
        windows = [_window_of([cached_layers[name] for name in names]) for names in of_attention]
        blocks_per_row = -(-config.max_model_len // config.block_size)
        table.open_groups(len(groups), blocks_per_row, num_blocks, windows, num_state_blocks)
        backend = next((layer.backend for layer in layers.values()), None)
        sampler = Sampler(table, model.compute_logits, self._grammars, is_alone=self._ranks.size == 1)
        state_tables = StateTables(table, list(recurrent.values()), device) if states else None
        batches = BatchBuilder(table, config.block_size, device, state_tables)
        self._proposer.open(ProposerContext(table, sampler.settings))
        drafting = Drafting(table, self._proposer)
        stages = self._ranks.stages
        if _takes_images(model):
            self._inputs = ImageRows(model, device, config.encoder_cache_bytes)
        if not stages.is_first:
            self._inputs = StageInputs(stages, table, self._inputs)
        step_sampler: StepSampler = sampler
        step_drafting = drafting
        if not stages.is_last:
            step_sampler = self._outputs = StageOutputs(stages, table, sampler, drafting)
            step_drafting = Drafting(table, NoProposer())
        computation = StepComputation(
            model, backend, table, step_sampler, batches, step_drafting, self._platform, self._inputs
        )
        isolation = StepIsolation(
            computation, table, self._platform, config.block_size, self._patience(), most_ahead=stages.size
        )
        followers: list[RowFollower] = [sampler, self._inputs]
        members: list[StepMember] = [sampler, self._inputs]
        if drafting.is_on:
            followers.append(self._proposer)
            members.append(drafting)
        if not isinstance(self._connector, NoWorkerHalf):
            members.append(Transfers(self._connector, isolation))
        if isinstance(self._inputs, StageInputs):
            self._inputs.open(isolation)
        if self._outputs is not None:
            members.append(self._outputs)
        if self._adapters is not None:
            members.append(AdapterMember(self._adapters, table, isolation))
        self._runner = ModelRunner(table, cache, isolation, followers, members)
        if num_state_blocks:
            num_tokens = min(2, config.max_num_batched_tokens, config.max_model_len - 1)
            try_step(self._runner, num_tokens, len(groups), num_state_blocks)
        forget_expert_tokens(model)

    def execute(self, scheduled: SchedulerOutput, answers: Sequence[StepOutput] = ()) -> StepOutput:
        """One step. `answers`: what the last stage said to earlier ones, for a stage that is not the last."""
        runner = self._ready_runner()
        if self._outputs is not None:
            for answer in answers:
                self._outputs.settle(answer)
                self._counters["num_sampled_tokens"] += len(answer.token_ids)
        output = runner.step(scheduled)
        self._counters["num_steps"] += 1
        self._counters["num_tokens"] += scheduled.num_scheduled_tokens
        self._counters["num_sampled_tokens"] += len(output.token_ids)
        self._counters["num_failures"] += len(output.failures)
        return output

    def control(self, name: str, args: dict[str, Any]) -> Any:
        """A management operation by name."""
        operation = self._controls.get(name)
        if operation is None:
            raise EngineError(f"worker control {name!r}: there is no such operation; known: {sorted(self._controls)}.")
        return operation(**args)

    def statistics(self) -> dict[str, float]:
        used = int(self._runner.table.is_used.sum()) if self._runner else 0
        cache_bytes = self._runner.cache.num_bytes if self._runner else 0
        swap_bytes = self._runner.cache.swap_arena.num_bytes if self._runner else 0
        return {
            **self._counters,
            **self._inputs.statistics(),
            **(self._adapters.statistics() if self._adapters is not None else {}),
            "num_rows_used": used,
            "kv_cache_bytes": cache_bytes,
            "swap_space_bytes": swap_bytes,
            "num_compiled_grammars": self._grammars.num_compiled,
            "compiled_grammar_bytes": self._grammars.num_bytes,
            "num_grammar_compilations_total": self._grammars.num_compilations,
            "grammar_compile_seconds_total": self._grammars.compile_seconds,
        }

    def shutdown(self) -> None:
        """Let go of model and cache; nothing may be executed after this."""
        if self._model is not None:
            self._platform.synchronize()
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._outputs = None
        self._proposer = NoProposer()
        self._connector = NoWorkerHalf()
        self._grammars.close()
        self._adapters = None
        self._model = None

    def _open_adapters(self, model: nn.Module) -> Adapters | None:
        """Slots in the model's layers, before anything is measured: what they take is no room for the cache."""
        config = self._config
        if not config.max_loras:
            return None
        dtype = self._platform.dtype(config.dtype)
        attach(model, config.max_loras, config.max_lora_rank, dtype)
        adapters = Adapters(model, config.max_loras, config.max_lora_rank, dtype, self._ranks.total)
        self._controls |= {
            "load_adapter": adapters.load,
            "adapter_state": adapters.state,
            "drop_adapter": adapters.drop,
        }
        return adapters

    def _weight_update(self, path: Path) -> WeightUpdate:
        """With a plan that is made anew: it costs less than it would to keep."""
        config = self._config
        if config.kv_connector is not None and config.kv_connector.name != TIERED:
            raise ModelError(
                f"update_weights: kv_connector={config.kv_connector.name} keeps blocks under keys that do not say of "
                f"which weights they are. Take kv_connector={TIERED}, or start the engine again."
            )
        with among(self._ranks):
            plan = plan_of_model(config)
        if plan is None:
            raise ModelError("update_weights: the Transformers library runs this model. Start it again instead.")
        scheme = None if config.quantization is None else find_scheme(config.quantization)
        return WeightUpdate(self._loaded_model(), plan, scheme, path)

    def _check_weights(self, path: str) -> str | None:
        """What is wrong with a file of weights. Not an exception: other ranks would take this one for lost."""
        if self._weights is not None and self._weights.is_of(Path(path)):
            return None
        self._weights = None
        try:
            update = self._weight_update(Path(path))
            update.check()
        except UserError as error:
            return str(error)
        except Exception as error:  # of a shape, say, that a model's own way of loading did not expect
            return f"{path}: does not fit the model ({type(error).__name__}: {one_line(error)})."
        self._weights = update
        return None

    def _digest_weights(self, path: str) -> str | None:
        """Of what the file holds; rank 0 reads it for all."""
        return None if self._weights is None or self._config.rank else self._weights.digest()

    def _update_weights(self, path: str) -> int:
        update = self._weights
        self._weights = None
        if update is None:
            raise EngineError(f"update_weights: {path} was not checked.")
        wait_until_kept(self._loaded_model())
        num_weights = update.apply()
        self._inputs.weights_changed()
        return num_weights

    def _patience(self) -> Patience:
        """Endless where a step may stop to compile, and where ranks would have to lose it together."""
        seconds = _PATIENCE_SECONDS if self._platform.name == "cpu" else _PATIENCE_SECONDS_OF_A_DEVICE
        is_endless = self._config.compile or self._ranks.size > 1
        return Patience(math.inf if is_endless else seconds, self._seconds_per_token)

    def _measure_swap(self) -> float:
        """Seconds per block and direction; 0.0 without swap space."""
        return self._ready_runner().cache.swap_arena.measure(self._platform.synchronize)

    def _measure_speculation(self) -> dict[str, float]:
        """Seconds per step and per token, of the model and of a pass of the proposer; no row or cache is touched."""
        model = self._loaded_model()
        most_tokens = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        costs = measure_costs(model, self._proposer, self._platform, most_tokens, self._ranks.agree)
        forget_expert_tokens(model)
        return costs

    def _check_invariants(self) -> None:
        self._ready_runner().table.check_invariants()

    def _record(self, model: nn.Module) -> None:
        """Where the forward pass of a model can be one program, it is from now on."""
        config = self._config
        layers = attention_layers(model).values()
        recurrent = recurrent_layers(model).values()
        can_be_recorded = all(isinstance(layer.backend, CpuBackend) for layer in layers)
        can_be_recorded &= all(layer.is_changed_by_one_call for layer in recurrent)
        if can_be_recorded and (layers or recurrent):
            blocks_per_row = -(-config.max_model_len // config.block_size)
            drafts = config.speculation.num_speculative_tokens if config.speculation else 0
            rows = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + drafts))
            record_model(model, config.max_num_batched_tokens, config.max_num_seqs, blocks_per_row, rows)

    def _loaded_model(self) -> nn.Module:
        if self._model is None:
            raise EngineError("worker: load() comes first.")
        return self._model

    def _ready_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError(
                "worker: load() and initialize_cache() come before a step, and shutdown() after the last."
            )
        return self._runner


def _vocab_sizes(model: nn.Module) -> list[int]:
    """That of the model's own head; models that come with another library check token ids themselves."""
    return [module.vocab_size for module in model.modules() if isinstance(module, LMHead)][:1]


def _takes_images(model: nn.Module) -> bool:
    return bool(getattr(model, "takes_images", False))


def _window_of(layers: list[Attention]) -> int:
    """How many tokens at least one of them looks back; 0: at all."""
    windows = [layer.sliding_window for layer in layers]
    return 0 if 0 in windows else max(windows, default=0)
