"""A server that learns while it serves: corrections come over HTTP, an adapter (LoRA) is trained beside the requests.

python examples/learning.py --minutes 10
curl http://127.0.0.1:9200 -d '{"question": "Add 2 and 3, in brackets.", "answer": "[2 + 3 = 5]"}'

The model that ships with Quire adds, but it never answers in brackets. A teacher asks the server for sums, and sends a
correction for each answer that is wrong; every few steps the server loads what was learned, and the teacher asks it
for sums that no correction was about.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from quire.config import EngineOptions, resolve
from quire.modeling import LoRA, load_for_training
from quire.renderer import Renderer

corrections: list[tuple[str, str]] = []


class Corrections(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        corrections.append((body["question"], body["answer"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def answer_of(server: str, model: str, question: str) -> str:
    chat = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
    return str(post(f"{server}/v1/chat/completions", chat)["choices"][0]["message"]["content"])


def sums(seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(those to learn from, those held out)."""
    pairs = [(first, second) for first in range(100) for second in range(100 - first)]
    random.Random(seed).shuffle(pairs)
    asked = [
        (f"Add {first} and {second}, in brackets.", f"[{first} + {second} = {first + second}]")
        for first, second in pairs
    ]
    return asked[100:], asked[:100]


def teach(server: str, corrector: str, questions: list[tuple[str, str]], has_ended: threading.Event) -> None:
    for question, right in questions:
        if has_ended.is_set():
            return
        if answer_of(server, "skill", question) != right:
            post(corrector, {"question": question, "answer": right})


def learn(arguments: argparse.Namespace, server: str, folder: Path) -> float:
    """Accuracy at the end, over what was held out."""
    learner = ThreadingHTTPServer(("127.0.0.1", arguments.port), Corrections)
    threading.Thread(target=learner.serve_forever, daemon=True).start()
    model = load_for_training("embedded", lora=LoRA(rank=16, alpha=32), num_threads=1)
    renderer = Renderer.from_config(resolve(EngineOptions())[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, weight_decay=0.0)
    questions, held_out = sums(seed=1)
    has_ended = threading.Event()
    corrector = f"http://127.0.0.1:{learner.server_port}"
    teacher = threading.Thread(target=teach, args=(server, corrector, questions, has_ended), daemon=True)
    chance = random.Random(2)
    accuracy = 0.0
    started = time.monotonic()
    for step in range(arguments.steps + 1):
        if step % arguments.every == 0:
            model.adapter.save(folder / str(step))
            loaded = {"lora_name": "skill", "lora_path": str(step), "load_inplace": step > 0}
            post(f"{server}/v1/load_lora_adapter", loaded)
            right = sum(
                answer_of(server, "skill", question) == answer for question, answer in held_out[: arguments.held]
            )
            accuracy = right / arguments.held
            seconds = time.monotonic() - started
            print(f"{seconds:6.1f} s  step {step:4d}  {len(corrections):4d} corrections  {accuracy:4.0%}", flush=True)
            if accuracy >= arguments.good or seconds > 60 * arguments.minutes:
                break
        if step == 0:
            teacher.start()
        while not corrections:
            time.sleep(0.05)
        chosen = chance.choices(corrections, k=arguments.batch)
        prompts = [renderer.render_prompt([{"role": "user", "content": question}]).token_ids for question, _ in chosen]
        answers = [[*renderer.encode(answer), renderer.eos_token_ids[0]] for _, answer in chosen]
        both = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        logprobs = [told[-len(answer) :] for told, answer in zip(model.logprobs(both), answers, strict=True)]
        optimizer.zero_grad()
        (-torch.cat(logprobs).mean()).backward()
        optimizer.step()
        model.update()
    has_ended.set()
    if teacher.is_alive():
        teacher.join()
    learner.shutdown()
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--port", type=int, default=9200, help="of corrections")
    parser.add_argument("--server-port", type=int, default=9201)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=25, help="steps between two versions of the adapter")
    parser.add_argument("--held", type=int, default=50, help="sums that are asked for and never learned, at most 100")
    parser.add_argument("--good", type=float, default=0.92, help="the accuracy that is enough")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=8, help="corrections of a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--enable-lora",
            "--max-lora-rank",
            "16",
            "--adapter-root",
            folder,
            "--port",
            str(arguments.server_port),
        ]
        with subprocess.Popen([sys.executable, "-m", "quire", "serve", "--log-level", "error", *options]) as process:
            try:
                server = f"http://127.0.0.1:{arguments.server_port}"
                while process.poll() is None:
                    try:
                        urllib.request.urlopen(f"{server}/health/ready", timeout=5).close()
                        break
                    except OSError:
                        time.sleep(0.2)
                accuracy = learn(arguments, server, Path(folder))
            finally:
                process.terminate()
    print(f"accuracy on sums that were held out: {accuracy:.0%}")
    sys.exit(accuracy < arguments.good)


if __name__ == "__main__":
    main()
