"""Every option of the engine, declared once. Names that people type for vLLM are kept where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.option import option

EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may say about the engine; None means that Quire decides and says why."""

    # model
    model: str = option(
        EMBEDDED, "directory, GGUF file, hub name, or 'embedded' for the model in the package", section="model"
    )
    tokenizer: str | None = option(
        None,
        "directory or hub name of another tokenizer than the model's; none: tokens go in and come out, and no text",
        section="model",
    )
    revision: str | None = option(None, "branch, tag or commit on the hub", section="model")
    served_model_name: tuple[str, ...] = option(
        (), "names under which the API offers the model, the first one above all", section="model",
        flag="--served-model-name",
    )  # fmt: skip
    dtype: str = option(
        "auto", "type of weights and activations", section="model", choices=("auto", "float32", "bfloat16", "float16")
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output; by default the model's own, lowered to what memory holds",
        section="model", least=2, unit="tokens",
    )  # fmt: skip
    model_impl: str = option(
        "auto", "native files, or the Transformers library with Quire's attention underneath",
        section="model", choices=("auto", "native", "transformers"),
    )  # fmt: skip
    load_format: str = option(
        "auto", "safetensors, or a GGUF file, whichever is there; pt: .bin files, of which tensors alone are read; "
        "dummy: random weights from config.json alone",
        section="model", choices=("auto", "safetensors", "gguf", "pt", "dummy"),
    )  # fmt: skip
    hf_overrides: Mapping[str, Any] | None = option(
        None, "other values for the model's config.json, before anything reads it: {\"architectures\": [...]}, or "
        '{"text_config": {...}} for a part of a model',
        section="model",
    )  # fmt: skip
    quantization: str | None = option(
        None, "weights in 8 or 4 bits, made while loading: int8, int8_weight_only, int4, int4_weight_only "
        "(docs/quantization.md)",
        section="model",
    )  # fmt: skip
    packed_weights_cache: float = option(
        8.0, "disk space for weights as the processor multiplies them: the next start need not make them; 0 for "
        "none",
        section="model", least=0, greatest=2**20, unit="GiB",
    )  # fmt: skip
    trust_remote_code: bool = option(
        False, "run Python code that comes with a checkpoint (Transformers path only)", section="model"
    )
    chat_template: str | None = option(None, "file with a Jinja chat template, instead of the model's", section="model")
    special_tokens_in_messages: bool = option(
        False, "strings such as <|im_end|> in the messages of a chat become special tokens, as in Transformers; else "
        "they are text, and nobody can forge a turn",
        section="model", is_file_only=True,
    )  # fmt: skip
    tool_call_parser: str = option(
        "auto", "how calls of tools are found in an answer: auto means by the chat template (docs/tools.md)",
        section="model",
        choices=(
            "auto", "none", "openai", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "apertus",
            "gigachat3", "dots", "minicpm5", "kimi_k2", "minimax_m2", "step3", "cohere", "gemma4", "functiongemma",
            "internlm", "seed_oss", "longcat", "lfm2", "mistral", "granite", "qwen3_coder", "glm45", "hermes", "jamba",
            "olmo3", "granite-20b-fc", "phi4_mini_json", "pythonic", "llama3_json", "xlam",
        ),
    )  # fmt: skip
    reasoning_parser: str = option(
        "auto", "how reasoning is found in an answer: auto means by the chat template (docs/tools.md)",
        section="model",
        choices=(
            "auto", "none", "openai_gptoss", "cohere", "mistral", "gemma4", "seed_oss", "granite", "think",
            "deepseek_r1",
        ),
    )  # fmt: skip
    generation_config: str = option(
        "auto", "auto: default sampling parameters come from generation_config.json; none: they do not; a JSON object: "
        "they do, and its values win", section="model",
    )  # fmt: skip
    seed: int = option(0, "seed of everything random that has no seed of its own", section="model", least=0)
    max_logprobs: int = option(
        20, "most log-probabilities that a request may ask for; -1: of all tokens, at as many positions as make 16 "
        "million", section="model", least=-1,
    )  # fmt: skip

    enable_prompt_embeds: bool = option(
        False, "prompts may be vectors in the place of tokens, which no hook can read (docs/embeddings.md)",
        section="model",
    )  # fmt: skip

    watermark_config: Mapping[str, Any] | None = option(
        None, 'watermark of sampled text: an object of key, a secret number, and context_width, by default 4 '
        "(docs/sampling.md)",
        section="model",
    )  # fmt: skip

    # memory
    block_size: int = option(16, "tokens in a block of the KV cache", section="memory", least=1, greatest=256)
    kv_cache_dtype: str = option(
        "auto", "type in which keys and values are kept; int8 and fp8 have a scale for each token and head",
        section="memory",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"),
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = option(
        None, "memory for the KV cache, whatever gpu_memory_utilization says; by default what requests can use of what "
        "is free",
        section="memory", least=1, unit="bytes",
    )  # fmt: skip
    num_gpu_blocks_override: int | None = option(
        None, "blocks of the KV cache, whatever a size in bytes says; they must fit into what is free",
        section="memory", least=2, unit="blocks",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, "share of the device's memory that this engine may use in all; on a CPU of the machine's or the "
        "container's, or what other programs leave of it if that is less", section="memory", least=0.05, greatest=1.0,
    )  # fmt: skip
    enable_prefix_caching: bool = option(True, "keep and reuse blocks of earlier prompts", section="memory")
    tenant_cache_share: float | None = option(
        None, "part of the KV cache beyond which a tenant's cached blocks are given up before those of others; by "
        "default the least recently used go first, whose ever they are",
        section="memory", is_file_only=True, least=0.0, greatest=1.0,
    )  # fmt: skip
    state_checkpoint_interval: int = option(
        256, "of models with recurrent layers: how many tokens lie between copies of a prompt's state that are kept "
        "for prompts that begin alike; it is rounded up to whole blocks",
        section="memory", is_file_only=True, least=1, unit="tokens",
    )  # fmt: skip
    state_checkpoint_share: float = option(
        0.25, "of models with recurrent layers: part of the KV cache that copies of states may take, 0 for none",
        section="memory", is_file_only=True, least=0.0, greatest=1.0,
    )  # fmt: skip
    pinned_prefixes: str | None = option(
        None, "JSON file of prompt beginnings to compute at start and to keep for good", section="memory"
    )
    preemption_mode: str = option(
        "auto", "how a preempted request gets its blocks back: computed again, swapped, or what costs less",
        section="memory", choices=("auto", "recompute", "swap"),
    )  # fmt: skip
    swap_space: float | None = option(
        None, "host memory for swapped blocks, 0 for none; by default as much as the KV cache, at most 4 GiB "
        "and a quarter of what memory is free",
        section="memory", least=0, greatest=2**20, unit="GiB",
    )  # fmt: skip
    swap_directory: str | None = option(
        None, "folder for a file that holds swapped blocks, instead of memory", section="memory", is_file_only=True
    )
    kv_store: str | None = option(
        None, "where blocks of the prefix cache go on living, the nearest place first, with commas between: "
        "host?size=1GiB, memory in front of the others, or alone; file:///folder?size=16GiB, redis://host:6379, "
        "s3://bucket/prefix (docs/kv-tiers.md)",
        section="memory", parts=("kv_store_host_memory", "kv_store_disk"),
    )  # fmt: skip
    role: str = option(
        "both", "which half of requests this server is for, where others have the other one: prefill computes prompts, "
        "decode goes on from them, by way of kv_store (docs/disaggregation.md)",
        section="memory", choices=("both", "prefill", "decode"),
    )  # fmt: skip
    kv_connector: Mapping[str, Any] | None = option(
        None, "where KV comes from or goes to besides: an object of its name and arguments. memory, for engines of one "
        "process: store (a name), max_bytes; tiered, which kv_store stands for: stores (a list of addresses), "
        "host_bytes, max_wait (seconds), rule (cost or always) (docs/kv-connectors.md)",
        section="memory", parts=("kv_connector_args",),
    )  # fmt: skip

    kv_events_config: Mapping[str, Any] | None = option(
        None, "publish which blocks the prefix cache gains and loses, for routers, as vLLM does: "
        "enable_kv_cache_events, publisher (zmq or null), endpoint, replay_endpoint, topic, buffer_steps, hwm, "
        "max_queue_size, event_format (map or array); whoever may connect reads the tokens of prompts "
        "(docs/distributed.md)",
        section="memory",
    )  # fmt: skip

    # scheduling
    max_num_batched_tokens: int = option(
        2048, "token budget of a step: bounds its latency and its memory", section="scheduling", least=1, unit="tokens"
    )
    max_num_seqs: int = option(256, "sequences that run at once", section="scheduling", least=1, greatest=65536)
    scheduling_policy: str = option(
        "two_level", "order of serving: two_level, bounded_srtf, fifo (or fcfs), priority, srtf", section="scheduling"
    )
    staging_size: int = option(
        8,
        "requests among which two_level and bounded_srtf choose the shortest",
        section="scheduling",
        is_file_only=True,
        least=1,
        greatest=4096,
    )
    progress_share: float = option(
        0.1, "share of a short budget for the earliest of the prompts that have started (two_level, bounded_srtf)",
        section="scheduling", is_file_only=True, least=0, greatest=1,
    )  # fmt: skip
    long_prefill_token_threshold: int = option(
        0,
        "most tokens of one sequence in a step; 0: as many as the budget has",
        section="scheduling",
        least=0,
        greatest=2**30,
    )
    chunk_alignment: int = option(
        0,
        "chunks of a prompt end at multiples of so many tokens; 0: anywhere",
        section="scheduling",
        is_file_only=True,
        least=0,
        greatest=2**30,
    )
    target_inter_token_latency: float | None = option(
        0.0, "longest step while an answer is under way, such as 50ms: prompts that come meanwhile are computed in "
        "pieces that fit into it; 0: no limit; auto, which quire serve takes: four steps of one token",
        section="scheduling", least=0, greatest=3600, unit="seconds",
    )  # fmt: skip
    burst_time: float = option(
        0.02, "tokens of short steps of a CPU come together, as many as are computed in this time, such as 20ms; those "
        "of answers that are read whole in 200ms; whoever comes meanwhile ends that; a target between tokens that is "
        "given shortens the first of the two; 0: each token alone",
        section="scheduling", least=0, greatest=1, unit="seconds",
    )  # fmt: skip
    async_scheduling: bool | None = option(
        None, "decide the next step while one runs; by default yes, unless a step is too short to hide anything",
        section="scheduling",
    )  # fmt: skip

    # speculation
    speculative_config: Mapping[str, Any] | None = option(
        None, "who proposes tokens that the model then checks in one step: method (ngram, draft_model, eagle or mtp), "
        "num_speculative_tokens, model, prompt_lookup_min, prompt_lookup_max (docs/speculation.md)",
        section="speculation",
    )  # fmt: skip

    # adapters
    enable_lora: bool = option(False, "serve adapters (LoRA) beside the model (docs/adapters.md)", section="adapters")
    max_loras: int | None = option(
        None, "adapters in one step, with memory set aside for each; requests of others wait; by default 8, or as many "
        "as max_cpu_loras", section="adapters", least=1, greatest=1024,
    )  # fmt: skip
    max_lora_rank: int = option(16, "greatest rank of an adapter", section="adapters", least=1, greatest=512)
    max_cpu_loras: int | None = option(
        None, "adapters in memory, of which max_loras are ready for a step; others are read again when they are named; "
        "by default four times max_loras, at least 32",
        section="adapters", least=1,
    )  # fmt: skip
    lora_modules: tuple[str, ...] = option(
        (), 'adapter to load at start: name=path, or {"name": ..., "path": ...}', section="adapters",
        flag="--lora-modules",
    )  # fmt: skip

    # hooks
    hooks: tuple[str, ...] = option(
        (), "what looks at requests and answers before anybody else does (docs/hooks.md): an installed hook or "
        "module:object, and behind a colon what it is made with, as JSON object or text", section="hooks",
        flag="--hook",
    )  # fmt: skip
    hook_timeout: float = option(
        2.0,
        "how long one call of a hook may take",
        section="hooks",
        is_file_only=True,
        least=0.001,
        greatest=600,
        unit="seconds",
    )
    hook_on_failure: str = option(
        "closed", "where a hook raises or takes too long: nothing is allowed (closed) or everything (open)",
        section="hooks", is_file_only=True, choices=("closed", "open"),
    )  # fmt: skip
    hook_process: bool = option(
        False, "run each hook that was given by name in a process of its own, which is ended where it takes too long; "
        "it is asked one question at a time", section="hooks", is_file_only=True,
    )  # fmt: skip

    # images
    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None, 'most media of a kind in a request, as {"image": N, "video": N}; by default 8 images and 4 videos',
        section="images",
    )  # fmt: skip
    media_io_kwargs: Mapping[str, Any] | None = option(
        None, 'which frames are taken of a video, as {"video": {"num_frames": N, "fps": F}}: at most N, and at most F '
        "of a second; by default 32", section="images",
    )  # fmt: skip
    max_num_encoder_tokens: int | None = option(
        None, "tokens of images and videos that are encoded in one step; others wait for the next ones, larger are "
        "made smaller; by default half of max_num_batched_tokens, at least 1,024",
        section="images", is_file_only=True, least=1, unit="tokens",
    )  # fmt: skip
    encoder_cache_bytes: int = option(
        256 * 2**20, "memory for encoded images, the least recently used of which go first; the last one stays",
        section="images", is_file_only=True, least=0, unit="bytes",
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] = option(
        (), "host from which images and videos may be fetched (http, https), or a private address or network that may "
        "be reached for it; without any nothing is fetched",
        section="images", flag="--allowed-media-domains",
    )  # fmt: skip
    media_fetch_seconds: float = option(
        5.0, "longest time for fetching the images and videos of a request",
        section="images", is_file_only=True, least=0.001,
        greatest=600, unit="seconds",
    )  # fmt: skip
    allowed_local_media_path: str | None = option(
        None, "folder below which file:// URLs of images and videos may lead; anyone who may ask sees those there",
        section="images",
    )  # fmt: skip

    # execution
    device: str = option("auto", "where the model runs", section="execution", choices=("auto", "cpu", "cuda", "mps"))
    attention_backend: str = option(
        "auto", "attention kernels: cpu (C++), triton (GPU), reference (PyTorch)", section="execution"
    )
    num_threads: int | None = option(
        None, "threads for computing on a CPU; by default as many cores as this process may use",
        section="execution", least=1,
    )  # fmt: skip
    tensor_parallel_size: int = option(
        1, "workers that share each layer of the model, a process each (docs/distributed.md); num_threads is that of "
        "one", section="execution", least=1, greatest=64,
    )  # fmt: skip
    pipeline_parallel_size: int = option(
        1, "stages that the layers of the model are divided over, each of tensor_parallel_size workers",
        section="execution", least=1, greatest=32,
    )  # fmt: skip
    context_parallel_size: int = option(
        1, "workers that share the keys and values of each sequence, and compute everything else each for itself",
        section="execution", least=1, greatest=64,
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False, "whole experts on each of the tensor_parallel_size workers instead of a part of every one",
        section="execution",
    )  # fmt: skip
    data_parallel_size: int = option(
        1, "copies of the engine, a process each with its own workers and KV cache, behind one front that gives each "
        "request to one of them (docs/distributed.md); num_threads is that of one worker of one copy",
        section="execution", least=1, greatest=64,
    )  # fmt: skip
    routing_policy: str = option(
        "least_time", "which copy gets a request: the one with the least predicted time to its first token, the one "
        "with the fewest requests, or each in its turn",
        section="execution", choices=("least_time", "least_loaded", "round_robin"),
    )  # fmt: skip
    distributed_executor_backend: str | None = option(
        None, "who places the workers that share a model: mp on this machine, ray on the machines of a cluster; by "
        "default mp where the weights fit here, else ray", section="execution", choices=("mp", "ray"),
    )  # fmt: skip
    host_ip: str | None = option(
        None, "with ray: the address at which this machine listens for workers on others, which need a key",
        section="execution",
    )  # fmt: skip
    rank_invariant: bool = option(
        False, "the same bits with 1, 2, 4 and 8 workers that share each layer, not with experts; products that are "
        "summed over them take longer", section="execution", is_file_only=True,
    )  # fmt: skip
    compile: bool | None = option(
        None, "let torch's compiler make code of the model in pieces, cut at attention; by default on a GPU",
        section="execution",
    )  # fmt: skip
    enforce_eager: bool = option(
        False,
        "run the model operator by operator instead of recording it (a program on a CPU, graphs on a GPU)",
        section="execution",
    )
    engine_process: bool | None = option(
        None, "run the engine core in a process of its own (LLM: no, AsyncLLM and the server: yes)", section="execution"
    )
    check_invariants: bool = option(
        False, "verify every table after each step (slow)", section="execution", is_file_only=True
    )
    recorder_bytes: int = option(
        16 * 2**20, "memory that holds the engine's last decisions, which the page and /v1/observe show; 0 for none",
        section="execution", is_file_only=True, least=0, unit="bytes",
    )  # fmt: skip
    record: str | None = option(
        None, "file to which the run is written, for quire replay: all that comes in, decisions and tokens",
        section="execution",
    )  # fmt: skip
    record_bytes: int = option(
        2**30,
        "length at which that file ends; the engine goes on",
        section="execution",
        is_file_only=True,
        least=2**16,
        unit="bytes",
    )
    record_redact: bool = option(
        False, "exchange tokens and texts in that file, one for one: decisions can be replayed, the model cannot",
        section="execution",
    )  # fmt: skip
