"""Tokens that one API process streams to many connections, with an engine that answers at once (W9).

    python benchmarks/streams.py [--connections 256] [--rates 40000,60000,240000] [--seconds 5] [--chat]
    python benchmarks/streams.py --rivals build/rivals --rates 8000,16000,60000 --rounds 5    vLLM's server beside it

The server (tests.support.null_server) and its core are processes of their own; the client is written in C. `--rates`:
tokens a second that the core makes in all; 0: as many as it can, so that tokens are merged for readers that are slower.
Counted is the processor time of the API process alone: tokens per second of it is what one core of its own can stream,
whatever else the machine does. Each server says one answer first, which must be right, and the letters that each stream
had must end where a token ends. `--rivals`: the folder of `rivals.py --build`; vLLM's server runs around a fake of its
engine (rival_drivers/vllm_null_server.py). Servers of one rate run side by side and are measured in turns, `--rounds`
times; vLLM's is left out where it is asked for more than twice what a whole core of it streamed. The last line is one
line of JSON, which `rivals.py --table` reads.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from stream_servers import Answer, Running, Server, first_answer, quire_server, vllm_server

HERE = Path(__file__).parent
_ASKED = "asked tokens/s"
_PROCESSOR = "us of processor/token"
_WHOLE = "tokens/s of a whole core"
Figures = dict[str, float]
# one a round; None where not every stream had begun within a minute
Rounds = list[Figures | None]


def compiled_client(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("the client is written in C, and there is no compiler (cc)")
    target = folder / "stream_client"
    subprocess.run([compiler, "-O2", "-o", str(target), str(HERE / "stream_client.c")], check=True)
    return target


class Comparison:
    """Rounds of all servers at one rate."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder, self._client = options, folder, compiled_client(folder)
        self._body = {"max_tokens": 10**6, "stream": True, "ignore_eos": True}
        self._body |= {"messages": [{"role": "user", "content": "Hello"}]} if options.chat else {"prompt": "Hello"}
        self._path = "/v1/chat/completions" if options.chat else "/v1/completions"

    def run(self, servers: list[Server], rate: int) -> dict[str, Rounds]:
        found: dict[str, Rounds] = {server.name: [] for server in servers}
        with ExitStack() as stack:
            running = [
                stack.enter_context(Running(one, rate / self._options.connections, self._folder / f"{one.name}.log"))
                for one in servers
            ]
            for server in running:
                server.wait_ready()
                if self._options.pin:
                    os.sched_setaffinity(server.pid, {0})
            answers = {server.name: first_answer(server, self._path, self._body) for server in running}
            for number in range(self._options.rounds):
                # another one begins in every round
                place = number % len(running)
                for server in running[place:] + running[:place]:
                    server.wait_quiet()
                    figures = self._measure(server, answers[server.name], rate)
                    found[server.name].append(figures)
                    print(_line(server.name, rate, figures), flush=True)
        return found

    def _measure(self, server: Running, answer: Answer, rate: int) -> Figures | None:
        arguments = [server.port, self._options.connections, self._options.seconds, self._path, json.dumps(self._body)]
        client = subprocess.Popen([self._client, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        client.stdout.readline()
        before = server.processor_seconds()
        line = client.stdout.readline()
        spent = server.processor_seconds() - before
        client.wait()
        return figures_of(json.loads(line), answer, rate, spent) if line else None


def figures_of(counted: dict, answer: Answer, rate: int, spent: float) -> Figures | None:
    """None: not one token came. Processor time is counted in ticks; less than one counts as one."""
    tokens = sum(answer.num_tokens(after) - answer.num_tokens(before) for before, after in counted["text"])
    if not tokens:
        return None
    spent = max(spent, 1 / os.sysconf("SC_CLK_TCK"))
    return {
        _ASKED: rate,
        "tokens/s": round(tokens / counted["seconds"]),
        "events/token": round(counted["events"] / tokens, 3),
        _PROCESSOR: round(spent / tokens * 1e6, 2),
        _WHOLE: round(tokens / spent),
        "share of a core": round(spent / counted["seconds"], 2),
    }


def summary(found: dict[str, Rounds]) -> str:
    """Markdown: medians (lowest to highest), and how many times less processor a token took the first one."""
    first, *others = found
    names = list(next((figures for rounds in found.values() for figures in rounds if figures), {_ASKED: 0}))
    lines = [f"| | {' | '.join(names)} | |", "| --- " * (len(names) + 2) + "|"]
    for name, rounds in found.items():
        cells = [_spread([figures[column] for figures in rounds if figures]) for column in names]
        lines.append(f"| {name} | {' | '.join(cells)} | {_ratio(found[first], rounds) if name in others else ''} |")
    return "\n".join(lines)


def _ratio(ours: Rounds, theirs: Rounds) -> str:
    pairs = [(our, their) for our, their in zip(ours, theirs, strict=True) if our and their]
    ratios = [their[_PROCESSOR] / our[_PROCESSOR] for our, their in pairs]
    return f"**{median(ratios):.2f} x** ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "none"


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{median(values):,}" if low == high else f"{median(values):,} ({low:,} to {high:,})"


def _line(name: str, rate: int, figures: Figures | None) -> str:
    if figures is None:
        return f"{name:<16}  {rate:,} tokens/s asked for: not every stream began within a minute"
    return "  ".join([f"{name:<16}", *(f"{value:>10,} {column}" for column, value in figures.items())])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--rates", type=lambda text: [int(rate) for rate in text.split(",")])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--pin", action="store_true", help="the API processes on processor 0 alone")
    parser.add_argument("--rivals", type=Path, metavar="FOLDER", help="vLLM's server as well, installed there")
    parser.add_argument("--statistics", action="store_true", help="vLLM's once more with its statistics (its default)")
    return parser


def servers_for(options: argparse.Namespace) -> list[Server]:
    """Refuses what the fake of vLLM's engine cannot do."""
    servers = [quire_server()]
    if options.rivals is None:
        options.rates = options.rates or [20_000, 40_000, 60_000, 120_000, 240_000]
        if options.statistics:
            raise SystemExit("--statistics: of vLLM's server, which runs with --rivals FOLDER only.")
        return servers
    options.rates = options.rates or [8_000, 16_000]
    if 0 in options.rates:
        raise SystemExit(
            "--rates 0: with --rivals every rate is above 0, because nothing holds vLLM's engine back: what its front "
            "end cannot send would pile up. Give the rate of the fastest."
        )
    servers.append(vllm_server(options.rivals))
    if options.statistics:
        servers.append(vllm_server(options.rivals, with_statistics=True))
    return servers


def can_try(name: str, rate: int, rows: dict[int, dict[str, Rounds]]) -> bool:
    """Whether it could follow the rate with two cores, by what it did before: more only piles up in front of it."""
    wholes = [figures[_WHOLE] for found in rows.values() for figures in found.get(name, []) if figures]
    return not rows or (bool(wholes) and rate <= 2 * max(wholes))


def main() -> None:
    options = parser().parse_args()
    servers = servers_for(options)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, Path(folder))
        for rate in sorted(options.rates):
            # ours is never left out
            servers = [one for one in servers if one is servers[0] or can_try(one.name, rate, rows)]
            rows[rate] = comparison.run(servers, rate)
    for found in rows.values():
        print(summary(found))
    print(json.dumps({"benchmark": "streams", "connections": options.connections, "rates": rows}))


if __name__ == "__main__":
    main()
