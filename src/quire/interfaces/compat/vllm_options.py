"""vLLM's options, as far as ours have other names or none.

A row says one of three things: the name of ours that means the same; that there is nothing to set here, and why; or
that it cannot be had, and why. What has the same name and the same values on both sides has no row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_ON = "true"
_OFF = "false"


@dataclass(frozen=True)
class VllmOption:
    """One name. `takes`: values behind its flag, 0 for a switch, None for as many as are there."""

    name: str
    # an option of the engine or of the server; "": there is none
    ours: str = ""
    # what is different, why there is nothing to set, or why it is refused
    note: str = ""
    takes: int | None = 1
    # what the option of ours is set to by a switch, where that is no switch
    sets: str = ""
    # of an option of ours that is an object, the key that this one is
    key: str = ""
    # where there is no option of ours: values that are taken, and change nothing; None: all
    accepted: Collection[str] | None = None
    # other spellings of the flag
    short: tuple[str, ...] = ()
    is_refused: bool = False
    # of one that is an object: keys that ask for what cannot be had, unless they are false, and what to do
    refused_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _same(name: str, ours: str, note: str = "", *, takes: int | None = 1, short: tuple[str, ...] = ()) -> VllmOption:
    return VllmOption(name, ours, note, takes, short=short)


def _nothing(note: str, *names: str, only: Collection[str] | None = None, takes: int | None = 1) -> list[VllmOption]:
    """`only`: other values are refused, for the same reason."""
    return [VllmOption(name, note=note, takes=takes, accepted=only) for name in names]


def _switches(note: str, *names: str, only: str | None = None) -> list[VllmOption]:
    """`only`: the position that is as it is here; the other one is refused."""
    return [VllmOption(name, note=note, takes=0, accepted=None if only is None else (only,)) for name in names]


def _refused(note: str, *names: str, unless: Collection[str] = (), takes: int | None = 1) -> list[VllmOption]:
    """`unless`: values that ask for nothing."""
    accepted = (*unless, "none", "", "{}", "[]", *((_OFF,) if takes == 0 else ()))
    return [VllmOption(name, note=note, takes=takes, accepted=accepted, is_refused=True) for name in names]


_DECIDES = "the server decides it by the hardware and the model, and says so at the start"
_KERNELS = "kernels are chosen by the hardware; attention_backend and enforce_eager are the two that can be set"
_NO_MEDIA = "how media are cut is decided by the model's own files; of videos media_io_kwargs chooses frames"
_MACHINES = "workers on several machines are placed by Ray: distributed_executor_backend=ray (docs/distributed.md)"
_NO_CODE = "classes of vLLM's cannot run here; docs/scheduler.md, docs/sampling.md and docs/tools.md say what can"
_PROXY = "put a proxy in front of the server (docs/security.md)"

# of what says no by itself
_OF_REFUSED = (
    "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold",
    "ubatch_size",
    "eplb_config",
    "elastic_ep_max_dp_size",
    "kv_offloading_backend",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "video_pruning_method",
    "fingerprint_value",
)

_OF_REQUESTS = {
    name: f"a request says it: structured_outputs.{name}"
    for name in ("disable_any_whitespace", "disable_additional_properties")
}

OPTIONS: tuple[VllmOption, ...] = (
    # ---- the same under another name
    _same("device_memory_utilization", "gpu_memory_utilization"),
    _same("max_num_active_seqs", "max_num_seqs"),
    _same("max_num_scheduled_tokens", "max_num_batched_tokens"),
    _same("max_num_queued_reqs", "max_num_queued_requests", "sequences are counted, and more are refused with 429"),
    _same("otlp_traces_endpoint", "otlp_endpoint", "traces go over HTTP, not over gRPC"),
    _same("enable_force_include_usage", "force_include_usage", takes=0),
    _same("enable_tokenizer_info_endpoint", "tokenizer_info", takes=0),
    _same("allowed_origins", "allowed_origins", "as a JSON list, or one flag --allowed-origin for each"),
    _same("decode_context_parallel_size", "context_parallel_size", short=("-dcp",)),
    _same("tensor_parallel_size", "tensor_parallel_size", short=("-tp",)),
    _same("pipeline_parallel_size", "pipeline_parallel_size", short=("-pp",)),
    _same("data_parallel_size", "data_parallel_size", "one front for all copies", short=("-dp",)),
    _same("enable_expert_parallel", "enable_expert_parallel", takes=0, short=("-ep",)),
    _same("quantization", "quantization", "made while loading; docs/quantization.md has the schemes", short=("-q",)),
    _same("api_server_count", "api_server_count", short=("-asc",)),
    # argparse takes a beginning for the whole, and this one stands in scripts
    _same("lora_modules", "lora_modules", takes=None, short=("--lora-module",)),
    VllmOption("skip_tokenizer_init", "tokenizer", "as --tokenizer none", takes=0, sets="none"),
    _same("override_generation_config", "generation_config", "an object stands in place of a word"),
    VllmOption(
        "language_model_only",
        "limit_mm_per_prompt",
        "no images and videos are taken",
        takes=0,
        sets='{"image": 0, "video": 0}',
    ),
    VllmOption("spec_method", "speculative_config", "its method", key="method"),
    VllmOption("spec_model", "speculative_config", "its model", key="model"),
    VllmOption("spec_tokens", "speculative_config", "its num_speculative_tokens", key="num_speculative_tokens"),
    VllmOption("rope_theta", "hf_overrides", "its rope_theta", key="rope_theta"),
    VllmOption("rope_scaling", "hf_overrides", "its rope_scaling", key="rope_scaling"),
    VllmOption("speculative_model", "speculative_config", "its model", key="model"),
    VllmOption("num_speculative_tokens", "speculative_config", "its key of this name", key="num_speculative_tokens"),
    VllmOption("ngram_prompt_lookup_max", "speculative_config", "its prompt_lookup_max", key="prompt_lookup_max"),
    VllmOption("ngram_prompt_lookup_min", "speculative_config", "its prompt_lookup_min", key="prompt_lookup_min"),
    # ---- nothing to set
    *_switches("prompts are always computed in chunks that fit the token budget", "enable_chunked_prefill", only=_ON),
    *_switches("tools are called whenever a request brings them", "enable_auto_tool_choice"),
    *_switches(
        "counters are always there, at /metrics; LLM(disable_log_stats=False) gives outputs their metrics",
        "disable_log_stats",
    ),
    *_switches(
        "requests are logged as log_level says",
        "disable_log_requests",
        "enable_log_requests",
        "enable_log_outputs",
        "enable_log_deltas",
        "disable_uvicorn_access_log",
        "enable_logging_iteration_details",
        "aggregate_engine_logging",
        "log_error_stack",
    ),
    *_nothing("the log is one stream on stderr", "disable_access_log_for_endpoints", "max_log_len"),
    *_nothing("it is said by log_level", "uvicorn_log_level"),
    *_switches("any engine can sleep: /sleep, sleep() of quire.vllm.LLM", "enable_sleep_mode"),
    *_switches("usage always has them", "enable_prompt_tokens_details", only=_ON),
    *_switches("GET /load, /metrics and /v1/observe have the load", "enable_server_load_tracking"),
    *_switches("with tool_choice none the prompt has no tools", "exclude_tools_when_tool_choice_none", only=_ON),
    *_nothing("the marks of thoughts are those of reasoning_parser", "reasoning_config"),
    *_switches("metrics are always all there", "kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics"),
    *_nothing("metrics are always all there", "show_hidden_metrics_for_version", "kv_cache_metrics_sample"),
    *_nothing("a model's kind is found in its files", "runner", only=("auto", "generate", "pooling")),
    *_nothing("a model's kind is found in its files", "convert", only=("auto", "none", "embed", "classify", "reward")),
    *_nothing(
        "a model's kind is found in its files",
        "task",
        only=("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    ),
    VllmOption("structured_outputs_config", note="forms are followed by an engine of ours", refused_keys=_OF_REQUESTS),
    *_nothing("forms are followed by an engine of ours", "guided_decoding_backend"),
    *_nothing("the format of messages is found in the chat template", "chat_template_content_format"),
    *_nothing("there is one tokenizer for a model", "tokenizer_mode", only=("auto", "hf", "slow", "fast", "mistral")),
    *_nothing("files are found by themselves", "config_format", only=("auto", "hf", "mistral")),
    *_nothing("HF_HOME in the environment says where fetched models lie", "download_dir"),
    VllmOption("optimization_level", note=_DECIDES, short=("-O",)),
    VllmOption("compilation_config", note=_DECIDES, short=("-cc",)),
    *_nothing(
        _DECIDES,
        "performance_mode",
        "jit_monitor_mode",
        "max_parallel_loading_workers",
        "safetensors_load_strategy",
        "cpu_distributed_timeout_seconds",
        "distributed_timeout_seconds",
        "max_cudagraph_capture_size",
        "prefix_caching_hash_algo",
        "renderer_num_workers",
        "stream_interval",
        "lora_dtype",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_hasher_algorithm",
    ),
    *_nothing(_DECIDES, "cudagraph_capture_sizes", takes=None),
    *_switches(
        _DECIDES,
        "enable_flashinfer_autotune",
        "use_tqdm_on_load",
        "jit_monitor_verbose",
        "disable_custom_all_reduce",
        "disable_cascade_attn",
        "disable_hybrid_kv_cache_manager",
        "disable_chunked_mm_input",
        "numa_bind",
        "enable_cumem_allocator",
        "skip_mm_profiling",
        "specialize_active_lora",
        "fully_sharded_loras",
        "enable_shm_tensor_arena",
        "scheduler_reserve_full_isl",
        "enable_batch_sharded_sampling",
        "enable_mamba_shared_prefix_checkpoint",
        "enable_ep_weight_filter",
        "enable_nccl_comm_suspend",
        "disable_nccl_for_dp_synchronization",
        "use_fp64_gumbel",
        "monokernel",
        "use_replayssm",
        "dcp_q_replicate",
        "swa_bounded_replay",
        "disable_frontend_multiprocessing",
        "ray_workers_use_nsight",
        "sleep_mode_offload_cudagraph",
        "interleave_mm_strings",
    ),
    *_nothing(
        _DECIDES,
        "model_loader_extra_config",
        "ignore_patterns",
        "pt_load_map_location",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "mamba_block_size",
        "mamba_cache_mode",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_ssu_algorithm",
        "replayssm_buffer_len",
        "prefill_schedule_interval",
        "prefix_cache_retention_interval",
        "prefix_match_unit",
        "cp_kv_cache_interleave_size",
        "dcp_kv_cache_interleave_size",
        "dcp_comm_backend",
        "dp_sync_interval",
        "mm_encoder_tp_mode",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_device",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "sleep_mode_backend",
        "watchdog_config",
    ),
    *_nothing("it belongs to a wish that is refused", *_OF_REFUSED),
    *_nothing(
        "it is for a kind of hardware or plug-in that has nothing to say here", "additional_config", only=("{}",)
    ),
    *_switches("traces have all stages", "enable_layerwise_nvtx_tracing"),
    *_nothing("traces have all stages", "collect_detailed_traces"),
    *_switches("the counts of drafts are in usage", "per_request_spec_decode_metrics"),
    *_switches("certificates are read again when they change", "enable_ssl_refresh"),
    *_switches(
        "/docs and /openapi.json are always there, and hold no data", "disable_fastapi_docs", "enable_offline_docs"
    ),
    *_switches("environment variables of vLLM have no meaning here", "fail_on_environ_validation"),
    *_switches("an engine that dies is started again", "enable_fault_tolerance"),
    *_nothing("an engine that dies is started again", "fault_tolerance_config"),
    # of older versions, as they still stand in what people have written down
    *_switches("reasoning_parser alone says it", "enable_reasoning"),
    *_switches(
        "it was withdrawn from vLLM as well",
        "use_v2_block_manager",
        "multi_step_stream_outputs",
        "disable_async_output_proc",
        "calculate_kv_scales",
    ),
    *_nothing(
        "it was withdrawn from vLLM as well",
        "num_scheduler_steps",
        "max_seq_len_to_capture",
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "lora_extra_vocab_size",
        "num_lookahead_slots",
    ),
    *_nothing(
        _KERNELS,
        "attention_config",
        "kernel_config",
        "moe_backend",
        "linear_backend",
        "mamba_backend",
        "all2all_backend",
        "mm_encoder_attn_backend",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "kda_decode_backend",
        "sparse_indexer_topk_backend",
        "ir_op_priority",
    ),
    *_switches("experts stay where they are loaded", "enable_eplb", only=_OFF),
    *_nothing("ids are given by the server", "fingerprint_mode"),
    *_nothing("a head of any usual size is taken", "h11_max_incomplete_event_size", "h11_max_header_count"),
    *_nothing("all methods and headers are allowed where the origin is", "allowed_methods", "allowed_headers"),
    *_switches("the folder of a model brings its own files", "allow_deprecated_quantization"),
    *_nothing("the answers' role is assistant", "response_role", only=("assistant",)),
    *_nothing("log-probabilities are those of the model's own distribution", "logprobs_mode", only=("raw_logprobs",)),
    # ---- refused
    *_refused(
        "config.json is the model's own; hf_overrides lays other values over it",
        "hf_config_path",
        "model_class_overrides",
    ),
    *_refused("windows are those of the model's files", "disable_sliding_window", takes=0),
    *_refused("set HF_TOKEN in the environment", "hf_token"),
    *_refused("revision is that of all files of a model", "code_revision", "tokenizer_revision"),
    *_refused("only a proxy can set it", "ssl_ca_certs", "ssl_ciphers"),
    *_refused("clients prove who they are by keys", "ssl_cert_reqs", unless=("0",)),
    *_refused(_PROXY, "middleware", "grpc_port"),
    *_refused("cookies are never taken", "allow_credentials", takes=0),
    *_refused("a silent stream gets a comment every 15 seconds", "sse_keep_alive_interval", unless=("0", "15")),
    *_refused("adapters are taken whole", "lora_target_modules", "default_mm_loras", takes=None),
    *_refused("of images only their pixels are taken", "enable_mm_embeds", takes=0),
    *_refused(
        "weights stay where they are loaded; quantization makes them smaller",
        "cpu_offload_gb",
        "cpu_offload_params",
        "offload_backend",
        "offload_params",
        unless=("0", "0.0", "auto"),
    ),
    *_refused("kv_store=host keeps blocks in memory (docs/kv-tiers.md)", "kv_offloading_size"),
    *_refused("kv_store moves and keeps blocks, role divides servers (docs/disaggregation.md)", "kv_transfer_config"),
    *_refused(
        _NO_CODE,
        "scheduler_cls",
        "worker_cls",
        "worker_extension_cls",
        "tool_parser_plugin",
        "reasoning_parser_plugin",
        "io_processor_plugin",
        takes=None,
    ),
    *_refused(
        "classes of vLLM's run in quire.vllm.LLM; a server's processors are installed (docs/sampling.md)",
        "logits_processors",
        takes=None,
    ),
    *_refused(
        _MACHINES,
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "data_parallel_address",
        "data_parallel_backend",
        "data_parallel_rpc_port",
        "data_parallel_size_local",
        "data_parallel_rank",
        "data_parallel_start_rank",
        unless=("1", "0", "mp"),
    ),
    *_refused(
        "a copy of the engine is chosen by the front: routing_policy",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb",
        takes=0,
    ),
    *_refused(
        "it is not built",
        "enable_dbo",
        "enable_elastic_ep",
        "enable_return_routed_experts",
        "enable_hc_sp",
        "kv_sharing_fast_prefill",
        "enable_trace_replay",
        "return_sampling_mask",
        "headless",
        "grpc",
        "tokens_only",
        "enable_scale_out",
        "enable_flash_late_interaction",
        "enable_mamba_cache_stochastic_rounding",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
        "mm_encoder_only",
        "long_prefill_token_threshold_adaptive",
        "sleep_preserve_parameter_names",
        "enable_prompt_adapter",
        takes=0,
    ),
    *_refused(
        "it is not built",
        "diffusion_config",
        "engram_config",
        "aux_output_config",
        "ec_manager_config",
        "ec_transfer_config",
        "prefill_context_parallel_size",
        "reasoning_effort_map",
        "custom_histogram_buckets",
        "kv_cache_dtype_skip_layers",
        "max_lora_cls_labels",
        "mamba_cache_philox_rounds",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin",
        "cohere_format",
        unless=("1", "0"),
    ),
    *_refused("experts stay where they are loaded", "expert_placement_strategy", unless=("linear",)),
    *_refused("set CUDA_VISIBLE_DEVICES in the environment", "device_ids"),
    *_refused("quantization has the schemes (docs/quantization.md)", "quantization_config"),
    *_refused("calls follow the forms of their tools where a request says strict", "tool_strict_level"),
    *_refused("none turns thinking off", "anthropic_disabled_thinking_effort", unless=("auto", "none")),
    *_refused("requests bring no settings of the processor", "trust_request_mm_kwargs", takes=0),
    *_refused("pixels are scaled as the model's files say", "mm_device_do_normalize", takes=0),
    *_refused("the model's own template decides it", "cohere_is_reasoning_model", takes=0),
    *_refused(
        "whole servers behind one front are watched by it: quire route (docs/disaggregation.md)",
        "data_parallel_supervisor_port",
        "dp_supervisor_probe_failure_threshold",
        "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s",
    ),
    *_refused("blocks are kept free by what running requests need", "watermark", unless=("0", "0.0")),
    *_refused("there are no tools in the server; the client calls them", "tool_server"),
    *_refused(_NO_MEDIA, "mm_processor_kwargs", "video_pruning_rate"),
    *_refused("the pooling of a model's own files is taken", "pooler_config", "override_pooler_config"),
    *_refused("/v1/admin/update_weights takes weights from weights_root", "weight_transfer_config"),
    *_refused("the log is one stream on stderr", "log_config_file", "logging_config"),
    *_refused("quire trace saves what the engine did lately (docs/observability.md)", "profiler_config"),
)

# of objects that have the same name here: keys that ask for what is so anyway, with the values that do; None: all do
NEUTRAL_KEYS: Mapping[str, Mapping[str, tuple[object, ...] | None]] = {
    "speculative_config": {
        "draft_tensor_parallel_size": (1, None),
        "disable_by_batch_size": None,
        "disable_padded_drafter_batch": None,
        "enforce_eager": None,
        "parallel_drafting": (False, None),
    },
}

# ---- values of options that have the same name here

_THINK = (
    "qwen3",
    "glm45",
    "glm47",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v4",
    "minimax_m2",
    "olmo3",
    "step3",
    "step3p5",
    "nemotron_v3",
    "holo2",
    "mimo",
)
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "model_impl": {"vllm": "native"},
    "load_format": {
        "hf": "safetensors", "mistral": "auto", "fastsafetensors": "safetensors", "runai_streamer": "safetensors",
    },
    "max_model_len": {"-1": "auto"},
    "generation_config": {"vllm": "none"},
    "reasoning_parser": {
        **dict.fromkeys(_THINK, "think"), "cohere_command3": "cohere", "cohere_command4": "cohere",
        "step5": "deepseek_r1", "hf": "auto",
    },
    "tool_call_parser": {
        "deepseek_v31": "deepseek_v3", "cohere_command3": "cohere", "cohere_command4": "cohere", "glm47": "glm45",
        "granite4": "hermes", "hunyuan_a13b": "jamba", "qwen3_json": "hermes", "qwen3_xml": "qwen3_coder",
        "mimo": "qwen3_coder", "step3p5": "qwen3_coder", "step5": "qwen3_coder", "ernie45": "hermes",
        "ling3": "glm45", "poolside_v1": "glm45", "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic", "hf": "auto",
    },
}  # fmt: skip
