"""What a trainer beside a server does to those who only use the server (docs/training.md).

    python benchmarks/learning.py [--seconds 8] [--rounds 4] [--streams 4]

A server of the embedded model answers streams of the model itself. A process on a processor of its own either burns
that processor, or trains an adapter (LoRA) there and has the server load each version of it, as examples/learning.py
does; they take turns. Reported is the time between two tokens of a stream, at the median and at p99, and the ratio of
neighbouring turns. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

RANK = 16
STEPS_OF_A_VERSION = 10
NUM_OUTPUT = 64
QUESTIONS = ("Tell me about the sea.", "What does a dog do all day?", "Who lives in the wood?", "Tell me about snow.")


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def burn(processor: int, has_begun: Event, has_ended: Event) -> None:
    os.sched_setaffinity(0, {processor})
    has_begun.set()
    while not has_ended.is_set():
        sum(range(10_000))


def train(processor: int, has_begun: Event, has_ended: Event, server: str, folder: Path, number: int) -> None:
    os.sched_setaffinity(0, {processor})
    import torch

    from quire.config import EngineOptions, resolve
    from quire.modeling import LoRA, load_for_training
    from quire.renderer import Renderer

    model = load_for_training("embedded", lora=LoRA(rank=RANK, alpha=2 * RANK), num_threads=1)
    renderer = Renderer.from_config(resolve(EngineOptions())[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chance = random.Random(number)
    step = 0
    while not has_ended.is_set():
        pairs = [(chance.randrange(50), chance.randrange(50)) for _ in range(8)]
        prompts = [
            renderer.render_prompt([{"role": "user", "content": f"Add {one} and {other}."}]).token_ids
            for one, other in pairs
        ]
        answers = [renderer.encode(f"[{one} + {other} = {one + other}]") for one, other in pairs]
        told = model.logprobs([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
        optimizer.zero_grad()
        loss = -torch.cat([row[-len(answer) :] for row, answer in zip(told, answers, strict=True)]).mean()
        loss.backward()
        optimizer.step()
        model.update()
        if step % STEPS_OF_A_VERSION == 0:
            version = f"{number}-{step}"
            model.adapter.save(folder / version)
            post(f"{server}/v1/load_lora_adapter", {"lora_name": "skill", "lora_path": version, "load_inplace": True})
            has_begun.set()
        step += 1


def stream(server: str, question: str, has_ended: threading.Event, gaps: list[float]) -> None:
    chat = {"messages": [{"role": "user", "content": question}], "max_tokens": NUM_OUTPUT, "ignore_eos": True}
    body = json.dumps({**chat, "stream": True, "temperature": 0}).encode()
    while not has_ended.is_set():
        request = urllib.request.Request(f"{server}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            before = None
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now


def turn(
    server: str, seconds: float, num_streams: int, processor: int, target: Any, args: tuple[Any, ...]
) -> tuple[float, float]:
    """(median, p99) of the milliseconds between two tokens."""
    context = multiprocessing.get_context("spawn")
    has_begun, has_ended = context.Event(), context.Event()
    beside = context.Process(target=target, args=(processor, has_begun, has_ended, *args), daemon=True)
    beside.start()
    has_begun.wait(120)
    ended = threading.Event()
    gaps: list[list[float]] = [[] for _ in range(num_streams)]
    threads = [
        threading.Thread(target=stream, args=(server, QUESTIONS[number % len(QUESTIONS)], ended, gaps[number]))
        for number in range(num_streams)
    ]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    ended.set()
    for thread in threads:
        thread.join()
    has_ended.set()
    beside.join(60)
    middle, high = np.percentile(np.concatenate([np.array(one) for one in gaps]), (50, 99)) * 1000
    return float(middle), float(high)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_ready(server: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{server}/health/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server ended at its start")


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=4)
    arguments = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        raise SystemExit("needs two processors: one for the server, one for what is beside it")
    # this process and the server; children inherit it
    os.sched_setaffinity(0, processors[:-1])
    last = processors[-1]
    port = free_port()
    server = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--enable-lora", "--max-lora-rank", str(RANK), "--adapter-root", name, "--port", str(port)]
        command = [sys.executable, "-m", "quire", "serve", "--log-level", "error", *options]
        with subprocess.Popen(command) as process:
            try:
                wait_ready(server, process)
                found: dict[str, list[tuple[float, float]]] = {"burns": [], "trains": []}
                for number in range(arguments.rounds):
                    common = (server, arguments.seconds, arguments.streams, last)
                    found["burns"].append(turn(*common, burn, ()))
                    found["trains"].append(turn(*common, train, (server, folder, number)))
                    for kind, turns in found.items():
                        print(f"{kind:7s} {turns[-1][0]:7.2f} ms, p99 {turns[-1][1]:7.2f} ms", flush=True)
            finally:
                process.terminate()
    ratios = [beside[1] / alone[1] for alone, beside in zip(found["burns"], found["trains"], strict=True)]
    print(f"p99 beside a trainer: {median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}) that beside a burner")
    print(json.dumps({"milliseconds between tokens, (median, p99) of each turn": found}))


if __name__ == "__main__":
    main()
