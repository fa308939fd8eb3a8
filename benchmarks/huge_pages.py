"""What a token takes while weights lie in the pages of their file, and once they have moved (docs/worker.md).

    python benchmarks/huge_pages.py MODEL [--quantization int8] [--rounds 3] [--tokens 64] [--num-threads 1]

Milliseconds of processor time a token, of engines in processes of their own by turns, both after a warm start: one
leaves the weights where they are, the other waits until all have moved. Neighbours on a shared machine change such a
time less than the clock's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median


def measured(arguments: argparse.Namespace, *, moves: bool) -> float:
    """Of an engine in a new process."""
    options = {
        "model": arguments.model,
        "quantization": arguments.quantization,
        "dtype": "bfloat16",
        "num_threads": arguments.num_threads,
        "max_model_len": arguments.tokens + 128,
        "engine_process": False,
    }
    command = [sys.executable, __file__, "--child", json.dumps([options, arguments.tokens, moves])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def child(options: dict[str, object], num_tokens: int, moves: bool) -> None:
    from quire import LLM, SamplingParams
    from quire.worker.huge_pages import HugePages

    started: list[HugePages] = []
    start = HugePages.start

    def noted(moving: HugePages) -> None:
        started.append(moving)
        if moves:
            start(moving)

    HugePages.start = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5, 69))}
    with LLM(**options) as llm:
        llm.generate([prompt], params, use_tqdm=False)
        for moving in started:
            moving.wait()
        began = time.process_time()
        llm.generate([prompt], params, use_tqdm=False)
        seconds = time.process_time() - began
    if not started:
        raise SystemExit("this start mapped no weights: they have 256 MiB or more, and lie packed since a first start")
    print(seconds / num_tokens * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(*arguments.child)
        return
    if arguments.model is None:
        parser.error("name a model")
    rounds = [(measured(arguments, moves=False), measured(arguments, moves=True)) for _ in range(arguments.rounds)]
    for before, after in rounds:
        print(f"in the file's pages {before:6.1f} ms, in huge pages {after:6.1f} ms, {after / before:.2f}")
    print(f"median of rounds: {median(after / before for before, after in rounds):.2f}")


if __name__ == "__main__":
    main()
