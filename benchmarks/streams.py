"""Tokens that one API process streams to many connections, with an engine that answers at once (W9).

    python benchmarks/streams.py [--connections 256] [--rates 40000,60000,240000] [--seconds 5] [--chat]

The server (quire.testing.null_server) and its core are processes of their own; the client is written in C. `--rates`:
tokens a second that the core makes in all; 0: as many as it can, so that tokens are merged for readers that are slower.
Counted is the processor time of the API process alone: tokens per second of it is what one core of its own can stream,
whatever else the machine does. The last line is one line of JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")


def compiled_client(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("the client is written in C, and there is no compiler (cc)")
    target = folder / "stream_client"
    subprocess.run([compiler, "-O2", "-o", str(target), str(HERE / "stream_client.c")], check=True)
    return target


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure(client: Path, options: argparse.Namespace, rate: int) -> dict[str, float]:
    steps = rate / options.connections
    environment = {**os.environ, "QUIRE_NULL_STEPS_A_SECOND": str(steps)}
    server = subprocess.Popen(
        [sys.executable, "-m", "quire.testing.null_server"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        if options.pin:
            os.sched_setaffinity(ready["pid"], {0})
        body = {"max_tokens": 10**6, "stream": True, "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": "Hello"}]} if options.chat else {"prompt": "Hello"}
        path = "/v1/chat/completions" if options.chat else "/v1/completions"
        arguments = [ready["port"], options.connections, options.seconds, path, json.dumps(body)]
        running = subprocess.Popen([client, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        assert running.stdout is not None
        running.stdout.readline()
        before = processor_seconds(ready["pid"])
        counted = json.loads(running.stdout.readline())
        spent = processor_seconds(ready["pid"]) - before
        running.wait()
    finally:
        # with hundreds of streams in the middle of an answer nothing is to be put in order; its core dies with it
        server.kill()
        server.wait()
    tokens = counted["text"] / statistics.mean(len(text) for text in ready["texts"])
    return {
        "asked tokens/s": rate,
        "tokens/s": round(tokens / counted["seconds"]),
        "events/token": round(counted["events"] / tokens, 3),
        "us of processor/token": round(spent / tokens * 1e6, 2),
        "tokens/s of a whole core": round(tokens / spent),
        "share of a core": round(spent / counted["seconds"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--rates", default="20000,40000,60000,120000,240000")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--pin", action="store_true", help="the API process on processor 0 alone")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        client = compiled_client(Path(folder))
        for rate in map(int, options.rates.split(",")):
            rows.append(measure(client, options, rate))
            if len(rows) == 1:
                print("  ".join(f"{name:>24}" for name in rows[0]))
            print("  ".join(f"{value:>24,}" for value in rows[-1].values()), flush=True)
    print(json.dumps({"benchmark": "streams", "connections": options.connections, "rows": rows}))


if __name__ == "__main__":
    main()
