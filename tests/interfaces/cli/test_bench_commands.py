"""`quire bench WORKLOAD`, on the model in the package with lengths of a few tokens."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import pytest

from quire.errors import EngineError
from quire.interfaces.cli import bench, bench_start, main
from quire.interfaces.cli.bench_client import ServerAnswerError, stream_completion
from quire.interfaces.cli.bench_perform import perform, perform_chains
from quire.interfaces.cli.bench_start import seconds_to_first_token
from quire.interfaces.cli.bench_workloads import Chains, Work
from quire.testing.image_checkpoints import make_image_checkpoint
from quire.testing.speech_checkpoints import make_speech_checkpoint
from quire.testing.tiny_checkpoints import make_checkpoint

# in this process: a process of its own for the engine would take as long as all the rest
# a bandwidth that no cache has: the model fits into one
_FAST = ["--bandwidth", "3000", "--peak", "400", "--no-engine-process", "--num-threads", "1", "--dtype", "float32"]
# enough tokens that a stream comes in more than one piece, however busy the machine is
_SIZES = {
    "stream": ["--input-length", "12", "--output-length", "48"],
    "batch": ["--num-requests", "3", "--input-length", "9", "--output-length", "48"],
    "shared-prefix": ["--num-requests", "3", "--shared-prefix", "20", "--input-length", "4", "--output-length", "2"],
    "parallel": ["--input-length", "9", "--output-length", "3", "--num-answers", "3", "--beam-width", "2"],
    "prompt": ["--input-length", "40"],
    "long-context": ["--input-length", "90", "--output-length", "24"],
    "agents": [
        "--num-agents", "2", "--num-calls", "3", "--shared-prefix", "40", "--input-length", "4", "--result-length", "5",
        "--output-length", "12",
    ],
}  # fmt: skip
_FIGURES = {
    "stream": {"tokens after the first", "time to first token", "time between tokens", "whole request"},
    "batch": {"output tokens", "all requests", "time to first token", "time between tokens"},
    "shared-prefix": {"prefix is new", "prefix was seen before"},
    "parallel": {"3 answers", "beam search of 2"},
    "prompt": {"prompt tokens", "time to first token", "arithmetic"},
    "long-context": {
        "prompt tokens", "time to first token", "time to first token, again", "tokens after the first",
    },
    "agents": {
        "all calls", "calls", "first call's first token", "later calls' first token", "prompt tokens found",
    },
}  # fmt: skip
_WITHOUT_A_LIMIT = {"agents"}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")


@pytest.mark.parametrize("name", _SIZES)
def test_a_workload(name, capsys):
    number = bench.WORKLOADS[name][0]
    assert main(["bench", number, *_SIZES[name], *_FAST, "--rounds", "2", "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["workload"] == number.upper()
    assert set(numbers["measures"]) == _FIGURES[name]
    assert all(len(measure["values"]) == 2 for measure in numbers["measures"].values())
    first = next(iter(numbers["measures"].values()))
    assert name in _WITHOUT_A_LIMIT or 0 < first["fraction"] < 1
    assert first["q1"] <= first["median"] <= first["q3"]
    assert numbers["limits"] == {
        "threads": 1, "read_gb_s": 3000.0, "float32_gops": 400.0, "bfloat16_gops": 400.0, "int8_gops": 400.0,
    }  # fmt: skip


def test_agents_find_what_they_said_before():
    """The model itself does not matter: every call begins with all of the one before it, its answer included."""
    asked = []

    class Engine:
        async def generate(self, prompt, params, delta):
            tokens = prompt["prompt_token_ids"]
            asked.append(tokens)
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[len(asked)] * 2)], num_cached_tokens=len(tokens) - 1
            )

    chains = Chains([[7, 7], [7, 8]], [[[50, 51], [52]], [[60], [61]]], 2)
    outcome = asyncio.run(perform_chains(Engine(), chains))
    own = [tokens for tokens in asked if tokens[1] == 7]
    assert [len(tokens) for tokens in own] == [2, 6, 9]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(own))
    assert own[1][4:] == [50, 51]
    assert own[2][8:] == [52]
    assert [call.is_first for call in outcome.timelines] == [True, False, False] * 2
    assert [call.num_cached_tokens for call in outcome.timelines[:3]] == [1, 5, 8]


def test_speech(tmp_path, capsys):
    model = make_speech_checkpoint(tmp_path / "whisper")
    sizes = ["--num-requests", "2", "--seconds", "1", "--output-length", "3"]
    assert main(["bench", "speech", str(model), *sizes, *_FAST, "--rounds", "1", "--json", "-"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert {name.split(", ")[0] for name in measures} == {"sounds are new", "sounds were heard before"}
    new = {name.split(", ")[1]: measure["median"] for name, measure in measures.items() if "are new" in name}
    # 6 tokens, of two sounds of a second each
    assert new["output tokens"] * new["real-time factor"] * 2 == pytest.approx(6, rel=1e-3)
    assert main(["bench", "speech", str(make_checkpoint(tmp_path / "llama", "llama")), *sizes, *_FAST]) == 2
    assert "does not listen" in capsys.readouterr().err


def test_images(tmp_path, capsys):
    model = make_image_checkpoint(tmp_path, "qwen2_5_vl")
    sizes = ["--num-requests", "2", "--size", "56", "--output-length", "3"]
    assert main(["bench", "images", str(model), *sizes, *_FAST, "--rounds", "1", "--json", "-"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert {name.split(",")[0] for name in measures} == {"images are new", "images were seen before", "prompt"}
    assert measures["prompt"]["median"] > 4


def test_a_table_and_a_file(capsys, tmp_path):
    file = tmp_path / "stream.json"
    argv = ["bench", "stream", *_SIZES["stream"], *_FAST, "--rounds", "1", "--json", str(file)]
    assert main(argv) == 0
    assert "tokens after the first" in capsys.readouterr().out
    assert json.loads(file.read_text())["settings"] == {
        "input_length": 12, "output_length": 48, "precision": "float32", "seed": 0,
    }  # fmt: skip


@pytest.mark.parametrize("name", bench.WORKLOADS)
def test_each_workload_has_help_and_a_number(name, capsys):
    for word in (name, bench.WORKLOADS[name][0]):
        assert main(["bench", word, "--help"]) == 0
        assert f"usage: quire bench {word} [MODEL] [options]" in capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    assert f"  {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["stream", "--rounds", "0"], "--rounds 0: must be a whole number, 1 or more"),
        (["stream", "--rounds", "²"], "--rounds ²: must be a whole number, 1 or more"),
        (["stream", "--output-length", "1"], "--output-length 1: must be a whole number, 2 or more"),
        (["w5", "--bandwidth", "fast"], "--bandwidth fast: must be a number above 0"),
        (["serve", "--rates", "0.5,0"], "--rates 0: must be a number above 0"),
        (["serve", "--num-requests", "10001"], "--num-requests 10001: each has a connection of its own, at most 10000"),
        (["parallel", "--roundz", "3"], 'Did you mean "--rounds"?'),
        (["stream", "no/such/model"], "no such directory"),
        (["streem"], 'there is no such workload or folder. Did you mean "stream"?'),
        (["long-context"], "--input-length, --output-length: too long for this model"),
    ],
)
def test_mistakes_are_one_line(argv, words, capsys):
    assert main(["bench", *argv]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_what_an_engine_is_asked(engine):
    ticks = itertools.count()
    work = Work([[1, 2], [3]], [2, 2])
    outcome = asyncio.run(perform(engine, work, clock=lambda: float(next(ticks))))
    assert [sampling.max_tokens for sampling in engine.sampling] == [2, 2]
    assert all(sampling.is_greedy and sampling.ignore_eos for sampling in engine.sampling)
    assert outcome.num_output_tokens == 4
    assert len(outcome.times_to_first_token) == len(outcome.gaps) == 2
    engine.sampling.clear()
    asyncio.run(perform(engine, Work([[1]], [2], num_answers=3), seed=5))
    asyncio.run(perform(engine, Work([[1]], [2], beam_width=4)))
    drawn, beams = engine.sampling
    assert (drawn.n, drawn.temperature, drawn.seed) == (3, 1.0, 5)
    assert (beams.beam_width, beams.max_tokens) == (4, 2)


def test_the_server_under_random_arrivals(capsys):
    argv = ["--num-requests", "4", "--input-length", "8", "--output-length", "4", "--rates", "0.5", "--json", "-"]
    assert main(["bench", "serve", *argv, "--num-threads", "1", "--max-num-seqs", "8"]) == 0
    numbers = json.loads(capsys.readouterr().out)["measures"]
    assert numbers["capacity"]["median"] > 0
    for name in ("first token p50", "first token p99", "between tokens p50", "between tokens p99"):
        assert numbers[f"0.5x {name}"]["median"] > 0
    assert 0 < numbers["0.5x goodput"]["median"] <= numbers["0.5x requests"]["median"]


def test_a_server_that_does_not_start_says_why(capsys):
    argv = ["bench", "serve", "--num-requests", "2", "--kv-cache-memory-bytes", "1", "--num-threads", "1"]
    assert main(argv) == 1
    assert "the server did not start" in capsys.readouterr().err


def test_start_to_first_token(capsys):
    assert main(["bench", "w7", "--rounds", "1", "--num-threads", "1", "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)["measures"]
    assert set(numbers) == {"import quire", "first start, from the disk", "further starts"}
    assert 0 < numbers["import quire"]["median"] < numbers["further starts"]["median"]


def test_a_start_that_fails_says_why():
    with pytest.raises(EngineError, match="no such directory"):
        seconds_to_first_token({"model": "./no-such-model"})


def _in_chunks(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return b"HTTP/1.1 200 OK\r\n\r\n" + body


async def _answered(text: bytes) -> None:
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        await stream_completion(server.sockets[0].getsockname()[1], [1, 2], 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\nnot now", "503 Busy: not now"),
        (_in_chunks(b'data: {"error": "out of room"}\n\n'), "out of room"),
        (_in_chunks(), "None tokens, 3 were asked for"),
    ],
)
def test_a_server_that_answers_otherwise(text, words):
    with pytest.raises(ServerAnswerError, match=words):
        asyncio.run(_answered(text))


@pytest.mark.parametrize("text", [b"", b"HTTP/1.1 200 OK\r\n\r\n20\r\ndata: {", b"HTTP/1.1 200 OK\r\n\r\nhello\r\n"])
def test_a_server_that_goes_away(text):
    with pytest.raises(ServerAnswerError, match="the server"):
        asyncio.run(_answered(text))


def test_a_start_that_says_very_much_does_not_wait_for_a_reader(monkeypatch):
    script = "import sys; sys.stderr.write('x' * 2**20); print('first token', flush=True)"
    monkeypatch.setattr(bench_start, "_FIRST_TOKEN", script)
    assert seconds_to_first_token({}) > 0


def test_a_start_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(bench_start, "_FIRST_TOKEN", "import time; time.sleep(600)")
    monkeypatch.setattr(bench_start, "_LIMIT_SECONDS", 0.3)
    with pytest.raises(EngineError, match=r"took 0\.3 s"):
        seconds_to_first_token({})


def test_an_event_may_be_cut_anywhere():
    event = b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    chunks = [event[:9], event[9:40], event[40:]]
    asyncio.run(_answered(_in_chunks(*chunks)))
