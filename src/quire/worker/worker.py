"""A worker: one device, one model, one KV cache. Loads, measures, then executes steps.

Owns everything of torch. Must never decide what runs: it does what a SchedulerOutput says. Called by an executor, in
this order: load, measure_capacity, initialize_cache, then execute and control at will, shutdown.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quire.config import ModelFacts, WorkerConfig
from quire.config.engine_config import TIERED
from quire.config.images import MOST_OPEN_BYTES
from quire.config.process_memory import resident_bytes_of_process
from quire.config.speech_tokens import SpeechTokens
from quire.errors import EngineError, ModelError, OptionError, UserError, one_line
from quire.kv_connectors import make_worker_half
from quire.kv_connectors.connector import CacheLayout, NoWorkerHalf
from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity
from quire.observability.step_times import WORKER_PHASES, StepTimes
from quire.state_layout import state_layout
from quire.structured_output.grammars import Grammars
from quire.worker.adapter_slots import AdapterMember, Adapters, attach
from quire.worker.attention import Attention, attention_layers, encoding_layers
from quire.worker.attention.cpu import CpuBackend
from quire.worker.capacity import (
    StepCost,
    bytes_of_state_copies,
    bytes_of_step_graphs,
    capacity,
    measure_largest_step,
    with_draft,
    with_encoder,
    with_source,
)
from quire.worker.compilation import (
    CannotCompileError,
    GraphedModel,
    RecordedDecoding,
    StepBuffers,
    compile_model,
    graph_model,
    record_model,
    why_no_graphs,
)
from quire.worker.compilation.graphs import GraphDevice
from quire.worker.encoder_rows import EncoderRows
from quire.worker.host_memory import host_memory
from quire.worker.image_rows import ImageRows
from quire.worker.input_batch import BatchBuilder
from quire.worker.kept_costs import kept_cost
from quire.worker.kernels import triton
from quire.worker.kv_cache import KVCache
from quire.worker.layers.embedding import LMHead, VocabEmbedding
from quire.worker.layers.experts import expert_tokens, forget_expert_tokens
from quire.worker.layers.quantization import find_scheme
from quire.worker.layers.ranks import Ranks, StageGroup, among
from quire.worker.model_loader import load_model, plan_of_model
from quire.worker.model_runner import ModelRunner
from quire.worker.models.causal_lm import has_sources
from quire.worker.models.stages import hands_on_inner_states
from quire.worker.packed_store import costs_file, move_soon, num_mapped_bytes, settle, stop_moving
from quire.worker.patience import Patience
from quire.worker.pipeline import StageAnswer, StageInputs, StageOutputs
from quire.worker.platforms import current_platform
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors import RowFollower
from quire.worker.sampler.sampler import Sampler
from quire.worker.source_rows import SourceRows
from quire.worker.speculative import Drafting, NoProposer, Proposer, ProposerContext, make_proposer, prepare_to_draft
from quire.worker.speculative.cost import measure_costs
from quire.worker.staging import SENT_TO_DEVICE
from quire.worker.state_cache import StateTables, recurrent_layers
from quire.worker.step_computation import StepComputation, StepSampler, TokenInputs
from quire.worker.step_isolation import StepIsolation
from quire.worker.step_member import StepMember
from quire.worker.transfers import StageTransfers, Transfers, transfers_with
from quire.worker.trial_step import try_step
from quire.worker.weight_update import WeightUpdate

logger = logging.getLogger(__name__)
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
        self._inputs: TokenInputs | ImageRows | SourceRows | EncoderRows | StageInputs = TokenInputs()
        self._grammars = Grammars()
        self._connector = make_worker_half(config.kv_connector, self._ranks if self._ranks.size > 1 else None)
        self._transfers: Transfers | None = None
        self._adapters: Adapters | None = None
        self._runner: ModelRunner | None = None
        # steps of one token as graphs, where the device has them
        self._graphs: GraphedModel | None = None
        # None: steps are no programs, or bring more than tokens
        self._decoding: RecordedDecoding | None = None
        # of a stage of a pipeline that is not the last one
        self._outputs: StageOutputs | None = None
        # that were checked, and not taken yet
        self._weights: WeightUpdate | None = None
        self._seconds_per_token = 0.0
        self._times = StepTimes(time.perf_counter, WORKER_PHASES, prefix="worker_")
        self._counters = dict.fromkeys(("num_steps", "num_tokens", "num_sampled_tokens", "num_failures"), 0)
        self._controls: dict[str, Callable[..., Any]] = {
            "ping": lambda: "pong",
            "statistics": self.statistics,
            "expert_tokens": lambda: expert_tokens(self._loaded_model()),
            "check_invariants": self._check_invariants,
            "measure_speculation": self._measure_speculation,
            "measure_swap": self._measure_swap,
            "watch_arrivals": self._watch_arrivals,
            "open_vocabulary": self._grammars.open,
            "prepare_form": self._grammars.prepare,
            "give_back": lambda first, end: self._ready_runner().cache.give_back(first, end),
            "resident_memory": self._resident_memory,
            "step_times": self._step_times,
            "check_weights": self._check_weights,
            "digest_weights": self._digest_weights,
            "update_weights": self._update_weights,
        }

    def load(self) -> None:
        self._platform.set_threads(self._config.num_threads, self._config.processors)
        with among(self._ranks):
            self._model = self._model_loader(self._config)
        if self._config.enable_prompt_embeds and not getattr(self._model, "takes_vectors", False):
            raise ModelError(
                f"enable_prompt_embeds: {type(self._model).__name__} reads tokens themselves, so that no vectors can "
                "stand in their place. Leave it out."
            )
        self._adapters = self._open_adapters(self._model)
        # A draft is whole on every rank of the last stage: it is small, and all draft the same. What it keeps of a
        # token lies in blocks that are shared.
        if self._ranks.stages.is_last:
            with among(Ranks(context=self._ranks.context)):
                self._proposer = make_proposer(self._config, self._model)
        else:
            prepare_to_draft(self._config, self._model)

    def measure_capacity(self, num_sharing: int = 1) -> WorkerCapacity:
        """`num_sharing`: workers of this engine on this machine."""
        model = self._loaded_model()
        step = with_draft(self._largest_step(model), self._proposer.largest_step(self._platform, self._config))
        if _takes_images(model) and self._ranks.stages.is_first:
            step = with_encoder(step, model, self._platform, self._config)
        if has_sources(model):
            step = with_source(step, model, self._platform, self._config)
        states = [layer.spec for layer in recurrent_layers(model).values()]
        step = replace(step, state_bytes=bytes_of_state_copies(states, self._config))
        memory = self._platform.memory()
        mapped = num_mapped_bytes(model)
        # pages of a file that are read in every step are as good as taken
        memory = replace(memory, free_bytes=max(0, memory.free_bytes - mapped), process_bytes=memory.own_bytes + mapped)
        aside, host_aside = self._set_aside(model)
        if self._graph_device(model) is not None:
            has_adapters = self._adapters is not None
            aside["graphs"] = bytes_of_step_graphs(model, self._platform, self._config, has_adapters=has_adapters)
            self._platform.release_memory()
        host_bytes = max(0, self._host_memory.free_bytes() - mapped - host_aside)
        share = self._config.gpu_memory_utilization
        found = capacity(model, memory, step, share, host_bytes, aside, num_sharing)
        self._seconds_per_token = found.seconds_per_token
        found.layers += [layer.spec for layer in self._proposer.layers.values()]
        return found

    def _largest_step(self, model: nn.Module) -> StepCost:
        measure = partial(measure_largest_step, model, self._platform, self._config, self._ranks.agree)
        # ranks measure together, or none of them does
        file = costs_file(model) if self._ranks.size == 1 else None
        return measure() if file is None else kept_cost(file, self._config, measure)

    def initialize_cache(
        self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0, num_state_blocks: int = 0
    ) -> None:
        """Blocks 0 ... num_blocks - 1 for the layers of all groups, and swap space for as many as num_host_blocks. A
        stage of a pipeline keeps its own layers only: it is told how many blocks the states of a sequence have.

        The worker is ready for steps after this.
        """
        config = self._config
        model = self._loaded_model()
        # Not earlier: what is measured is the model uncompiled, which needs no less memory.
        is_compiled = self._compile(model)
        layers = attention_layers(model) | self._proposer.layers
        recurrent = recurrent_layers(model)
        if self._ranks.stages.size > 1:
            groups = [[name for name in names if name in layers or name in recurrent] for names in groups]
        specs = [layer.spec for layer in layers.values()]
        specs += [layer.spec for layer in recurrent.values()]
        graph_device = self._graph_device(model)
        # The core knows of none that is behind its last one: there graphs write what is nobody's.
        num_spare = 0 if graph_device is None else 1
        cache = KVCache()
        device = self._platform.device
        cache.allocate(
            layers, groups, num_blocks + num_spare, config.slots_per_block, device, recurrent, num_state_blocks
        )
        # What a connector moves between steps says nothing of the blocks that it touches.
        has_lane = isinstance(self._connector, NoWorkerHalf)
        cache.open_swap_space(num_host_blocks, self._host_memory, self._platform.copy_lane() if has_lane else None)
        kv_dtype = config.kv_cache_dtype or config.dtype
        layout = CacheLayout.of(config.model_as_run, kv_dtype, config.block_size, groups, specs)
        self._connector.open(layout, cache.tensors)
        if graph_device is not None:
            buffers = StepBuffers.of(model, config, num_blocks, device)
            self._graphs = graph_model(model, buffers, graph_device, has_adapters=self._adapters is not None)
        elif self._platform.name == "cpu" and not (is_compiled or config.enforce_eager):
            for module in [] if hands_on_inner_states(model) else self._proposer.recordable(model):
                self._record(module)
        states = state_layout(specs, groups, config.slots_per_block, num_state_blocks)
        num_state_blocks = num_state_blocks or (states.num_blocks if states else 0)
        table = RowTable(config.max_num_seqs, config.max_model_len, *_vocab_sizes(model))
        of_attention = groups[: len(groups) - (num_state_blocks > 0)]
        windows = [_window_of([layers[name] for name in names]) for names in of_attention]
        blocks_per_row = -(-config.max_model_len // config.block_size)
        table.open_groups(len(groups), blocks_per_row, num_blocks, windows, num_state_blocks)
        state_tables = StateTables(table, list(recurrent.values()), device) if states else None
        self._runner = self._make_runner(model, cache, table, state_tables)
        if num_state_blocks:
            num_tokens = min(2, config.max_num_batched_tokens, config.max_model_len - 1)
            try_step(self._runner, num_tokens, len(groups), num_state_blocks)
        forget_expert_tokens(model)
        move_soon(model)

    def _make_runner(
        self, model: nn.Module, cache: KVCache, table: RowTable, state_tables: StateTables | None
    ) -> ModelRunner:
        """What runs steps over this cache and these rows, and all that follows the rows."""
        config = self._config
        stages = self._ranks.stages
        sampler = Sampler(
            table,
            model.compute_logits,
            self._grammars,
            is_alone=self._ranks.size == 1,
            classify=getattr(model, "classify", None),
            speech=SpeechTokens.read(ModelFacts.read(Path(config.model_path))) if has_sources(model) else None,
            watermark=config.watermark,
        )
        batches = BatchBuilder(table, config.block_size, self._platform.device, state_tables)
        self._proposer.open(ProposerContext(table, sampler.settings))
        drafting = Drafting(table, self._proposer)
        self._inputs = self._open_inputs(model, table)
        step_sampler: StepSampler = sampler
        if not stages.is_last:
            step_sampler = self._outputs = StageOutputs(stages, table, sampler)
        layers = [*attention_layers(model).values(), *encoding_layers(model)]
        backend = next((layer.backend for layer in layers), None)
        if type(self._inputs) is TokenInputs and step_sampler is sampler and not drafting.is_on:
            self._decoding = RecordedDecoding.of(model, table, config.block_size, config.burst_times)
        computation = StepComputation(
            model,
            backend,
            table,
            step_sampler,
            batches,
            drafting,
            self._platform,
            self._inputs,
            self._times,
            self._decoding.next_tokens if self._decoding is not None else None,
        )
        isolation = StepIsolation(
            computation, table, self._platform, config.block_size, self._patience(), most_ahead=stages.size
        )
        if isinstance(self._inputs, StageInputs):
            self._inputs.open(isolation)
        followers: list[RowFollower] = [sampler, self._inputs]
        members: list[StepMember] = [sampler, self._inputs]
        if drafting.is_on:
            followers.append(self._proposer)
            members.append(drafting)
        if drafting.is_on and stages.size > 1:
            members.append(StageAnswer(table))
        if self._outputs is not None:
            members.append(self._outputs)
        if not isinstance(self._connector, NoWorkerHalf):
            self._transfers = transfers_with(self._connector, isolation, is_stage=stages.size > 1)
            members.append(self._transfers)
        if self._adapters is not None:
            members.append(AdapterMember(self._adapters, table, isolation))
        return ModelRunner(table, cache, isolation, followers, members)

    def _open_inputs(
        self, model: nn.Module, table: RowTable
    ) -> TokenInputs | ImageRows | SourceRows | EncoderRows | StageInputs:
        """What the model reads in a step: tokens, or what an encoder or another stage makes of them."""
        config = self._config
        device = self._platform.device
        layers = list(attention_layers(model).values())
        encoding = encoding_layers(model)
        inputs: TokenInputs | ImageRows | SourceRows | EncoderRows = TokenInputs()
        if _takes_images(model) or config.enable_prompt_embeds:
            inputs = ImageRows(model, device, config.encoder_cache_bytes, layers)
        if has_sources(model):
            inputs = SourceRows(model, layers, table.num_rows, device, config.encoder_cache_bytes)
        if encoding:
            inputs = EncoderRows(encoding, config.max_num_seqs, device)
        return inputs if self._ranks.stages.is_first else StageInputs(self._ranks.stages, table, inputs)

    def execute(self, scheduled: SchedulerOutput, answers: Sequence[StepOutput] = ()) -> StepOutput:
        """One step. `answers`: what the last stage said to earlier ones, for a stage that is not the last."""
        runner = self._ready_runner()
        if self._outputs is not None:
            for answer in answers:
                self._outputs.settle(answer)
                self._counters["num_sampled_tokens"] += len(answer.token_ids)
        output = runner.step(scheduled)
        self._counters["num_steps"] += 1
        # a step may bring more tokens than it was granted
        self._counters["num_tokens"] += max(scheduled.num_scheduled_tokens, len(output.rows))
        self._counters["num_sampled_tokens"] += len(output.token_ids)
        self._counters["num_failures"] += len(output.failures)
        return output

    def keep(self, blocks: Mapping[bytes, bytes]) -> None:
        """What all stages of a pipeline have spilled in a step, by name. From any thread."""
        assert isinstance(self._transfers, StageTransfers)
        self._transfers.keep(blocks)

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
            "num_graph_replays_total": 0 if self._graphs is None else self._graphs.num_replays,
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
            stop_moving(self._model)
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._outputs = None
        self._proposer = NoProposer()
        self._connector = NoWorkerHalf()
        self._transfers = None
        self._grammars.close()
        self._adapters = None
        self._graphs = None
        self._decoding = None
        self._model = None

    def _open_adapters(self, model: nn.Module) -> Adapters | None:
        """Slots in the model's layers, before anything is measured: what they take is no room for the cache."""
        config = self._config
        if not config.max_loras:
            return None
        dtype = self._platform.dtype(config.dtype)
        slot_bytes = attach(model, config.max_loras, config.max_lora_rank, dtype)
        whole = None
        if self._ranks.stages.size > 1:
            with among(replace(self._ranks, stages=StageGroup())):
                whole = plan_of_model(config)
        adapters = Adapters(model, config.max_loras, config.max_lora_rank, dtype, slot_bytes, whole)
        self._controls |= {
            "load_adapter": adapters.load,
            "adapter_state": adapters.state,
            "await_adapter": adapters.wait,
            "evict_adapter": adapters.evict,
            "drop_adapter": adapters.drop,
        }
        return adapters

    def _set_aside(self, model: nn.Module) -> tuple[dict[str, int], int]:
        """(of the device, by what for; of the host) that will be taken later: a CPU commits slots of adapters when they
        are filled, and has one memory for all."""
        needs: dict[str, int] = {}
        slots = 0
        if self._adapters is not None:
            slots, in_memory = self._adapters.most_bytes(self._config.max_cpu_loras)
            needs["adapters (max_loras, max_cpu_loras)"] = in_memory
        if _takes_images(model) or has_sources(model):
            # of each worker, and of whoever serves
            needs["images, sounds and texts that are encoded"] = MOST_OPEN_BYTES * (2 if self._config.rank == 0 else 1)
        elif self._config.enable_prompt_embeds:
            needs["vectors of requests"] = MOST_OPEN_BYTES * (2 if self._config.rank == 0 else 1)
        total = sum(needs.values())
        if self._platform.name != "cpu":
            return {}, total
        if slots:
            needs["slots of adapters"] = slots
        return needs, total + slots

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
        settle(self._loaded_model())
        num_weights = update.apply()
        self._inputs.weights_changed()
        if self._graphs is not None:
            # Weights that were packed anew lie elsewhere.
            self._graphs.capture()
        return num_weights

    def _resident_memory(self) -> dict[str, float]:
        """On a CPU: of the cache and of this process, what is in memory."""
        cache = self._ready_runner().cache
        return {
            "kv_cache_bytes": cache.num_bytes,
            "kv_cache_resident_bytes": cache.num_resident_bytes,
            "resident_bytes": resident_bytes_of_process(),
        }

    def _step_times(self) -> dict[str, float]:
        """Of steps so far; what is sent to a device all workers of a process send together."""
        return {**self._times.statistics(), "step_bytes_device_total": SENT_TO_DEVICE.num_bytes}

    def _patience(self) -> Patience:
        """Endless where ranks would have to lose a step together."""
        seconds = _PATIENCE_SECONDS if self._platform.name == "cpu" else _PATIENCE_SECONDS_OF_A_DEVICE
        return Patience(math.inf if self._ranks.size > 1 else seconds, self._seconds_per_token)

    def _watch_arrivals(self, descriptor: int) -> None:
        """Steps in which rows get several tokens end when something can be read there."""
        if self._decoding is not None:
            self._decoding.watch_arrivals(descriptor)

    def _measure_swap(self) -> float:
        """Seconds per block and direction; 0.0 without swap space."""
        return self._ready_runner().cache.swap_arena.measure(self._platform.synchronize)

    def _measure_speculation(self) -> dict[str, float] | None:
        """Seconds per step and per token, of the model and of a pass of the proposer; no row or cache is touched. None
        of a stage that does not draft: steps wait for the one that does."""
        if not self._ranks.stages.is_last:
            return None
        model = self._loaded_model()
        most_tokens = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        costs = measure_costs(model, self._proposer, self._platform, most_tokens, self._ranks.agree)
        forget_expert_tokens(model)
        return costs

    def _check_invariants(self) -> None:
        self._ready_runner().table.check_invariants()

    def _graph_device(self, model: nn.Module) -> GraphDevice | None:
        """What captures the steps of this model, if they can be graphs and nobody asked for something else."""
        device = None if self._config.enforce_eager else self._platform.graph_device()
        if device is None:
            return None
        reason = why_no_graphs(model)
        if self._ranks.stages.size > 1:
            reason = "it is one of several stages"
        elif hands_on_inner_states(model):
            reason = "something that drafts looks into its layers"
        if reason is None:
            return device
        logger.warning("steps of one token are no graphs, because %s", reason)
        return None

    def _compile(self, model: nn.Module) -> bool:
        """Whether the forward pass is compiled from now on: where that was asked for, or pays and nobody said no."""
        config = self._config
        is_asked = config.compile
        if is_asked is None:
            is_asked = (
                self._platform.gains_from_compiling
                and not config.enforce_eager
                # a compiler orders sums as it likes, and steps with images are not compiled
                and not triton.has_fixed_order()
                and self._ranks.stages.size == 1
            )
        if not is_asked:
            return False
        try:
            if hands_on_inner_states(model) or not any(model is one for one in self._proposer.recordable(model)):
                raise CannotCompileError("something that drafts looks into its layers")
            compile_model(
                model, config.max_num_batched_tokens, self._platform.device, has_adapters=self._adapters is not None
            )
        except CannotCompileError as error:
            if config.compile:
                raise OptionError(f"compile: not for {type(model).__name__}: {error}. Use compile=False.") from error
            logger.warning("the forward pass is not compiled: %s", error)
            return False
        return True

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
    """That of the model's own head, or of an encoder; models that come with another library check ids themselves."""
    heads = [module.vocab_size for module in model.modules() if isinstance(module, LMHead)]
    embeddings = [module.num_rows for module in model.modules() if isinstance(module, VocabEmbedding)]
    return [*heads, *embeddings][:1]


def _takes_images(model: nn.Module) -> bool:
    return bool(getattr(model, "takes_images", False))


def _window_of(layers: list[Attention]) -> int:
    """How many tokens at least one of them looks back; 0: at all."""
    windows = [layer.sliding_window for layer in layers]
    return 0 if 0 in windows else max(windows, default=0)
