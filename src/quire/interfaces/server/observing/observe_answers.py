"""What the endpoints of /v1/observe answer. Times are seconds on the engine's clock, which `now` reads."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.interfaces.server.openai.responses import only


class ObservedModel(msgspec.Struct, kw_only=True):
    """The served model, as far as a page must know it."""

    name: str
    max_model_len: int
    has_chat_template: bool
    takes_images: bool
    # text, transcripts, labels (and scores), vectors
    makes: str


class Throughput(msgspec.Struct, kw_only=True):
    """Of the last five seconds, as the clients saw it."""

    generated_tokens_per_second: float
    prompt_tokens_per_second: float
    generated_tokens_total: float
    prompt_tokens_total: float


class Quantiles(msgspec.Struct, kw_only=True):
    count: int
    p50_seconds: float
    p95_seconds: float


class Latency(msgspec.Struct, kw_only=True):
    """Of the last thirty seconds; null where nothing was measured."""

    time_to_first_token: Quantiles | None
    between_tokens: Quantiles | None


class Rates(msgspec.Struct, kw_only=True):
    """Of the engine's steps in the last five seconds; 0 without a recorder."""

    steps_per_second: float
    computed_tokens_per_second: float
    seconds_per_step: float


class RunningRequest(msgspec.Struct, kw_only=True):
    request: int
    num_sequences: int
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_blocks: int
    priority: int
    is_idle: bool


class WaitingRequest(msgspec.Struct, kw_only=True):
    """waits_for: memory or rows, with how much is needed and how much is there; order, turn or input."""

    request: int
    num_tokens: int
    has_run: bool
    is_swapped: bool
    priority: int
    waits_for: str
    needed: int
    there: int


class ObservedMemory(msgspec.Struct, kw_only=True):
    """Slots by what they hold; GET /v1/admin/memory says the same."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    slots: dict[str, int]
    host_slots: dict[str, int]
    num_blocks_saved_by_sharing: int


class ObservedState(msgspec.Struct, kw_only=True):
    """GET /v1/observe/state. `running` and `waiting` name at most 64 requests each."""

    object: Annotated[str, only("observation.state")] = "observation.state"
    model: ObservedModel
    throughput: Throughput
    latency: Latency
    is_recorded: bool
    now: float
    step: int
    num_running: int
    num_waiting: int
    num_preempted: int
    max_num_seqs: int
    running: list[RunningRequest]
    waiting: list[WaitingRequest]
    memory: ObservedMemory
    rates: Rates


class ObservedBlocks(msgspec.Struct, kw_only=True):
    """GET /v1/observe/blocks. Entry i of each column (bytes, in base64) is about block i."""

    object: Annotated[str, only("observation.blocks")] = "observation.blocks"
    summary: str
    num_blocks: int
    block_size: int
    # 0 free, 1 cached, 2 own, 3 shared, 4 kept, 5 pinned; + 64: not full yet; + 128: copied on write a moment ago
    states: bytes
    # two bytes each, the low one first: a place in `sequences`; 65535: nobody's
    owners: bytes
    # at most 255
    num_holders: bytes
    # (request, index)
    sequences: list[list[int]]
    counts_by_state: dict[str, int]
    num_sharing_requests: int
    waiting_for: dict[str, int]
    num_host_blocks: int
    num_host_blocks_used: int
    # (request, blocks)
    swapped: list[list[int]]


class ObservedDecision(msgspec.Struct, kw_only=True):
    """What amount and other count is said in words; a request of -1: it is about no single one."""

    number: int
    step: int
    time: float
    kind: str
    request: int
    sequence: int
    amount: int
    other: int
    why: str
    words: str


class ObservedDecisions(msgspec.Struct, kw_only=True):
    """GET /v1/observe/decisions. Ask again with since=next; another epoch: another engine, whose numbers began anew."""

    object: Annotated[str, only("observation.decisions")] = "observation.decisions"
    epoch: int
    now: float
    next: int
    decisions: list[ObservedDecision]


class Trace(msgspec.Struct, kw_only=True):
    """GET /v1/observe/trace: Chrome's trace format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str
    otherData: dict[str, int]
