"""From what a user said to one frozen configuration, and a table of every value with its reason."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quire.config.arithmetic import has_experts
from quire.config.engine_config import (
    SLICES_OF_A_SUM,
    TIERED,
    BurstTimes,
    EngineConfig,
    KVConnectorConfig,
    WorkerConfig,
)
from quire.config.engine_options import EngineOptions
from quire.config.executor_backend import resolve_executor_backend
from quire.config.generation_config import NONE, with_recommended
from quire.config.image_sizes import ImageSizes
from quire.config.images import ImageConfig, resolve_images
from quire.config.kv_events import resolve_kv_events
from quire.config.kv_store import resolve_kv_connector, shared_key
from quire.config.lora import num_slots, resolve_lora_modules, resolve_max_cpu_loras
from quire.config.model_facts import ModelFacts
from quire.config.model_names import names_of_model
from quire.config.model_source import locate
from quire.config.option import checked, options_of
from quire.config.overrides import keys_added_by, overridden
from quire.config.processors import processors
from quire.config.quantization import resolve_quantization
from quire.config.rank_grid import RankGrid
from quire.config.speculation import SpeculationConfig, resolve_speculation
from quire.config.watermark import Watermark
from quire.config.weights_fingerprint import weights_fingerprint
from quire.errors import CapacityError, OptionError

_FALLBACK_LENGTH = 2048
# Seconds of tokens that come together where nobody reads them before the last. Whoever comes meanwhile ends that.
_WHOLE_BURST = 0.2
_SMALL_MODEL_BYTES = 48 * 2**20
_DTYPES = ("float32", "bfloat16", "float16")
# Options of what is kept of a token, and of what comes after it.
_NOTHING_KEPT = (
    "kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "pinned_prefixes", "swap_space",
    "swap_directory", "speculative_config", "kv_connector", "kv_store", "long_prefill_token_threshold",
    "context_parallel_size", "pipeline_parallel_size",
)  # fmt: skip


@dataclasses.dataclass
class Reasons:
    """Name, value and reason of every option, in the order of declaration."""

    rows: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)

    def add(self, name: str, value: object, reason: str) -> None:
        self.rows.append((name, str(value), reason))

    def table(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}  ({reason})" for name, value, reason in self.rows)


def resolve(options: EngineOptions) -> tuple[EngineConfig, Reasons]:
    """Checks every value, finds the model and decides what was left open."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    options = EngineOptions(**checked(EngineOptions, values))
    found = locate(options.model, options.revision, load_format=options.load_format)
    path = overridden(found, options.hf_overrides)
    facts = with_recommended(ModelFacts.read(path), options.generation_config)
    options, decisions = _decide(options, facts)
    _check_together(options, facts, decisions)
    worker = _worker_config(options, facts, decisions, keys_added_by(found, options.hf_overrides))
    own_names = names_of_model(options.model, found, facts.hf_config)
    return _engine_config(options, facts, decisions, worker, own_names), _reasons(options, decisions.reasons)


@dataclasses.dataclass(frozen=True)
class _Decisions:
    """What was left open, or follows from several options."""

    device: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str | None
    max_model_len: int
    grid: RankGrid
    executor_backend: str
    num_threads: int
    # workers on this machine
    num_workers: int
    swap_space_bytes: int | None
    speculation: SpeculationConfig | None
    connector: KVConnectorConfig | None
    lora_modules: tuple[tuple[str, str], ...]
    max_cpu_loras: int
    images: ImageConfig
    # value and reason, by the name of the option
    reasons: dict[str, tuple[object, str]]

    @property
    def connector_name(self) -> str | None:
        return None if self.connector is None else self.connector.name


def _decide(options: EngineOptions, facts: ModelFacts) -> tuple[EngineOptions, _Decisions]:
    """The options are others for an encoder, which keeps nothing of a token."""
    decided: dict[str, tuple[object, str]] = {}
    device, decided["device"] = _device(options)
    dtype, decided["dtype"] = _dtype(options, facts, device)
    quantization, decided["quantization"] = resolve_quantization(options.quantization, facts.hf_config)
    kv_cache_dtype, decided["kv_cache_dtype"] = _kv_cache_dtype(options, dtype)
    length, decided["max_model_len"] = _max_model_len(options, facts)
    if facts.sees_all:
        options = _of_encoder(options, length, decided)
    grid = _grid(options)
    backend, decided["distributed_executor_backend"] = resolve_executor_backend(
        options, grid.size, facts.num_weight_bytes
    )
    # those of this machine; Ray puts workers that share layers on one, if it can
    num_here = grid.tensor * grid.context if backend == "ray" else grid.size
    num_workers = num_here * options.data_parallel_size
    threads, decided["num_threads"] = _num_threads(options, facts, num_workers)
    swap_space, decided["swap_space"] = _swap_space(options)
    speculation, decided["speculative_config"] = resolve_speculation(options.speculative_config)
    max_cpu_loras, decided["max_cpu_loras"] = resolve_max_cpu_loras(options)
    images, decided["max_num_encoder_tokens"] = resolve_images(options)
    return options, _Decisions(
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=length,
        grid=grid,
        executor_backend=backend,
        num_threads=threads,
        num_workers=num_workers,
        swap_space_bytes=swap_space,
        speculation=speculation,
        connector=resolve_kv_connector(options),
        lora_modules=resolve_lora_modules(options),
        max_cpu_loras=max_cpu_loras,
        images=images,
        reasons=decided,
    )


def _check_together(options: EngineOptions, facts: ModelFacts, decisions: _Decisions) -> None:
    """Raises OptionError for options of which each is right, and that do not go with others."""
    _check_ranks(options, decisions.grid, decisions.device, decisions.connector_name)
    _check_compile(options)
    _check_experts(options, facts)
    _check_replicas(options, decisions.device, decisions.connector_name)
    _check_swap_directory(options)
    _check_pinned_prefixes(options)
    _check_tenant_cache_share(options)
    _check_policy_options(options)


def _worker_config(
    options: EngineOptions, facts: ModelFacts, decisions: _Decisions, added_config_keys: tuple[str, ...]
) -> WorkerConfig:
    length = decisions.max_model_len
    threads = decisions.num_threads
    connector = decisions.connector
    speculation = decisions.speculation
    sizes = ImageSizes.read(facts.path, facts.hf_config)
    return WorkerConfig(
        model_path=str(facts.path),
        device=decisions.device,
        dtype=decisions.dtype,
        model_impl=options.model_impl,
        load_format=options.load_format,
        quantization=decisions.quantization,
        kv_cache_dtype=decisions.kv_cache_dtype,
        packed_weights_cache=int(options.packed_weights_cache * 2**30),
        trust_remote_code=options.trust_remote_code,
        max_model_len=length,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        gpu_memory_utilization=options.gpu_memory_utilization,
        attention_backend=options.attention_backend,
        num_threads=threads,
        processors=processors().pinned(threads * decisions.num_workers),
        compile=options.compile,
        enforce_eager=options.enforce_eager,
        seed=options.seed,
        grid=decisions.grid,
        burst_times=_burst_times(options, decisions),
        executor_backend=decisions.executor_backend,
        host_ip=options.host_ip,
        rank_invariant=options.rank_invariant,
        swap_directory=options.swap_directory,
        speculation=speculation,
        kv_connector=connector,
        weights_fingerprint=_fingerprint(options, facts, length, speculation) if connector is not None else "",
        max_loras=num_slots(options),
        max_cpu_loras=decisions.max_cpu_loras,
        max_lora_rank=options.max_lora_rank if options.enable_lora else 0,
        encoder_cache_bytes=options.encoder_cache_bytes,
        enable_prompt_embeds=options.enable_prompt_embeds,
        watermark=None if options.watermark_config is None else Watermark.of(options.watermark_config),
        largest_image=sizes.within(decisions.images.max_num_encoder_tokens).largest(length) if sizes else None,
        added_config_keys=added_config_keys,
    )


def _engine_config(
    options: EngineOptions, facts: ModelFacts, decisions: _Decisions, worker: WorkerConfig, own_names: tuple[str, ...]
) -> EngineConfig:
    connector = decisions.connector
    shares_blocks = connector is not None and connector.name == TIERED
    tokenizer = facts.path
    if options.tokenizer not in (None, "none"):
        tokenizer = locate(options.tokenizer, name="tokenizer")
    return EngineConfig(
        facts=facts,
        worker=worker,
        tokenizer_path=None if options.tokenizer == "none" else str(tokenizer),
        served_model_names=options.served_model_name or own_names[:1],
        further_model_names=() if options.served_model_name else own_names[1:],
        chat_template=options.chat_template,
        tool_call_parser=options.tool_call_parser,
        special_tokens_in_messages=options.special_tokens_in_messages,
        reasoning_parser=options.reasoning_parser,
        use_generation_config=options.generation_config != NONE,
        max_model_len=decisions.max_model_len,
        may_lower_max_model_len=options.max_model_len is None,
        max_logprobs=options.max_logprobs,
        seed=options.seed,
        block_size=options.block_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        num_blocks_override=options.num_gpu_blocks_override,
        enable_prefix_caching=options.enable_prefix_caching,
        tenant_cache_share=options.tenant_cache_share,
        state_checkpoint_interval=options.state_checkpoint_interval,
        state_checkpoint_share=options.state_checkpoint_share,
        pinned_prefixes=options.pinned_prefixes,
        preemption_mode=options.preemption_mode,
        swap_space_bytes=decisions.swap_space_bytes,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        scheduling_policy={"fcfs": "fifo"}.get(options.scheduling_policy, options.scheduling_policy),
        staging_size=options.staging_size,
        progress_share=options.progress_share,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        chunk_alignment=options.chunk_alignment,
        target_inter_token_latency=options.target_inter_token_latency,
        async_scheduling=options.async_scheduling,
        engine_process=options.engine_process,
        check_invariants=options.check_invariants,
        recorder_bytes=options.recorder_bytes,
        # the core may stand in another process
        record=None if options.record is None else str(Path(os.path.expanduser(options.record)).absolute()),
        record_bytes=options.record_bytes,
        record_redact=options.record_redact,
        speculation=decisions.speculation,
        kv_connector=connector,
        prefix_hash_key=shared_key("block names") if shares_blocks else b"",
        lora_modules=decisions.lora_modules,
        hooks=options.hooks,
        hook_timeout=options.hook_timeout,
        hook_on_failure=options.hook_on_failure,
        hook_process=options.hook_process,
        images=decisions.images,
        data_parallel_size=options.data_parallel_size,
        routing_policy=options.routing_policy,
        kv_events=resolve_kv_events(options.kv_events_config, enable_prefix_caching=options.enable_prefix_caching),
        role=options.role,
    )


def _reasons(options: EngineOptions, decided: dict[str, tuple[object, str]]) -> Reasons:
    reasons = Reasons()
    for name, declared in options_of(EngineOptions).items():
        value = getattr(options, name)
        if name in decided:
            reasons.add(name, *decided[name])
        else:
            reasons.add(name, value, "default" if value == declared.default else "as asked")
    return reasons


def _device(options: EngineOptions) -> tuple[str, tuple[object, str]]:
    if options.device != "auto":
        return options.device, (options.device, "as asked")
    # The driver's device file, so that the front end needs no torch to answer; the worker checks again.
    if Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") != "":
        return "cuda", ("cuda", "an NVIDIA driver is here")
    # An AMD driver alone says little: many processors have such a GPU inside.
    if Path("/dev/kfd").exists() and "rocm" in version("torch"):
        return "cuda", ("cuda", "an AMD driver is here, and a torch for it")
    return "cpu", ("cpu", "no GPU is here")


def _dtype(options: EngineOptions, facts: ModelFacts, device: str) -> tuple[str, tuple[object, str]]:
    if options.dtype != "auto":
        return options.dtype, (options.dtype, "as asked")
    stored = facts.dtype or "float32"
    if stored not in _DTYPES:
        raise OptionError(f"dtype=auto: config.json says {stored!r}. Give one of {', '.join(_DTYPES)}.")
    if stored == "float16" and device == "cpu":
        # CPUs multiply bfloat16 natively where they multiply float16 at all only by conversion
        return "bfloat16", ("bfloat16", "the checkpoint is float16, which is slow on a CPU")
    if stored == "float32" and device == "cuda":
        return "bfloat16", ("bfloat16", "the checkpoint is float32, which wastes a GPU")
    return stored, (stored, "as stored in the checkpoint")


def _kv_cache_dtype(options: EngineOptions, dtype: str) -> tuple[str, tuple[object, str]]:
    if options.kv_cache_dtype == "auto":
        return dtype, (dtype, "the type of the model")
    # the other eight-bit float has too few digits for keys and values
    chosen = options.kv_cache_dtype.removesuffix("_e4m3")
    return chosen, (chosen, "as asked")


def _max_model_len(options: EngineOptions, facts: ModelFacts) -> tuple[int, tuple[object, str]]:
    own = facts.max_model_len
    if options.max_model_len is None:
        if own is None:
            return _FALLBACK_LENGTH, (_FALLBACK_LENGTH, "config.json names no length")
        return own, (own, "the model's own length")
    if own is not None and options.max_model_len > own and not facts.has_any_length:
        raise CapacityError(
            f"max_model_len={options.max_model_len}: the model has positions for {own} tokens (config.json). "
            f"Lower max_model_len to {own}, or leave it out."
        )
    return options.max_model_len, (options.max_model_len, "as asked")


def _of_encoder(options: EngineOptions, max_model_len: int, decided: dict[str, tuple[object, str]]) -> EngineOptions:
    """A model whose requests are computed in one step, and of which nothing is kept."""
    declared = options_of(EngineOptions)
    for name in _NOTHING_KEPT:
        if getattr(options, name) != declared[name].default:
            raise OptionError(
                f"{name}={getattr(options, name)}: the tokens of this model see each other, so each request is "
                "computed in one step and nothing of it is kept. Leave it out."
            )
    for asked, is_asked in {
        "model_impl=transformers": options.model_impl == "transformers",
        "enable_lora": options.enable_lora,
    }.items():
        if is_asked:
            raise OptionError(f"{asked}: encoders have files of their own here, which take no adapters. Leave it out.")
    budget = options.max_num_batched_tokens
    if budget == declared["max_num_batched_tokens"].default and budget < max_model_len:
        budget = max_model_len
        decided["max_num_batched_tokens"] = (budget, "a request of the model's length, which is one step")
    decided["enable_prefix_caching"] = (False, "the tokens of a text see each other")
    return dataclasses.replace(options, enable_prefix_caching=False, max_num_batched_tokens=budget)


def _num_threads(options: EngineOptions, facts: ModelFacts, num_ranks: int) -> tuple[int, tuple[object, str]]:
    """Of a worker."""
    if options.num_threads is not None:
        return options.num_threads, (options.num_threads, "as asked")
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked), (asked, "OMP_NUM_THREADS")
    if 0 < facts.num_weight_bytes < _SMALL_MODEL_BYTES:
        # A step takes less time than two threads need to find each other on a busy machine.
        return 1, (1, f"the weights are small ({facts.num_weight_bytes / 2**20:.0f} MiB)")
    found = processors()
    if num_ranks == 1:
        return found.num_threads, (found.num_threads, found.reason)
    threads = max(1, found.num_threads // num_ranks)
    return threads, (threads, f"{found.reason}, shared by {num_ranks} workers")


def _swap_space(options: EngineOptions) -> tuple[int | None, tuple[object, str]]:
    """Bytes, or None: then the size is chosen when the KV cache and the free memory are known."""
    if options.preemption_mode == "recompute":
        return 0, (0, "preemption_mode=recompute swaps nothing")
    if options.swap_space is None:
        return None, (None, "chosen at start: as much as the KV cache, at most 4 GiB and a quarter of free memory")
    num_bytes = int(options.swap_space * 2**30)
    if num_bytes < _least_block_bytes(options) and options.preemption_mode == "swap":
        raise OptionError(
            f"preemption_mode=swap, swap_space={options.swap_space:g}: swapping needs room for at least one block of "
            f"{options.block_size} tokens, this is {num_bytes} bytes. "
            "Give swap_space in GiB, leave it out, or set preemption_mode=recompute."
        )
    return num_bytes, (options.swap_space, "as asked, in GiB")


def _least_block_bytes(options: EngineOptions) -> int:
    """Of any model: a key and a value of a byte each."""
    return 2 * options.block_size


def _fingerprint(
    options: EngineOptions, facts: ModelFacts, max_model_len: int, speculation: SpeculationConfig | None
) -> str:
    """Of all weights that write into the KV cache, and of how long sequences may be where that changes the keys."""
    own = weights_fingerprint(facts.path, load_format=options.load_format, seed=options.seed)
    if _has_two_sets_of_angles(facts.hf_config):
        own = f"{own} up to {max_model_len}"
    if speculation is None or speculation.model_path is None:
        return own
    return f"{own} {weights_fingerprint(Path(speculation.model_path), load_format='auto', seed=0)}"


def _has_two_sets_of_angles(hf_config: dict[str, Any]) -> bool:
    """longrope, once called su or yarn: one for short and one for long sequences, and a start chooses between them."""
    config = str(hf_config)
    return any(word in config for word in ("longrope", "'su'", "long_factor"))


def _burst_times(options: EngineOptions, decisions: _Decisions) -> BurstTimes:
    """Several ranks would each look at a clock of their own, and drafts bring several tokens a step themselves."""
    if not options.burst_time or decisions.grid.size > 1 or decisions.speculation is not None:
        return BurstTimes()
    streamed = min(options.burst_time, options.target_inter_token_latency or math.inf)
    return BurstTimes(streamed, max(streamed, _WHOLE_BURST))


def _grid(options: EngineOptions) -> RankGrid:
    return RankGrid(
        tensor=options.tensor_parallel_size,
        context=options.context_parallel_size,
        pipeline=options.pipeline_parallel_size,
        has_whole_experts=options.enable_expert_parallel,
    )


def _check_compile(options: EngineOptions) -> None:
    if options.compile and options.enforce_eager:
        raise OptionError(
            "compile and enforce_eager: the one makes code of the model, the other runs it operator by operator. Leave "
            "one of them out."
        )


def _check_ranks(options: EngineOptions, grid: RankGrid, device: str, connector_name: str | None) -> None:
    """What several workers cannot share yet."""
    if options.block_size % grid.context:
        raise OptionError(
            f"context_parallel_size={grid.context}: workers cannot share block_size={options.block_size} tokens of a "
            f"block evenly. Choose a block_size that is a multiple of {grid.context}."
        )
    size = options.tensor_parallel_size
    if options.rank_invariant and SLICES_OF_A_SUM % size:
        raise OptionError(
            f"rank_invariant: a sum has {SLICES_OF_A_SUM} parts, which {size} workers cannot share evenly. Choose a "
            "tensor_parallel_size of 1, 2, 4 or 8, or leave rank_invariant out."
        )
    if grid.size == 1:
        return
    refused = {
        f"device={device}": device != "cpu",
        # what adapters add is summed up in as many parts as there are workers
        "enable_lora and rank_invariant": options.enable_lora and options.rank_invariant,
        # the parts of a softmax are rounded before they are merged
        "context_parallel_size and rank_invariant": grid.context > 1 and options.rank_invariant,
        # others know no parts of blocks
        f"kv_connector={connector_name}": connector_name not in (None, TIERED),
        "compile": options.compile,
        "model_impl=transformers": options.model_impl == "transformers",
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise OptionError(
                f"{grid.size} workers that share a model cannot do this with {what} yet. Leave one of them "
                "out (docs/distributed.md)."
            )


def _check_experts(options: EngineOptions, facts: ModelFacts) -> None:
    if options.rank_invariant and has_experts(facts.hf_config):
        raise OptionError(
            f"rank_invariant: model_type={facts.model_type} has experts here, whose outputs several workers sum in "
            "another order than one worker does. Leave rank_invariant out: tokens may then differ with the number of "
            "workers where two are nearly equal."
        )
    reason = None
    if options.tensor_parallel_size == 1:
        reason = "tensor_parallel_size is 1. Give the number of workers"
    elif not has_experts(facts.hf_config):
        reason = f"model_type={facts.model_type} has none here. Take a mixture of experts"
    if options.enable_expert_parallel and reason is not None:
        raise OptionError(f"enable_expert_parallel: shares out experts among workers, and {reason}, or leave it out.")


def _check_replicas(options: EngineOptions, device: str, connector_name: str | None) -> None:
    """What several copies of the engine cannot do, or not yet."""
    size = options.data_parallel_size
    if size == 1:
        if options.routing_policy != "least_time":
            raise OptionError(
                f"routing_policy={options.routing_policy}: chooses between copies of the engine, and there is one. "
                "Leave it out, or give data_parallel_size."
            )
        return
    refused = {
        f"device={device}": device != "cpu",
        "engine_process=False": options.engine_process is False,
        f"kv_connector={connector_name}": connector_name not in (None, TIERED),
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise OptionError(
                f"data_parallel_size={size}: each copy is a process of its own on this machine's processors, which "
                f"cannot do this with {what} yet. Leave one of them out (docs/distributed.md)."
            )


def _check_swap_directory(options: EngineOptions) -> None:
    folder = options.swap_directory
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise OptionError(
            f"swap_directory={folder}: must be a folder that this program may write into, because the file of "
            "swapped blocks is made there. Create it, or leave swap_directory out to swap to memory."
        )
    if folder is not None and options.preemption_mode != "recompute" and options.swap_space != 0:
        num_free = shutil.disk_usage(folder).free
        if num_free < _least_block_bytes(options):
            raise OptionError(
                f"swap_directory={folder}: swapping needs room for at least one block, {num_free} bytes are free "
                "there. Make room, leave it out to swap to memory, or set preemption_mode=recompute."
            )


def _check_pinned_prefixes(options: EngineOptions) -> None:
    if options.pinned_prefixes is not None and not options.enable_prefix_caching:
        raise OptionError(
            f"pinned_prefixes={options.pinned_prefixes}: needs the prefix cache, because later prompts find a pinned "
            "prefix there. Leave out enable_prefix_caching=False or pinned_prefixes."
        )


def _check_tenant_cache_share(options: EngineOptions) -> None:
    if options.tenant_cache_share is not None and not options.enable_prefix_caching:
        raise OptionError(
            f"tenant_cache_share={options.tenant_cache_share}: needs the prefix cache, whose blocks it shares out. "
            "Leave out enable_prefix_caching=False or tenant_cache_share."
        )


def _check_policy_options(options: EngineOptions) -> None:
    declared = options_of(EngineOptions)
    for name in ("staging_size", "progress_share"):
        value = getattr(options, name)
        if options.scheduling_policy not in ("two_level", "bounded_srtf") and value != declared[name].default:
            raise OptionError(
                f"{name}={value}: only two_level and bounded_srtf have it, and scheduling_policy is "
                f"{options.scheduling_policy}. Leave {name} out, or choose one of these."
            )
