"""A real server writes its run down; what is left after kill -9 is replayed, in another process and folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx2 as httpx
import psutil
import pytest
from tests.support.server_process import ServerProcess

from quire.interfaces.cli.program import main

OPTIONS = ["--port", "0", "--num-threads", "1", "--max-model-len", "256", "--num-gpu-blocks-override", "120"]


def serve(folder, *options):
    command = ["-m", "quire.interfaces.cli", "serve", *OPTIONS, "--record", str(folder / "run.qlog"), *options]
    return ServerProcess([*command, "--crash-reports", str(folder / "crash_reports")])


def ask(url, number):
    body = {"model": "any", "prompt": f"Story {number}: once upon a time", "max_tokens": 150, "n": 1 + number % 2}
    body |= {"temperature": number % 2, "seed": number, "ignore_eos": True}
    body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    try:
        httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    except httpx.HTTPError:
        return


def keep_busy(url, log):
    """Until a good part of the run is on the disk."""
    threads = [threading.Thread(target=ask, args=(url, number), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    before = log.stat().st_size
    while log.stat().st_size < before + 2_000:
        time.sleep(0.01)
    return threads


def engine_of(server):
    """The process of its core."""
    children = psutil.Process(server.pid).children()
    return next(child for child in children if "quire.engine_core.process" in " ".join(child.cmdline()))


def replay(log, folder, *options):
    return subprocess.run(
        [sys.executable, "-m", "quire", "replay", str(log), *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_server_that_was_killed_is_replayed_up_to_its_last_frame(tmp_path):
    log = tmp_path / "run.qlog"
    with serve(tmp_path) as server:
        keep_busy(server.wait_ready(), log)
        engine = engine_of(server)
        server.signal(signal.SIGKILL)
        server.wait()
        psutil.wait_procs([engine], timeout=30)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for options in ((), ("--no-model",)):
        done = replay(log, elsewhere, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 differences" in done.stdout
        assert "it was cut off" in done.stdout
        assert " 0 steps" not in done.stdout


def test_a_crash_report_names_the_command_that_replays_what_led_to_it(tmp_path, capsys):
    log = tmp_path / "run.qlog"
    with serve(tmp_path) as server:
        url = server.wait_ready()
        threads = keep_busy(url, log)
        os.kill(engine_of(server).pid, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        server.wait_for("serves again")
        ask(url, 1)
    (report,) = (tmp_path / "crash_reports").iterdir()
    command = json.loads(report.read_text())["replay"]
    assert command == f"quire replay {log}"
    assert main([*command.split()[1:], "--no-model"]) == 0
    assert "0 differences" in capsys.readouterr().out
    # the engine that followed wrote its own, and ended in good order
    assert main(["replay", str(tmp_path / "run.2.qlog"), "--no-model"]) == 0
    told = capsys.readouterr().out
    assert "0 differences" in told
    assert "the engine was ended" in told


@pytest.mark.parametrize(
    "flags",
    [("--record-redact",), pytest.param(("--data-parallel-size", "2"), marks=pytest.mark.nightly)],
)
def test_each_engine_writes_its_own_log(tmp_path, flags, capsys):
    with serve(tmp_path, *flags) as server:
        url = server.wait_ready()
        for number in range(4):
            ask(url, number)
        server.signal(signal.SIGTERM)
        server.wait()
    logs = sorted(tmp_path.glob("*.qlog"))
    assert len(logs) == (2 if "--data-parallel-size" in flags else 1)
    for log in logs:
        assert main(["replay", str(log), "--no-model"]) == 0
        assert "0 differences" in capsys.readouterr().out
    assert main(["replay", str(logs[0]), "--explain", "0"]) == 0
    assert "request 0 arrived" in capsys.readouterr().out
    assert main(["replay", str(logs[0]), "--no-model", "--trace", str(tmp_path / "trace.json")]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
