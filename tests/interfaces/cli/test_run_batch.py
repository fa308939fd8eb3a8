"""quire run-batch, on a fake engine."""

import json
from contextlib import asynccontextmanager

import pytest

from quire.interfaces.cli import main, run_batch
from quire.testing.fake_engine import fake_engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(name, url=CHAT, **fields):
    body = {"messages": [{"role": "user", "content": name}]} if url == CHAT else {"prompt": name}
    return {"custom_id": name, "method": "POST", "url": url, "body": {**body, **fields}}


class Desk:
    """A folder with an input, and the command over it."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.output = folder / "out.jsonl"
        self.errors = folder / "errors.jsonl"
        self.replies = []
        self.was_opened = False
        # told to the fake engine before anything runs
        self.prepare = lambda fake: None

    def write(self, *lines):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
        (self.folder / "in.jsonl").write_text("\n".join(texts))

    def run(self, *flags):
        source = str(self.folder / "in.jsonl")
        return main(["run-batch", "-i", source, "-o", str(self.output), "--no-progress", *flags])

    def results(self, path=None):
        lines = [json.loads(text) for text in (path or self.output).read_text().splitlines()]
        assert len({one["custom_id"] for one in lines}) == len(lines), "a request was answered twice"
        return {one["custom_id"]: one for one in lines}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")
    made = Desk(tmp_path)

    @asynccontextmanager
    async def open_engine(options):
        made.was_opened = True
        engine = await fake_engine(tmp_path / "model")
        made.prepare(engine.fake)
        try:
            yield engine
        finally:
            made.num_asked = len(engine.fake.requests)
            engine.shutdown()

    monkeypatch.setattr(run_batch, "open_engine", open_engine)
    return made


def test_all_are_answered(desk, capsys):
    desk.write(line("a"), "", line("b", TEXT, max_tokens=3), line("c"))
    assert desk.run() == 0
    results = desk.results()
    assert set(results) == {"a", "b", "c"}
    assert {one["response"]["status_code"] for one in results.values()} == {200}
    assert results["b"]["response"]["body"]["object"] == "text_completion"
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "3 answered, 0 failed" in printed.err


def test_the_exit_status_says_whether_some_failed(desk, capsys):
    desk.write(line("good"), line("bad", temperature=-1))
    assert desk.run() == run_batch.SOME_FAILED == 3
    assert desk.results()["bad"]["response"]["status_code"] == 400
    desk.output.unlink()
    assert desk.run("--error-file", str(desk.errors)) == 3
    assert set(desk.results()) == {"good"}
    assert set(desk.results(desk.errors)) == {"bad"}
    assert str(desk.errors) in capsys.readouterr().err


def test_an_output_is_not_overwritten(desk, capsys):
    desk.write(line("a"))
    desk.output.write_text("mine")
    assert desk.run() == 2
    assert desk.output.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert not desk.was_opened
    assert desk.run("--force") == 0
    assert set(desk.results()) == {"a"}
    assert desk.run("--force", "--resume") == 2


def test_resuming_computes_what_is_missing(desk):
    desk.write(*(line(f"r{number}") for number in range(4)))
    assert desk.run() == 0
    whole = desk.output.read_text().splitlines(keepends=True)
    # two whole lines, and one that a crash has cut
    desk.output.write_text("".join(whole[:2]) + whole[2][:40])
    assert desk.run("--resume") == 0
    assert desk.num_asked == 2
    assert set(desk.results()) == {"r0", "r1", "r2", "r3"}
    assert desk.output.read_text().startswith("".join(whole[:2]))
    assert desk.run("--resume") == 0
    assert desk.num_asked == 0


def test_resuming_tries_again_what_is_in_the_error_file(desk):
    flags = ("--error-file", str(desk.errors))
    desk.write(line("a"), line("b", temperature=-1))
    assert desk.run(*flags) == 3
    desk.write(line("a"), line("b"))
    assert desk.run(*flags, "--resume") == 0
    assert set(desk.results()) == {"a", "b"}
    assert not desk.errors.exists()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", ":2: This line is not parseable"),
        (line("a"), ":2: The custom_id 'a' is that of line 1"),
        ({**line("b"), "url": "http://169.254.169.254/v1/chat/completions"}, ":2: url is"),
        ({**line("b"), "url": "/v1/admin/memory"}, ":2: url is"),
        ({**line("b"), "method": "GET"}, ":2: method is"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_anything_runs(desk, capsys, bad, said):
    """SEC-09: a line goes to an endpoint of this process, or nowhere."""
    desk.write(line("a"), bad)
    assert desk.run() == 2
    assert said in capsys.readouterr().err
    assert not desk.was_opened
    assert not desk.output.exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["-i", "http://127.0.0.1/x", "-o", "out"],
        ["-i", "file:///etc/passwd", "-o", "out"],
        ["-i", "s3://x/y", "-o", "out"],
        ["-i", "missing.jsonl", "-o", "out"],
        ["-i", "IN", "-o", "http://127.0.0.1/x"],
        ["-i", "IN", "-o", "IN", "--force"],
        ["-i", "IN", "-o", "OUT", "--error-file", "OUT"],
        ["-i", "IN", "-o", "OUT", "--error-file", "IN", "--force"],
        ["-i", "IN", "-o", "/no/such/folder/out"],
        ["-i", "IN", "-o", "OUT", "--concurrency", "0"],
        ["-i", "IN"],
        ["-o", "OUT"],
    ],
)
def test_what_is_asked_for_is_checked(desk, capsys, flags):
    desk.write(line("a"))
    paths = {"IN": str(desk.folder / "in.jsonl"), "OUT": str(desk.output)}
    assert main(["run-batch", *(paths.get(flag, flag) for flag in flags)]) == 2
    assert capsys.readouterr().err.startswith("quire: error: ")
    assert not desk.was_opened
    assert (desk.folder / "in.jsonl").read_text() == json.dumps(line("a"))


def test_an_engine_that_dies_ends_the_run_and_keeps_what_is_done(desk, capsys):
    def prepare(fake):
        def reply(request, index):
            if len(fake.requests) == 3:
                fake.die("out of memory")
                return "never said to its end" * 20
            return "fine"

        fake.reply_to = reply

    desk.prepare = prepare
    desk.write(*(line(f"r{number}") for number in range(5)))
    assert desk.run("--concurrency", "1") == 1
    assert "out of memory" in capsys.readouterr().err
    assert set(desk.results()) == {"r0", "r1"}


def test_a_full_disk_is_said(desk, capsys, monkeypatch):
    from quire.interfaces.gateway.batches.results import Results

    def append(self, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "append", append)
    desk.write(line("a"))
    assert desk.run() == 2
    assert "No space left on device" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done(desk, monkeypatch):
    from quire.interfaces.gateway.batches.results import Results

    genuine = Results.append

    def append(self, line):
        genuine(self, line)
        if len(self.tally.done) == 2:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)

    desk.write(*(line(f"r{number}") for number in range(5)))
    monkeypatch.setattr(Results, "append", append)
    assert desk.run("--concurrency", "1") == 130
    assert {"r0", "r1"} <= set(desk.results()) != {f"r{number}" for number in range(5)}
    monkeypatch.undo()


def test_the_bar_counts_requests_and_tokens(desk, capsys):
    desk.write(line("a"), line("b"))
    source = str(desk.folder / "in.jsonl")
    assert main(["run-batch", "-i", source, "-o", str(desk.output)]) == 0
    assert "2/2" in capsys.readouterr().err
