"""The command line as a whole: what it prints and returns, and that mistakes are one line."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from quire.config import EngineOptions
from quire.config.process_memory import MemoryReport
from quire.errors import CapacityError, EngineDeadError
from quire.interfaces.cli import main, plan, program
from quire.testing.greedy import real_core
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.version import __version__

SRC = Path(__file__).parents[3] / "src"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")


@pytest.fixture
def command(monkeypatch):
    """A command named `try` that does what the test says."""
    module = types.ModuleType("quire.interfaces.cli.trial")
    module.add_arguments = lambda parser: parser.add_argument("--stop-at")
    module.run = lambda arguments: 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(program.COMMANDS, "try", (module.__name__, "a trial"))
    return module


def test_version(capsys):
    for flag in ("--version", "-V"):
        assert main([flag]) == 0
        assert capsys.readouterr().out == f"quire {__version__}\n"


def test_help_names_every_command_and_gives_examples(capsys):
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in program.COMMANDS)
        assert "examples:" in text


@pytest.mark.parametrize("name", program.COMMANDS)
def test_each_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"usage: quire {name}" in capsys.readouterr().out


SIMULATED = ("--model", "opt-13b", "--device", "a100-40gb", "--trace", "alpaca")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serv"], 'no such command. Did you mean "serve"?'),
        (["xyz"], "There are: serve, chat"),
        (["--versoin"], 'Did you mean "--version"?'),
        (["serve", "--max-model-length", "3"], 'Did you mean "--max-model-len"?'),
        (["serve", "--portt=3"], 'Did you mean "--port"?'),
        (["serve", "--zzz"], "quire serve --help lists all"),
        (["serve", "a", "b"], "one argument too many: 'b'"),
        (["serve", "a", "--model", "b"], "both 'a' and --model 'b'"),
        (["serve", "--port", "http"], "--port http: must be a whole number between 0 and 65535"),
        (["serve", "--port", "65536"], "65536"),
        (["serve", "--shutdown-timeout", "-1"], "between 0 and 86400"),
        (["serve", "--block-size", "0"], "block_size=0: must be between 1 and 256"),
        (["serve", "--dtype", "bf16"], 'Did you mean "bfloat16"?'),
        (["serve", "--kv-cache-memory-bytes", "lots"], "must be a size such as"),
        (["generate", "--max-tokens"], "expected one argument"),
        (["generate", "--max-tokens", "many", "x"], "--max-tokens many: must be a whole number"),
        (["generate", "--temperature", "hot", "x"], "must be a number"),
        (["generate", "-n", "two", "x"], "must be a whole number"),
        (["bench", "--num-requests", "0"], "1 or more"),
        (["bench", "--shared-prefix", "9", "--input-length", "8"], "must not exceed"),
        (["bench", "--temperature", "hot"], "must be a number"),
        (["chat", "/no/such/folder"], "no such directory"),
        (["chat", str(SRC / "quire" / "embedded" / "config.json")], "is a file. Give the directory"),
        (["plan", ""], "must not be empty"),
        (["generate", "--model", "", "x"], "model='': must not be empty"),
        (["serve", "--served-model-name", ""], "served_model_name='': must not be empty"),
        (["serve", "--api-key", ""], "must not be empty"),
        (["serve", "--max-model-len", "1"], "max_model_len=1: must be at least 2"),
        (["serve", "--hf-overrides", "[" * 100_000], "hf_overrides=[[[["),
        (["generate", "--model", "~nobody-of-this-name/model", "x"], "no such directory"),
        (["simulate", *SIMULATED, "--seed", "9" * 5000], "must be a whole number, 0 or more"),
        (["simulate", *SIMULATED, "--rate", "1e-320"], "must be a number above 0"),
    ],
)
def test_a_mistake_is_one_line(argv, words, capsys):
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("quire: error: ")
    assert words in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "status", "shown"),
    [
        (CapacityError("too little memory"), 2, "quire: error: too little memory\n"),
        (EngineDeadError("it died"), 1, "quire: error: it died\n"),
        (CapacityError("x" * 100_000), 2, f"quire: error: {'x' * 4000}...\n"),
        (OSError(36, "File name too long", "a"), 1, "quire: error: [Errno 36] File name too long: 'a'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_goes_wrong_decides_the_exit_status(command, raised, status, shown, capsys):
    def run(arguments):
        raise raised

    command.run = run
    assert main(["try"]) == status
    assert capsys.readouterr().err == shown


_INTERRUPTED_AT_AN_IMPORT = """
import os
import signal
import sys


class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, CtrlC())
from quire.interfaces.cli import main
sys.exit(main(["serve", "--help"]))
"""


@pytest.mark.parametrize("module", ["quire.interfaces.cli.program", "quire.errors", "quire.interfaces.cli.serve"])
def test_ctrl_c_while_the_code_of_a_command_is_read_says_nothing(module):
    command = [sys.executable, "-c", _INTERRUPTED_AT_AN_IMPORT, module]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_our_own_mistakes_keep_their_traceback(command):
    def run(arguments):
        raise ZeroDivisionError

    command.run = run
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_underscores_are_dashes_in_names_and_stay_in_values(command):
    seen = []
    command.run = lambda arguments: seen.append(arguments.stop_at) or 0
    assert main(["try", "--stop_at", "a_b"]) == 0
    assert main(["try", "--stop_at=x_y"]) == 0
    assert seen == ["a_b", "x_y"]


def run_quire(*argv: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "quire.interfaces.cli", *argv]
    return subprocess.run(command, env=environment, text=True, timeout=60, check=False, **options)


def test_as_a_process():
    done = run_quire("serv", capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    try:
        for command in ("options", "--help"):
            done = run_quire(command, stdout=write, stderr=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (0, "")
    finally:
        os.close(write)


def test_a_level_that_there_is_not_in_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "zz")
    assert main(["generate", "x"]) == 2
    assert "QUIRE_LOG_LEVEL=zz: must be one of debug, info" in capsys.readouterr().err


def test_an_empty_key_in_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_API_KEY", "")
    assert main(["serve"]) == 2
    assert "QUIRE_API_KEY: the key is empty" in capsys.readouterr().err


def test_stdin_that_is_no_text():
    # lenient about bytes in the C locale, so the encoding is said
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "quire.interfaces.cli", "generate"]
    done = subprocess.run(command, env=environment, input=b"\xff\xfe", capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"quire: error: stdin is not UTF-8")


@pytest.mark.parametrize(("name", "value"), [("hidden_size", -4), ("num_hidden_layers", 10**30), ("vocab_size", 0)])
def test_a_plan_for_impossible_sizes(tmp_path, capsys, name, value):
    config = {"model_type": "x", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    assert main(["plan", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err


def test_a_plan_that_does_not_fit(capsys):
    assert main(["plan", "--memory", "1K"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["plan"]) == 0


def test_a_plan_is_for_this_machine(monkeypatch, capsys):
    report = MemoryReport(24 * 2**30, 960 << 20, "the machine's memory")
    monkeypatch.setattr(plan, "process_memory", lambda: report)
    assert main(["plan"]) == 0
    text = capsys.readouterr().out
    assert "memory              24.00 GiB x 0.9 (gpu_memory_utilization), 960.0 MiB of it free now" in text
    assert "204.0 MiB for the program, 5.6 MiB for weights" in text
    # half of what is left
    assert "on a CPU            253,312 tokens" in text


def test_a_plan_for_workers_that_share_experts_and_what_is_kept_of_a_token(tmp_path, capsys):
    path = make_checkpoint(tmp_path, "mixtral", num_local_experts=5)
    sharing = ["--tensor-parallel-size", "2", "--context-parallel-size", "2", "--enable-expert-parallel"]
    assert main(["plan", str(path), "--dtype", "float32", *sharing]) == 0
    text = capsys.readouterr().out
    core = real_core(
        path, tensor_parallel_size=2, context_parallel_size=2, enable_expert_parallel=True, num_gpu_blocks_override=64
    )
    try:
        num_bytes = core.executor.control("statistics", {})["kv_cache_bytes"]
    finally:
        core.shutdown()
    per_token = num_bytes // (64 * EngineOptions.block_size)
    assert (
        f"4 (2 share each layer, 1 stages, 2 share what is kept of a token), {per_token} bytes a token on each" in text
    )
    assert main(["plan", str(path), "--context-parallel-size", "3"]) == 2
    assert "context_parallel_size=3: must divide the 16 tokens" in capsys.readouterr().err


def test_help_and_version_need_nothing_heavy():
    code = (
        "import sys; from quire.interfaces.cli import main\n"
        "main(['--version']); main(['--help']); main(['serve', '--help'])\n"
        "heavy = ('torch', 'transformers', 'tokenizers', 'fastapi', 'numpy', 'zmq')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
