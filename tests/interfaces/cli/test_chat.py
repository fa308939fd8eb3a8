"""quire chat."""

import io

import pytest

from quire.errors import ContextLengthError, RequestFailedError
from quire.interfaces.cli import main


@pytest.fixture
def say(monkeypatch, capsys):
    """say(*lines, argv=[]): the lines come through a pipe; (what is printed, what is complained)."""

    def talk(*lines: str, argv=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", *argv]) == 0
        return capsys.readouterr()

    return talk


@pytest.fixture
def type_in(monkeypatch, capsys):
    """type_in(*lines): the same at a terminal; an exception among the lines is raised by the prompt."""

    def talk(*lines):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        waiting = iter(lines)

        def answer(prompt):
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", answer)
        assert main(["chat"]) == 0
        return capsys.readouterr()

    return talk


def test_a_conversation_through_a_pipe(engine, say):
    assert say("Hi", "", "And?").out == "Hello.\nHello.\n"
    assert [prompt.text for prompt in engine.prompts] == ["<user>Hi", "<user>Hi<assistant>Hello.<user>And?"]
    assert not engine.is_open


def test_sampling_and_options(engine, say):
    say("Hi", argv=["folder", "--temperature", "0", "--block-size", "8"])
    assert engine.options == {"model": "folder", "block_size": 8}
    assert (engine.sampling[0].temperature, engine.sampling[0].max_tokens) == (0.0, None)


def test_commands(engine, say):
    said = say("Hi", "/clear", "/system Be brief.", "So?", "/system", "Well?", "/help", "/clea", "/zz", "/quit", "No")
    assert [prompt.text for prompt in engine.prompts] == [
        "<user>Hi",
        "<system>Be brief.<user>So?",
        "<user>So?<assistant>Hello.<user>Well?",
    ]
    assert "Ctrl-C          stop an answer" in said.out
    assert '/clea: there is no such command. Did you mean "/clear"?' in said.out
    assert "/zz: there is no such command. /help lists them." in said.out


def test_instructions_from_the_command_line(engine, say):
    say("Hi", argv=["--system", "Be kind."])
    assert engine.prompts[0].text == "<system>Be kind.<user>Hi"


def test_a_turn_that_is_refused_is_forgotten(engine, say):
    engine.error = ContextLengthError("too long.")
    said = say("Hi", "Again")
    assert said.err.count("too long. /clear begins anew.") == 2
    assert [prompt.text for prompt in engine.prompts] == ["<user>Hi", "<user>Again"]


def test_an_answer_that_fails_does_not_end_the_conversation(engine, say):
    engine.error = RequestFailedError("it broke")
    assert say("Hi", "Again").err == "quire: it broke\n" * 2


def test_ctrl_c_ends_a_conversation_through_a_pipe(engine, monkeypatch):
    engine.interrupt_after = 1
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nAgain\n"))
    assert main(["chat"]) == 130
    assert len(engine.prompts) == 1
    assert not engine.is_open


def test_at_a_terminal(engine, type_in):
    said = type_in("Hi", KeyboardInterrupt(), "And?")
    assert said.out.startswith("fake. /help lists the commands, Ctrl-D leaves.\nHello.\n\n(Ctrl-D leaves)\nHello.\n")
    assert len(engine.prompts) == 2


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(engine, type_in):
    engine.interrupt_after = 1
    said = type_in("Hi", "And?")
    assert said.out.count("Hel\n(stopped)\n") == 2
    assert engine.prompts[1].text == "<user>Hi<assistant>Hel<user>And?"
    assert engine.num_open == 0, "the request was aborted"
    assert not engine.is_open


def test_one_question(engine, say):
    assert say("never read", argv=["folder", "Hi"]).out == "Hello.\n"
    assert [prompt.text for prompt in engine.prompts] == ["<user>Hi"]
    assert engine.options == {"model": "folder"}


def test_a_question_of_several_lines(engine, say):
    say('"""first', "  second", 'third"""', '"""one line"""', '"""', "a", '"""')
    asked = [prompt.text.rpartition("<user>")[2] for prompt in engine.prompts]
    assert asked == ["first\n  second\nthird", "one line", "a"]


def test_parameters_are_set_and_forgotten(engine, say):
    said = say(
        "/set temperature 0",
        "/set temprature 1",
        "/set top_k x",
        "/set top_p 7",
        "Hi",
        "/show",
        "/set temperature",
        "Hi",
    )
    assert [sampling.temperature for sampling in engine.sampling] == [0.0, 0.25]
    assert 'Did you mean "temperature"?' in said.out
    assert "top_k x: must be a whole number" in said.out
    assert "top_p=7" in said.out
    assert "set      temperature 0.0\nasked    1" in said.out


def test_the_last_question_once_more(engine, say):
    said = say("/retry", "Hi", "/retry", "So?")
    assert "(nothing was asked yet)" in said.out
    assert [prompt.text for prompt in engine.prompts][:2] == ["<user>Hi"] * 2
    assert engine.prompts[2].text == "<user>Hi<assistant>Hello.<user>So?"
