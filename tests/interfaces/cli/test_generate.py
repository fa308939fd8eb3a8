"""quire generate."""

import io
import json

import pytest

from quire.beam_search_params import BeamSearchParams
from quire.errors import RequestError, RequestFailedError
from quire.interfaces.cli import main


def test_one_prompt_streams(engine, capsys):
    assert main(["generate", "Once", "--max-tokens", "5", "--model", "folder"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    assert [prompt.text for prompt in engine.prompts] == ["Once"]
    assert engine.options == {"model": "folder"}
    assert (engine.sampling[0].max_tokens, engine.sampling[0].temperature) == (5, 0.25)
    assert not engine.is_open


def test_a_prompt_from_stdin(engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate"]) == 0
    assert engine.prompts[0].text == "two\nlines"


def test_no_prompt_at_a_terminal_is_a_mistake(engine, capsys, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["generate"]) == 2
    assert "prompt is missing" in capsys.readouterr().err


def test_a_prompt_as_a_message(engine):
    assert main(["generate", "--chat", "Hi"]) == 0
    assert engine.prompts[0].text == "<user>Hi"


def test_several_prompts_run_together_and_are_printed_in_order(engine, capsys):
    assert main(["generate", "one", "two"]) == 0
    assert capsys.readouterr().out == "[1] one\nHello.\n\n[2] two\nHello.\n\n"


def test_several_answers(engine, capsys):
    assert main(["generate", "one", "-n", "2"]) == 0
    assert capsys.readouterr().out == "[1] one\nHello.\nHello.\n\n"


def test_without_streaming(engine, capsys):
    assert main(["generate", "one", "--no-stream"]) == 0
    assert capsys.readouterr().out == "Hello.\n"


def test_as_json(engine, capsys):
    assert main(["generate", "één", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    answer = {"index": 0, "text": "Hello.", "num_tokens": 2, "finish_reason": "stop", "stop_reason": None}
    assert entry == {"prompt": "één", "num_prompt_tokens": 3, "outputs": [answer]}


def test_beams_are_printed_best_first_with_their_scores(engine, capsys):
    assert main(["generate", "one", "--beam-width", "3", "--max-tokens", "5", "--temperature", "1"]) == 0
    assert capsys.readouterr().out == "[1] one\n -1.0000  Hello.\n -2.0000  Hello.\n -3.0000  Hello.\n\n"
    assert engine.sampling == [BeamSearchParams(beam_width=3, max_tokens=5, temperature=1.0)]


def test_what_can_be_said_of_beams(engine, capsys):
    flags = ["--length-penalty", "2", "--early-stopping", "never", "--ignore-eos", "-n", "2"]
    flags += ["--do-sample", "--seed", "3", "--top-p", "0.5", "--top-k", "7", "--repetition-penalty", "1.25"]
    assert main(["generate", "one", "--beam-width", "4", "--json", *flags]) == 0
    [params] = engine.sampling
    assert params == BeamSearchParams(
        beam_width=4,
        max_tokens=256,
        length_penalty=2.0,
        early_stopping="never",
        ignore_eos=True,
        num_return_sequences=2,
        do_sample=True,
        seed=3,
        top_p=0.5,
        top_k=7,
        repetition_penalty=1.25,
    )
    answers = json.loads(capsys.readouterr().out)["outputs"]
    assert [(answer["cumulative_logprob"], answer["score"]) for answer in answers] == [(-2.0, -0.5), (-4.0, -1.0)]


def test_a_single_beam_streams(engine, capsys):
    assert main(["generate", "one", "--beam-width", "2", "-n", "1"]) == 0
    assert capsys.readouterr().out == "Hello.\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--length-penalty", "2"], "--length-penalty: only with --beam-width"),
        (["--early-stopping", "true"], "--early-stopping: only with --beam-width"),
        (["--beam-width", "4", "--min-p", "0.5"], "--min-p: not with --beam-width"),
        (["--do-sample"], "--do-sample: only with --beam-width"),
        (["--beam-width", "4", "--stop", "x"], "--stop: not with --beam-width"),
        (["--beam-width", "x"], "--beam-width x: must be a whole number"),
        (["--beam-width", "0"], "beam_width=0: must be"),
        (["--beam-width", "2", "-n", "3"], "-n 3: at most --beam-width 2 are found. Raise --beam-width."),
        (["--beam-width", "2", "--early-stopping", "maybe"], "maybe"),
        (["-n", "x"], "-n x: must be a whole number"),
        (["-n", "²"], "-n ²: must be a whole number"),
    ],
)
def test_beams_and_flags_that_do_not_fit(engine, capsys, flags, words):
    assert main(["generate", "one", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not engine.was_opened


def test_an_impossible_value_is_said_before_anything_loads(engine, capsys):
    assert main(["generate", "x", "--top-p", "2"]) == 2
    assert "top_p=2.0" in capsys.readouterr().err
    assert not engine.was_opened


@pytest.mark.parametrize(("error", "status"), [(RequestError("too long"), 2), (RequestFailedError("broke"), 1)])
@pytest.mark.parametrize("argv", [["a"], ["a", "b"]])
def test_a_request_that_fails(engine, capsys, error, status, argv):
    engine.error = error
    assert main(["generate", *argv]) == status
    assert capsys.readouterr().err == f"quire: error: {error}\n"
    assert not engine.is_open


def test_ctrl_c_ends_it_quietly(engine, capsys):
    engine.interrupt_after = 1
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr().err == ""
    assert not engine.is_open
    assert engine.num_open == 0, "the request was aborted"
