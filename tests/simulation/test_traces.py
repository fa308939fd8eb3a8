"""Traces in the forms in which others publish them, and lengths that are drawn."""

import json

import pytest

from quire.interfaces.cli.program import main
from quire.simulation.arrivals import Arrival, prompt_of
from quire.simulation.traces import azure, drawn
from quire.simulation.traces.formats import open_trace
from quire.simulation.traces.table import TraceError


def trace_of(tmp_path, name, *lines):
    (tmp_path / name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return open_trace(str(tmp_path / name))


def test_mooncake(tmp_path):
    trace = trace_of(
        tmp_path,
        "trace.jsonl",
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 14]},
        {"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [0]},
    )
    assert trace.has_contents
    assert list(trace.arrivals()) == [Arrival(0.0, 512, 1, ((0, 512),)), Arrival(2.0, 600, 5, ((0, 512), (14, 88)))]


def test_own_form(tmp_path):
    trace = trace_of(
        tmp_path,
        "trace.jsonl",
        {"at": 0, "prompt_tokens": 9, "output_tokens": 2},
        {"at": 0.5, "prompt_tokens": 90, "output_tokens": 2, "prefix": [[3, 64]], "n": 2, "priority": 1},
    )
    assert list(trace.arrivals())[1] == Arrival(0.5, 90, 2, ((3, 64),), num_sequences=2, priority=1)


def test_sharegpt_turns_begin_with_what_was_said(tmp_path):
    said = [("human", "a" * 40), ("gpt", "b" * 80), ("human", "c" * 8), ("gpt", "d" * 4)]
    conversation = {"id": "x", "conversations": [{"from": who, "value": text} for who, text in said]}
    first, second = trace_of(tmp_path, "chats.json", [conversation]).arrivals()
    assert (first.num_prompt_tokens, first.num_output_tokens) == (10, 20)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (32, 1)
    prompts = [prompt_of(arrival, number, 1000).tolist() for number, arrival in enumerate((first, second))]
    assert prompts[1][:10] == prompts[0]


def test_a_long_conversation_takes_no_more_memory_a_turn(tmp_path):
    """Each turn's prompt is all that was said before: a list of that for each of them would be quadratic."""
    said = [{"from": "gpt" if turn % 2 else "human", "value": "a"} for turn in range(2000)]
    chats = [{"conversations": said}, {"conversations": said[:2]}]
    arrivals = list(trace_of(tmp_path, "chats.json", chats).arrivals())
    assert sum(len(arrival.pieces) for arrival in arrivals) == len(arrivals) == 1001
    first, last, other = (prompt_of(arrivals[place], place, 1000).tolist() for place in (0, 999, 1000))
    assert last[:1] == first != other


def test_half_a_character_is_text(tmp_path):
    said = [{"from": "human", "value": "\ud800"}, {"from": "gpt", "value": "b"}]
    [arrival] = trace_of(tmp_path, "chats.json", [{"conversations": said}]).arrivals()
    assert arrival.num_prompt_tokens == 1


@pytest.mark.parametrize("name", ["a" * 5000 + ".csv", "~nobody-of-this-name/trace.csv"])
def test_a_name_that_no_file_has(name):
    with pytest.raises(TraceError, match=r"there is no such file|cannot be read"):
        open_trace(name)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.csv"])
def test_a_file_without_ends_of_lines_is_not_read_to_its_end(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 26)  # of zeros, which take no place on a disk
    with pytest.raises(TraceError, match="line 1: has more than 16,777,216 characters"):
        open_trace(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("trace.jsonl", "{", "line 1: is no JSON"),
        ("trace.jsonl", "[1]", "line 1: must be an object"),
        ("trace.jsonl", {"at": 0, "prompt_tokens": 9, "output_token": 2}, 'Did you mean "output_tokens"'),
        ("trace.jsonl", {"at": -1, "prompt_tokens": 9, "output_tokens": 2}, "at=-1 must be a time"),
        ("trace.jsonl", {"at": 0, "prompt_tokens": 9.5, "output_tokens": 2}, "prompt_tokens='9.5'"),
        ("trace.jsonl", {"at": 0, "prompt_tokens": 9, "output_tokens": 2, "prefix": [[1, 10]]}, "more tokens than"),
        ("trace.jsonl", {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0]}, "hash_ids must"),
        ("chats.json", "{}", "must be a list"),
        ("chats.json", [{"conversations": [{"from": "moon", "value": "x"}]}], "who is that"),
        ("trace.jsonl", "[" * 100_000, "nested too deeply"),
        ("trace.jsonl", '{"at": 1' + 400 * "0" + ', "prompt_tokens": 9, "output_tokens": 2}', "must be a time"),
        ("chats.json", "[" * 100_000, "nested too deeply"),
        ("trace.csv", f"{','.join(azure.COLUMNS)}\n2023-11-16 18:15:46,{5000 * '9'},1", "line 2: ContextTokens='9999"),
        ("trace.csv", f'{",".join(azure.COLUMNS)}\n"' + 200_000 * "x", "is no CSV"),
        ("trace.parquet", "x", "by which its form is known"),
        ("trace.csv", f"{','.join(azure.COLUMNS)}\n2023-11-16 18:15:46.-5,1,1", "TIMESTAMP=.2023-11-16 18:15:46.-5"),
        ("trace.jsonl", {"at": 0, "prompt_tokens": 9, "output_tokens": 2, "beam_search": "no"}, "must be true or"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, name, line, message):
    with pytest.raises(TraceError, match=message.replace("[", r"\[")) as caught:
        trace_of(tmp_path, name, line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", drawn.names())
def test_drawn_lengths_repeat_and_keep_their_means(name):
    trace = drawn.DrawnTrace(name, rate=2.0, num_requests=3000, seed=5)
    arrivals = list(trace.arrivals())
    assert arrivals == list(trace.arrivals())
    assert arrivals[-1].at == pytest.approx(1500, rel=0.1)
    means = {"sharegpt": (161, 338), "alpaca": (19.3, 58.5), "azure-conv": (1155, 211)}.get(name)
    if means is not None:
        assert sum(one.num_prompt_tokens for one in arrivals) / 3000 == pytest.approx(means[0], rel=0.1)
        assert sum(one.num_output_tokens for one in arrivals) / 3000 == pytest.approx(means[1], rel=0.1)


def test_a_trace_at_another_rate_begins_again_when_it_ends(tmp_path):
    trace = trace_of(tmp_path, "trace.jsonl", {"at": 0, "prompt_tokens": 9, "output_tokens": 2})
    arrivals = list(drawn.at_rate(trace, 4.0, 100, seed=0))
    assert len(arrivals) == 100
    assert arrivals[-1].at == pytest.approx(25, rel=0.4)


def test_workloads_by_name_need_a_rate(capsys):
    argv = ["simulate", "--model", "opt-13b", "--device", "a100-40gb", "--trace", "alpaca"]
    assert main(argv) == 2
    assert "Give --rate" in capsys.readouterr().err
    assert main([*argv, "--rate", "5", "--num-requests", "20"]) == 0
    assert "20 in" in capsys.readouterr().out
