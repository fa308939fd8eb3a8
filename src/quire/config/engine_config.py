"""One frozen configuration, made by `resolve`. Components take the values they use, not this whole object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config.image_sizes import LargestImage
from quire.config.images import ImageConfig
from quire.config.kv_events import KVEventsConfig
from quire.config.model_facts import ModelFacts
from quire.config.rank_grid import RankGrid, RankPlace
from quire.config.speculation import SpeculationConfig
from quire.config.watermark import Watermark

# A sum over the inputs of a weight has so many parts where its bits must not depend on the number of workers.
SLICES_OF_A_SUM = 8


TIERED = "tiered"
_MOST_TOKENS_OF_BURST = 32


@dataclass(frozen=True)
class KVConnectorConfig:
    """Which connector, and what it is told."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BurstTimes:
    """Seconds that the tokens of a row may take in one step, if it gets several: where each is read as it comes, and
    where an answer is read whole. 0: it gets one."""

    streamed: float = 0.0
    whole: float = 0.0

    @property
    def most_tokens(self) -> int:
        """Of a row in one step."""
        return _MOST_TOKENS_OF_BURST if self.streamed > 0 else 1


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What a worker needs to load the model and run steps."""

    model_path: str
    device: str
    dtype: str
    model_impl: str
    load_format: str
    trust_remote_code: bool
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    attention_backend: str
    num_threads: int
    # None: where it pays
    compile: bool | None
    enforce_eager: bool
    seed: int
    # a processor for each thread; None: the system places them
    processors: tuple[int, ...] | None = None
    # what keys and values are kept as; None: the model's type
    kv_cache_dtype: str | None = None
    # the scheme by which weights are quantised while loading; None: they stay as the checkpoint has them
    quantization: str | None = None
    # bytes on disk for packed weights of models that were loaded before; 0: none
    packed_weights_cache: int = 0
    # a folder for a file of swapped blocks; None: they stay in memory
    swap_directory: str | None = None
    # who proposes tokens; None: nobody
    speculation: SpeculationConfig | None = None
    # where KV comes from and goes to beside the cache; None: nowhere
    kv_connector: KVConnectorConfig | None = None
    # what tells the weights from all others, where that is needed
    weights_fingerprint: str = ""
    # ranks that run the model together, which of them this is, and whether bits must not depend on how many there are
    grid: RankGrid = field(default_factory=RankGrid)
    burst_times: BurstTimes = field(default_factory=BurstTimes)
    rank: int = 0
    rank_invariant: bool = False
    # who places them, mp or ray, and with ray the address at which the first one listens for the others
    executor_backend: str = "mp"
    host_ip: str | None = None
    # slots for adapters, those in memory, in slots or not, and the greatest rank that one of them may have; 0: none
    max_loras: int = 0
    max_cpu_loras: int = 0
    max_lora_rank: int = 0
    # memory for what an encoder made of images
    encoder_cache_bytes: int = 256 * 2**20
    # what sampled texts are marked with; None: nothing
    watermark: Watermark | None = None
    # vectors may stand in the place of a prompt's tokens
    enable_prompt_embeds: bool = False
    # the image that costs the encoder most; None: the model takes none
    largest_image: LargestImage | None = None
    # of config.json: keys that hf_overrides brings and the model's own file does not have
    added_config_keys: tuple[str, ...] = ()

    def of_rank(self, rank: int) -> WorkerConfig:
        """The same for another rank, on processors of its own."""
        threads = self.num_threads
        mine = None if self.processors is None else self.processors[rank * threads : (rank + 1) * threads]
        return replace(self, rank=rank, processors=mine or None)

    def of_replica(self, number: int) -> WorkerConfig:
        """The same for another copy of the model, on processors of its own."""
        size = self.num_threads * self.grid.size
        mine = None if self.processors is None else self.processors[number * size : (number + 1) * size]
        return replace(self, processors=mine or None)

    @property
    def place(self) -> RankPlace:
        return self.grid.place_of(self.rank)

    @property
    def slots_per_block(self) -> int:
        """Of the tokens of a block, those whose keys and values this rank keeps."""
        return self.block_size // self.grid.context

    @property
    def model_as_run(self) -> str:
        """The model, the form of its weights and the ranks that share it: only engines that agree in it compute the
        same keys and values, and keep them in the same way."""
        model = self.weights_fingerprint or self.model_path
        ranks = f"{self.grid}" if self.grid.size > 1 else ""
        return " ".join(filter(None, (model, self.device, self.dtype, self.quantization, ranks)))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything decided; nothing in it changes while the engine lives."""

    facts: ModelFacts
    worker: WorkerConfig
    # None: tokens alone go in and come out
    tokenizer_path: str | None
    # the first one is the model's own
    served_model_names: tuple[str, ...]
    # others that mean the same, and are not listed
    further_model_names: tuple[str, ...]
    chat_template: str | None
    tool_call_parser: str
    special_tokens_in_messages: bool
    reasoning_parser: str
    use_generation_config: bool
    max_model_len: int
    # True: the length was Quire's choice, so it may be lowered to what memory holds
    may_lower_max_model_len: bool
    max_logprobs: int
    seed: int
    block_size: int
    kv_cache_memory_bytes: int | None
    num_blocks_override: int | None
    enable_prefix_caching: bool
    # a JSON file of prefixes to pin at start
    pinned_prefixes: str | None
    # auto, recompute or swap
    preemption_mode: str
    # None: decided when memory has been measured; 0: nothing is ever swapped
    swap_space_bytes: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    scheduling_policy: str
    staging_size: int
    progress_share: float
    # 0: no such limit
    long_prefill_token_threshold: int
    chunk_alignment: int
    # seconds; 0: no target; None: chosen when steps have been timed
    target_inter_token_latency: float | None
    # None: decided when a step has been timed
    async_scheduling: bool | None
    engine_process: bool | None
    check_invariants: bool
    # the same as the worker's: the core plans the drafts, the worker makes them
    speculation: SpeculationConfig | None = None
    # the same as the worker's: each has its half
    kv_connector: KVConnectorConfig | None = None
    # 0: nothing is recorded
    recorder_bytes: int = 16 * 2**20
    # the file to which the run is written, how long it may become, and whether tokens are exchanged in it
    record: str | None = None
    record_bytes: int = 2**30
    record_redact: bool = False
    # of all blocks, for what one tenant has named; None: nobody asks whose they are
    tenant_cache_share: float | None = None
    # of models with recurrent layers: tokens between two checkpoints, and what part of all blocks they may take
    state_checkpoint_interval: int = 256
    state_checkpoint_share: float = 0.25
    # (name, path) of those that are loaded at start
    lora_modules: tuple[tuple[str, str], ...] = ()
    # names of what looks at requests and answers, how long a call of it may take, and what holds where it fails
    hooks: tuple[str, ...] = ()
    hook_timeout: float = 2.0
    hook_on_failure: str = "closed"
    hook_process: bool = False
    # how many a request may have, and where they may come from
    images: ImageConfig = field(default_factory=ImageConfig)
    # engine cores behind one front, which of them this is, and how the front chooses between them
    data_parallel_size: int = 1
    replica: int = 0
    routing_policy: str = "least_time"
    # where events of the prefix cache are published; None: nowhere
    kv_events: KVEventsConfig | None = None
    # the core tells its client of them
    tells_cache_changes: bool = False
    # of the names of blocks, where several must agree; b"": the core draws one. Kept out of what is shown to anybody.
    prefix_hash_key: bytes = field(default=b"", repr=False)
    # which half of a request it is for: prefill, decode or both
    role: str = "both"

    @property
    def shares_blocks(self) -> bool:
        """With every engine that has the same store."""
        return self.kv_connector is not None and self.kv_connector.name == TIERED

    @property
    def served_model_name(self) -> str:
        return self.served_model_names[0]

    def is_own_name(self, name: str) -> bool:
        """Whether it means the model itself."""
        return name in self.served_model_names or name in self.further_model_names

    def of_replica(self, number: int, prefix_hash_key: bytes) -> EngineConfig:
        """The same for one of several, on processors and ports of its own."""
        return replace(
            self,
            replica=number,
            prefix_hash_key=prefix_hash_key,
            tells_cache_changes=self.enable_prefix_caching,
            worker=self.worker.of_replica(number),
            kv_events=None if self.kv_events is None else self.kv_events.of_replica(number),
        )
