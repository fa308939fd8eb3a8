"""Walls inside a step, on a model that computes: one request fails, the others say exactly what they say without it.

F6 is an exception in the forward pass or in the sampler, F7 a row of NaN, F8 memory that is not there. The same
requests run twice on one engine, with the fault and without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine_core.engine_core import EngineCore
from quire.failpoints import arm
from quire.messages import DecodingSpec, EngineRequest, split_sequence_id
from quire.sampling_params import SamplingParams
from quire.testing.greedy import real_core
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.step_isolation import READS_UNWRITTEN

POISON = 201
NUM_REQUESTS = 32
POISONED = (5, 17)
STEM = [7 * k % 150 for k in range(40)]
# of each output: its tokens, how it ended, and the tokens that log-probabilities came of
Result = dict[int, tuple[list[int], str, list[int]]]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"async_scheduling": True},
    "in small chunks, without the recorded program": {"max_num_batched_tokens": 48, "enforce_eager": True},
    "with drafts, ahead": {
        "async_scheduling": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
}


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    arm("")


@pytest.fixture(scope="module")
def make_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineCore]]:
    path = make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
    cores: dict[str, EngineCore] = {}

    def make(setting: str = "plain") -> EngineCore:
        if setting not in cores:
            options = {"max_num_seqs": 48, "block_size": 4, "num_gpu_blocks_override": 1500, "max_model_len": 128}
            cores[setting] = real_core(path, **options, **SETTINGS[setting])
        return cores[setting]

    yield make
    for core in cores.values():
        core.shutdown()


def requests(first_id: int, poison: int | None) -> list[EngineRequest]:
    """Of one beginning, which they find in each other's blocks: greedy and drawn ones, several at once, a beam,
    and two that become vectors."""
    made = []
    for number in range(NUM_REQUESTS):
        tail = [number + 3, (11 * number) % 190, 3, 5, 3, 5, 3]
        if number in POISONED and poison is not None:
            tail[3] = poison
        fields: dict[str, Any] = {"temperature": 0.0 if number % 2 else 0.8}
        if number % 5 == 1:
            fields["logprobs"] = 2
        if number % 7 == 4:
            fields["prompt_logprobs"] = 1
        if number in (8, 23):
            fields["n"] = 3
        decoding = None
        if number == 12:
            fields |= {"n": 2, "temperature": 0.0}
            decoding = DecodingSpec(method="beam_search", args={"width": 3})
        sampling = SamplingParams(max_tokens=5 + number % 4, ignore_eos=True, **fields)
        made.append(
            EngineRequest(
                request_id=first_id + number,
                prompt_token_ids=[*STEM[: 40 - number % 3], *tail],
                sampling=sampling,
                seed=number,
                decoding=decoding,
                pooling={9: "last", 10: "mean"}.get(number, ""),
            )
        )
    return made


def run(core: EngineCore, wanted: list[EngineRequest], step: Callable[[], Any] | None = None) -> Result:
    """Tokens and end of each sequence."""
    first = min(request.request_id for request in wanted)
    tokens: dict[int, list[int]] = {}
    judged: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for request in wanted:
        core.add(request)
    while core.has_work:
        outputs = core.step() if step is None else step()
        for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            tokens.setdefault(sequence_id, []).append(token)
        for entry in (*outputs.prompt_logprobs, *outputs.logprobs):
            judged.setdefault(entry.sequence_id, []).extend(position.token_ids[0] for position in entry.positions)
        for end in outputs.ends:
            assert end.sequence_id not in ends, "a sequence ends once"
            ends[end.sequence_id] = end.error or end.finish_reason
    assert core.scheduler.manager.pool.num_held == 0
    assert core.scheduler.rows.num_free == core.scheduler.rows.num_rows
    return {_key(one, first): (tokens.get(one, []), end, judged.get(one, [])) for one, end in sorted(ends.items())}


def _key(sequence_id: int, first: int) -> int:
    """The same in every run: a hundred for each request, and the number of the output."""
    request_id, index = split_sequence_id(sequence_id)
    return (request_id - first) * 100 + index


def assert_only_the_poisoned_failed(found: Result, expected: Result, said: str) -> None:
    failed = {key // 100 for key, (_, end, _) in found.items() if end not in ("length", "stop")}
    assert failed == set(POISONED)
    for key, wanted in expected.items():
        if key // 100 in POISONED:
            assert said in found[key][1]
        else:
            assert found[key] == wanted, f"request {key // 100} noticed"


@pytest.fixture(scope="module")
def expected_of(make_core: Callable[..., EngineCore]) -> Callable[[str], Result]:
    known: dict[str, Result] = {}

    def expected(setting: str) -> Result:
        if setting not in known:
            known[setting] = run(make_core(setting), requests(0, None))
            assert not any(POISON in tokens for tokens, *_ in known[setting].values()), "nobody else says it"
        return known[setting]

    return expected


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("point", ["in_forward", "before_sample"])
def test_f6_a_poisoned_request_fails_alone(
    make_core: Callable[..., EngineCore], expected_of: Callable[[str], Result], setting: str, point: str
) -> None:
    core, expected, pid = make_core(setting), expected_of(setting), os.getpid()
    core.control("reset_prefix_cache", {})
    arm(f"{point}:raise:when={POISON}")
    found = run(core, requests(1000, POISON))
    arm("")
    assert_only_the_poisoned_failed(found, expected, "InjectedFaultError")
    assert core.statistics()["num_divided_steps_total"] > 0
    # what was computed beside the fault is in the prefix cache, and serves the next ones rightly
    assert run(core, requests(2000, None)) == expected
    assert os.getpid() == pid


@pytest.mark.parametrize("setting", SETTINGS)
def test_f7_a_row_of_nan_fails_alone(
    make_core: Callable[..., EngineCore], expected_of: Callable[[str], Result], setting: str
) -> None:
    core, expected = make_core(setting), expected_of(setting)
    core.control("reset_prefix_cache", {})
    before = core.statistics()["num_nan_rows_total"]
    arm(f"nan_row:corrupt:when={POISON}")
    found = run(core, requests(3000, POISON))
    assert_only_the_poisoned_failed(found, expected, "not finite")
    assert core.statistics()["num_nan_rows_total"] == before + len(POISONED)


class FailsNthOperation(TorchDispatchMode):
    """The n-th operation of torch finds no memory, once."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.num_left = n

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_left -= 1
        if self.num_left == 0:
            raise torch.OutOfMemoryError("no memory, on purpose")
        return function(*args, **(kwargs or {}))


def few_requests(first_id: int) -> list[EngineRequest]:
    sampling = [SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.7 * (k % 2), logprobs=1) for k in range(4)]
    return [
        EngineRequest(request_id=first_id + k, prompt_token_ids=[*STEM[:9], k], sampling=sampling[k], seed=k)
        for k in range(4)
    ]


@pytest.mark.parametrize("numbers", [range(1, 51), pytest.param(range(51, 400), marks=pytest.mark.nightly)])
def test_f8_the_nth_operation_finds_no_memory(make_core: Callable[..., EngineCore], numbers: range) -> None:
    core = make_core("in small chunks, without the recorded program")
    core.control("reset_prefix_cache", {})
    expected = run(core, few_requests(0))
    num_hit = 0
    for n in numbers:
        core.control("reset_prefix_cache", {})
        mode = FailsNthOperation(n)

        def step(mode: FailsNthOperation = mode) -> Any:
            with mode:
                return core.step()

        before = core.statistics()["num_out_of_memory_total"]
        found = run(core, few_requests(10_000 + 10 * n), step)
        num_hit += mode.num_left <= 0
        assert sum(found[key] != expected[key] for key in expected) <= 1, f"operation {n}"
        assert core.statistics()["num_out_of_memory_total"] - before == (mode.num_left <= 0)
    assert num_hit > 10


@pytest.mark.parametrize(
    ("setting", "most"),
    [("ahead", 50), pytest.param("in small chunks, without the recorded program", 200, marks=pytest.mark.nightly)],
)
def test_f8_the_nth_allocation_of_blocks_fails(
    make_core: Callable[..., EngineCore], expected_of: Callable[[str], Result], setting: str, most: int
) -> None:
    """Until there are no more allocations, or for so many: each costs one request, and no other one notices."""
    core, expected = make_core(setting), expected_of(setting)
    for n in range(1, most + 1):
        core.control("reset_prefix_cache", {})
        (fault,) = arm(f"after_allocate:oom:after={n - 1}:count=1")
        found = run(core, requests(10_000 + 100 * n, None))
        failed = {key // 100 for key, (_, end, _) in found.items() if end not in ("length", "stop")}
        assert len(failed) == fault.num_fired, f"allocation {n}"
        assert all(found[key] == wanted for key, wanted in expected.items() if key // 100 not in failed)
        if not fault.num_fired:
            break
    assert n > 32, "each of them was hit"


def test_memory_for_half_of_a_step_is_enough(make_core: Callable[..., EngineCore], expected_of: Any) -> None:
    """Nobody fails: what does not fit at once is computed in parts, the long prompt of one request too."""
    core, expected = make_core("plain"), expected_of("plain")
    runner: Any = core.executor.worker._runner  # type: ignore[attr-defined]
    model = runner.isolation.computation.model
    forward = model.forward

    def short_of_memory(input_ids: Any, positions: Any) -> Any:
        if len(input_ids) > 12:
            raise torch.OutOfMemoryError("too many tokens for this memory")
        return forward(input_ids, positions)

    core.control("reset_prefix_cache", {})
    model.forward = short_of_memory
    try:
        assert run(core, requests(5000, None)) == expected
    finally:
        model.forward = forward


@pytest.mark.parametrize("setting", ["plain", "ahead"])
def test_who_counted_on_what_was_never_written_fails_too_and_nobody_is_wrong(
    make_core: Callable[..., EngineCore], setting: str
) -> None:
    """A row that cannot compute any of its tokens leaves blocks that others have found already."""
    core = make_core(setting)
    core.control("reset_prefix_cache", {})
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)

    def request(number: int, tokens: list[int]) -> EngineRequest:
        return EngineRequest(request_id=number, prompt_token_ids=tokens, sampling=sampling)

    shared = STEM[:24]
    wanted = [[*shared, 1], [*shared, 2, 3], [9, 8, 7, 6, 5]]
    expected = run(core, [request(7000 + k, tokens) for k, tokens in enumerate(wanted)])
    core.control("reset_prefix_cache", {})
    runner: Any = core.executor.worker._runner  # type: ignore[attr-defined]
    computation = runner.isolation.computation
    compute, broken = computation.compute, set[int]()

    def broken_for_some(rows: Any, *arguments: Any) -> Any:
        if broken & set(rows.tolist()):
            raise RuntimeError("this row cannot be computed")
        return compute(rows, *arguments)

    original = runner.table.admit

    def admit(sequence: Any) -> None:
        original(sequence)
        if split_sequence_id(sequence.sequence_id)[0] == 8000:
            broken.add(sequence.row)

    computation.compute, runner.table.admit = broken_for_some, admit
    late = request(8100, [*shared, 4])
    try:
        for k, tokens in enumerate(wanted):
            core.add(request(8000 + k, tokens))
        first = core.step()
        core.add(late)  # while a core that runs ahead does not know yet
        found = run_rest(core, first)
    finally:
        computation.compute, runner.table.admit = compute, original
    assert "RuntimeError" in found[8000]
    assert found[8001] in (READS_UNWRITTEN, str(expected[100][0]))
    assert found[8001] == READS_UNWRITTEN, "it had found the blocks of the one that failed"
    assert found[8002] == str(expected[200][0])
    alone = run(core, [request(9000, [*shared, 4])])[0][0]
    assert found[8100] in (READS_UNWRITTEN, str(alone))
    assert run(core, [request(9100 + k, tokens) for k, tokens in enumerate(wanted)]) == expected


def run_rest(core: EngineCore, first: Any) -> dict[int, str]:
    """By request: its error, or its tokens."""
    tokens: dict[int, list[int]] = {}
    found: dict[int, str] = {}
    outputs = first
    while True:
        for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            tokens.setdefault(split_sequence_id(sequence_id)[0], []).append(token)
        for end in outputs.ends:
            number = split_sequence_id(end.sequence_id)[0]
            found[number] = end.error or str(tokens[number])
        if not core.has_work:
            return found
        outputs = core.step()


@pytest.mark.nightly
@pytest.mark.parametrize("repetition", range(20))
@pytest.mark.parametrize("setting", SETTINGS)
def test_f6_and_f7_again_and_again(
    make_core: Callable[..., EngineCore], expected_of: Callable[[str], Result], setting: str, repetition: int
) -> None:
    """Faults at random: whoever fails, the others are right."""
    core, expected = make_core(setting), expected_of(setting)
    first = 20_000 + 100 * repetition
    arm(
        f"in_forward:raise:0.1:{repetition}:count=9,before_sample:oom:0.1:{repetition}:count=9,"
        f"nan_row:corrupt:0.01:{repetition},after_allocate:raise:0.02:{repetition}"
    )
    found = run(core, requests(first, None))
    arm("")
    for key, result in found.items():
        assert result == expected[key] or result[1] not in ("length", "stop")
    assert run(core, requests(first + 50, None)) == expected
