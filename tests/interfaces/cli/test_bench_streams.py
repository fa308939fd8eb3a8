"""benchmarks/streams.py: what is counted and refused, a run of two servers, and the fake of vLLM's engine."""

import json
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
from tests.support.null_core import FIRST, NUM, answer

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TEXTS = ["one", " two", "x", " three"]


@pytest.fixture
def streams(monkeypatch):
    """The modules of the benchmark, found as a script finds its neighbours."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import stream_servers
    import streams

    return SimpleNamespace(main=streams, servers=stream_servers)


def asked(streams, *words):
    options = streams.main.parser().parse_args(words)
    return options, streams.main.servers_for(options)


# ---------------------------------------------------------------------------------------------------------- counting


def test_letters_become_tokens_over_any_number_of_cycles(streams):
    said = streams.servers.Answer(TEXTS)
    cycle = sum(map(len, TEXTS))
    assert [said.num_tokens(length) for length in (0, 3, 7, 8, cycle, cycle + 3, 5 * cycle + 8)] == [
        0,
        1,
        2,
        3,
        4,
        5,
        23,
    ]


def test_a_text_that_ends_inside_a_token_is_an_error(streams):
    with pytest.raises(streams.servers.WrongAnswerError, match="5 letters"):
        streams.servers.Answer(TEXTS).num_tokens(5)


def test_an_answer_is_right_from_any_token_on_and_with_joined_events(streams):
    right = streams.servers.said_right("quire", ["x", " threeone", " two"], TEXTS)
    assert [right.num_tokens(length) for length in (1, 7, 10, 14)] == [1, 2, 3, 4]


@pytest.mark.parametrize("said", [["one", " two", "x"], ["one", "x", " two", " three"], [*TEXTS, "one"], []])
def test_an_answer_that_lacks_swaps_or_repeats_a_token_is_an_error(streams, said):
    with pytest.raises(streams.servers.WrongAnswerError, match="not what its core says"):
        streams.servers.said_right("vllm", said, TEXTS)


def test_figures_count_from_when_the_clock_began(streams):
    counted = {"seconds": 2.0, "events": 4, "text": [[3, 8], [0, 14 + 3]]}
    figures = streams.main.figures_of(counted, streams.servers.Answer(TEXTS), rate=10, spent=0.7)
    # 2 and 5 tokens
    assert figures["tokens/s"] == round(7 / 2)
    assert figures["events/token"] == round(4 / 7, 3)
    assert figures["us of processor/token"] == 100_000
    assert figures["share of a core"] == 0.35


def test_ratios_compare_the_same_round(streams):
    def rounds(*spent):
        return [{"asked tokens/s": 8000, "us of processor/token": value} if value else None for value in spent]

    text = streams.main.summary(
        {"quire": rounds(10, 20, 40, 1), "vllm": rounds(30, 50, 60, None), "x": rounds(*4 * [0])}
    )
    ours, theirs, absent = text.splitlines()[2:]
    assert "15.0 (1 to 40)" in ours
    assert "x**" not in ours
    assert "| 50 (30 to 60) | **2.50 x** (1.50 to 3.00) |" in theirs
    assert "| x | none | none | none |" in absent


def test_a_server_that_cannot_follow_is_not_asked_for_more(streams):
    rows = {8000: {"vllm": [{"tokens/s of a whole core": 15_000}, None], "gone": [None, None]}}
    assert streams.main.can_try("vllm", 8_000, {})
    assert streams.main.can_try("vllm", 30_000, rows)
    assert not streams.main.can_try("vllm", 30_001, rows)
    assert not streams.main.can_try("gone", 16_000, rows)


def test_the_table_of_goals_takes_our_highest_rate_and_the_ratio_of_the_lowest(streams, tmp_path):
    def figures(rate, processor):
        return {
            "tokens/s": rate,
            "events/token": 0.97,
            "us of processor/token": processor,
            "tokens/s of a whole core": 1e6 / processor,
            "share of a core": 0.83,
        }

    rates = {
        8000: {"quire": [figures(8000, 10), figures(8000, 20)], "vllm": [figures(7900, 40), None]},
        60000: {"quire": [figures(60_000, 12.5), None]},
    }
    import rival_goals

    path = tmp_path / "streams.json"
    path.write_text("some lines\n" + json.dumps({"benchmark": "streams", "connections": 256, "rates": rates}))
    [row] = [line for line in rival_goals.table(rival_goals.Files.read([path])).splitlines() if "| W9 |" in line]
    assert "60,000 in 0.83 of a core, 0.97 events a token; 80,000 of a whole core" in row
    assert "4.00 x (4.00 to 4.00) less processor at 8,000 tokens/s" in row


# ----------------------------------------------------------------------------------------------------------- options


def test_vllms_server_comes_from_the_folder_of_the_rivals(streams, tmp_path):
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / ".ready").touch()
    options, servers = asked(streams, "--rivals", str(tmp_path), "--statistics")
    assert [server.name for server in servers] == ["quire", "vllm", "vllm-statistics"]
    assert options.rates
    for server, is_without in zip(servers[1:], (True, False), strict=True):
        assert server.command[0] == str(tmp_path / "vllm" / "bin" / "python")
        assert ("--disable-log-stats" in server.command) == is_without
        assert json.loads(server.variables["NULL_CORE_TOKENS"]) == [FIRST, NUM]
        # Quire's own packages are none of its business
        assert server.variables["PYTHONPATH"] == ""


def test_without_a_rival_only_ours_is_started(streams):
    options, servers = asked(streams)
    assert [server.name for server in servers] == ["quire"]
    assert 60_000 in options.rates


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rivals", "{}"], "no vLLM there"),
        (["--rivals", "{}", "--rates", "8000,0"], "every rate is above 0"),
        (["--statistics"], "with --rivals FOLDER only"),
    ],
)
def test_what_cannot_be_measured_is_refused(streams, tmp_path, words, reason):
    with pytest.raises(SystemExit, match=reason):
        asked(streams, *[word.format(tmp_path) for word in words])


# ---------------------------------------------------------------------------------------------------------- the runs


def test_two_servers_take_turns_and_are_gone_afterwards(streams, tmp_path):
    before = psutil.Process().children()
    options = streams.main.parser().parse_args(
        ["--connections", "4", "--seconds", "0.3", "--rounds", "2", "--rates", "4000"]
    )
    servers = streams.servers
    ours = servers.quire_server()
    other = servers.Server("other", ours.command, ours.variables)
    found = streams.main.Comparison(options, tmp_path).run([ours, other], 4000)
    assert {name: len(rounds) for name, rounds in found.items()} == {"quire": 2, "other": 2}
    for figures in [*found["quire"], *found["other"]]:
        assert figures["tokens/s"] > 0
        assert 0 < figures["events/token"] <= 1
    assert psutil.Process().children() == before


def test_a_server_that_does_not_start_says_why(streams, tmp_path):
    server = streams.servers.Server("vllm", [sys.executable, "-c", "raise SystemExit('no such model')"])
    with (
        streams.servers.Running(server, 10.0, tmp_path / "log") as running,
        pytest.raises(SystemExit, match=r"vllm: not ready \(no such model\)"),
    ):
        running.wait_ready()


# -------------------------------------------------------------------------------------------- the fake of vLLM's core


@pytest.fixture
def null_core(monkeypatch):
    """Its module, over stand-ins for what it takes from vLLM."""

    class Outputs(SimpleNamespace):
        def __init__(self, outputs):
            super().__init__(outputs=outputs, scheduler_stats=None, weight_version=None)

    class Output(SimpleNamespace):
        def __init__(self, request_id, new_token_ids, prefill_stats=None, finish_reason=None):
            super().__init__(
                request_id=request_id,
                new_token_ids=new_token_ids,
                prefill_stats=prefill_stats,
                finish_reason=finish_reason,
            )

    class Core:
        run_engine_core = None

        def _attach_weight_version(self, outputs):
            for one in outputs.values():
                one.weight_version = self._weight_version

    class Prefill(SimpleNamespace):
        def set(self, *numbers):
            self.numbers = numbers

    class Proc(Core):
        def __init__(self, *arguments):
            super().__init__(*arguments)

    core = ModuleType("vllm.v1.engine.core")
    core.EngineCore, core.EngineCoreProc, core.freeze_gc_heap = Core, Proc, lambda: None
    engine = ModuleType("vllm.v1.engine")
    engine.EngineCoreOutput, engine.EngineCoreOutputs, engine.core = Output, Outputs, core
    engine.FinishReason = IntEnum("FinishReason", "LENGTH")
    stats = ModuleType("vllm.v1.metrics.stats")
    stats.PrefillStats, stats.SchedulerStats = Prefill, SimpleNamespace
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (core, engine, stats):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(BENCHMARKS / "rival_drivers"))
    monkeypatch.delitem(sys.modules, "vllm_null_core", raising=False)
    monkeypatch.setenv("NULL_CORE_TOKENS", json.dumps([FIRST, NUM]))
    monkeypatch.setenv("QUIRE_NULL_STEPS_A_SECOND", "1e9")
    import vllm_null_core

    yield vllm_null_core.NullCoreProc(SimpleNamespace(cache_config=SimpleNamespace()), None, True)
    del sys.modules["vllm_null_core"]


def request(name, prompt, max_tokens, seed=None):
    return SimpleNamespace(
        request_id=name,
        client_index=0,
        prompt_token_ids=prompt,
        sampling_params=SimpleNamespace(seed=seed),
        max_tokens=max_tokens,
    )


def test_the_fake_says_the_tokens_of_our_null_core(null_core):
    asked = {"a": ([5, 6, 7], 2, None), "b": ([9], 2 * NUM, 3)}
    for name, (prompt, max_tokens, seed) in asked.items():
        null_core.scheduler.add_request(request(name, prompt, max_tokens, seed))
    said = {name: [] for name in asked}
    while null_core.scheduler.has_requests():
        outputs, _ = null_core.step()
        for output in outputs[0].outputs:
            said[output.request_id].append(output)
    for name, (prompt, max_tokens, seed) in asked.items():
        tokens = [token for output in said[name] for token in output.new_token_ids]
        assert tokens == answer(prompt, seed or 0, 0, max_tokens)
        assert [bool(output.finish_reason) for output in said[name]] == [False] * (max_tokens - 1) + [True]
        assert said[name][0].prefill_stats.numbers == (len(prompt), 0, 0)
        assert not any(output.prefill_stats for output in said[name][1:])


def test_the_fake_forgets_what_is_aborted_and_tells_its_numbers(null_core):
    for name in "abc":
        null_core.scheduler.add_request(request(name, [1], 10))
    null_core.scheduler.finish_requests(["b", "unknown"], None)
    outputs, is_computed = null_core.step()
    assert [output.request_id for output in outputs[0].outputs] == ["a", "c"]
    assert is_computed
    assert outputs[0].scheduler_stats.num_running_reqs == 2
    assert outputs[0].weight_version == "default"
    null_core.scheduler.finish_requests(None, None)
    assert not null_core.scheduler.has_requests()
