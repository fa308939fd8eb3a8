"""The units of `gpu_check.py`. Each is told as JSON what to do, and prints a line of JSON for each thing it has found.

An entry may have an `error`; then it is wrong. Entries that are known already are left out.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
Entry = dict[str, Any]
Entries = Iterator[tuple[str, Entry]]
TESTS = "tests/worker/kernels/triton"
CONTRACTS = (
    "fused",
    "attention",
    "prepare_heads",
    "sampling",
    "linear",
    "experts",
    "recurrent",
    "adapters",
    "prepare_blocks",
)
MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "opt", "gpt2")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 48": {"max_num_batched_tokens": 48},
    "few blocks": {
        "block_size": 8,
        "num_gpu_blocks_override": 44,
        "max_model_len": 160,
        "max_num_batched_tokens": 48,
    },
}
# How a step of the model is run: 4.6.3. The last one finds at its start what the one before has compiled.
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full": {"compile": False},
    "piecewise and full": {"compile": True},
    "the same, second start": {"compile": True},
}
# Llama 3's 8B.
SHAPE_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "rope_theta": 500_000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "eos_token_id": 255,
    "bos_token_id": 255,
}
SMALL_SHAPE = SHAPE_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# of examples that the interpreter runs in a moment
_SMALL_BYTES = 100_000


@dataclass(frozen=True)
class Task:
    """What a unit is told."""

    unit: str
    device: str
    is_small: bool
    known: tuple[str, ...]
    seconds: float

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


def machine(task: Task) -> Entries:
    import torch

    packages = {}
    for name in ("torch", "triton", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    device = torch.cuda.get_device_name() if task.is_gpu else "cpu"
    yield "versions", {"device": device, "cuda": str(torch.version.cuda), "hip": str(torch.version.hip), **packages}
    size = 2**29 if task.is_gpu else 2**22
    source = torch.empty(size, dtype=torch.bfloat16, device=task.device).normal_()
    target = torch.empty_like(source)
    copy = _seconds(task, lambda: target.copy_(source))
    edge = 8192 if task.is_gpu else 256
    left = torch.randn(edge, edge, device=task.device, dtype=torch.bfloat16)
    multiply = _seconds(task, lambda: left @ left)
    yield "limits", {"copy_gb_per_s": 4 * size / copy / 1e9, "matrix_tflop_per_s": 2 * edge**3 / multiply / 1e12}


def build(task: Task) -> Entries:
    """All kernels of all examples, as a launch would compile them; later processes find them in Triton's cache."""
    if not task.is_gpu:
        return
    files = [file for file in _kernel_files() if file not in task.known]
    with ProcessPoolExecutor(min(len(files), os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_compile_file, file): file for file in files}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except Exception as error:
                yield futures[future], {"error": f"{type(error).__name__}: {error}"}


def _compile_file(file: str) -> Entry:
    from quire.worker.kernels.triton.launch import record_launches

    start = time.perf_counter()
    registers = spills = count = 0
    for example in _examples(file):
        with record_launches(None) as launches:
            example.call()
        for launched in launches:
            compiled = launched.kernel.warmup(grid=launched.grid, **launched.arguments, **launched.options)
            # these are known when the code was loaded, in versions that say so
            compiled._init_handles()
            registers = max(registers, getattr(compiled, "n_regs", 0))
            spills = max(spills, getattr(compiled, "n_spills", 0))
            count += 1
    return {"kernels": count, "registers": registers, "spills": spills, "seconds": time.perf_counter() - start}


def contracts(task: Task) -> Entries:
    """The tests of the kernels, whose tensors are moved to the device for each call."""
    for name in CONTRACTS:
        if name in task.known:
            continue
        command = [sys.executable, "-m", "pytest", f"{TESTS}/test_{name}.py", "-q", "-p", "no:cacheprovider"]
        if task.is_small:
            command += ["-k", "silu or views or bitmask"]
        environment = os.environ | {"QUIRE_KERNEL_DEVICE": task.device}
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            finished = subprocess.run(
                [*command, f"--junitxml={report}"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            # 5: no test was chosen
            if finished.returncode in (0, 1, 5):
                yield name, _outcomes(report)
            else:
                yield name, {"error": finished.stdout[-2000:] + finished.stderr[-2000:]}


def _outcomes(report: Path) -> Entry:
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    count, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = [
        f"{case.get('name')}: {problem.get('message', '')[:200]}"
        for case in suite.iter("testcase")
        for problem in (*case.iter("failure"), *case.iter("error"))
    ]
    entry: Entry = {"passed": count - skipped - len(failed), "failed": len(failed), "skipped": skipped}
    return entry | ({"error": "; ".join(failed)} if failed else {})


def tokens(task: Task) -> Entries:
    import torch
    from transformers import AutoModelForCausalLM

    from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
    from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

    lengths, num_tokens = ((1, 17), 3) if task.is_small else ((1, 16, 17, 63, 101), 32)
    settings = {"chunks of 48": SETTINGS["chunks of 48"]} if task.is_small else SETTINGS
    for model_name in MODELS[:1] if task.is_small else MODELS:
        if all(f"{model_name}, {setting}" in task.known for setting in settings):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = make_checkpoint(Path(folder) / model_name, model_name)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            random = torch.Generator().manual_seed(11)
            prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=random).tolist() for length in lengths]
            expected = [reference_generate(model, prompt, num_tokens) for prompt in prompts]
            for setting, options in settings.items():
                core = real_core(path, device=task.device, **{"kv_cache_memory_bytes": 2**26, **options})
                entry: Entry = {"prompts": len(prompts)}
                try:
                    # the second time with a warm prefix cache
                    for attempt in ("cold", "warm"):
                        found = generate_greedy(core, prompts, num_tokens)
                        for ours, reference in zip(found, expected, strict=True):
                            assert_same_tokens(ours, reference, attempt)
                except AssertionError as error:
                    entry["error"] = str(error)
                core.shutdown()
                yield f"{model_name}, {setting}", entry


def kernels(task: Task) -> Entries:
    """Each example between events of the device, alone, with nothing of it in the cache."""
    from quire.worker.kernels.triton.example_inputs import examples_on
    from quire.worker.kernels.triton.launch import least_bytes, record_launches, run

    if not task.is_gpu:
        from quire.worker.kernels.triton.interpreter import interpret

        interpret()
    limits = _limits(task)
    for file in _kernel_files():
        for example in _examples(file):
            name = f"{file}: {example.name}"
            num_bytes = least_bytes(example)
            if name in task.known or (task.is_small and num_bytes + example.operations > _SMALL_BYTES):
                continue
            try:
                with examples_on(task.device), record_launches(None) as launches:
                    kept = example.call()
                seconds = _seconds(task, lambda: [run(launched) for launched in launches])
                del kept
            except Exception as error:
                yield name, {"error": f"{type(error).__name__}: {error}"}
                continue
            yield (
                name,
                {
                    "microseconds": seconds * 1e6,
                    "share_of_bandwidth": num_bytes / seconds / (limits["copy_gb_per_s"] * 1e9),
                    "share_of_matrix_rate": example.operations / seconds / (limits["matrix_tflop_per_s"] * 1e12),
                },
            )


def figure(task: Task) -> Entries:
    """Seconds of a token after the first, by how a step is run."""
    input_length, output_length = (20, 4) if task.is_small else (4000, 50)
    for mode, options in MODES.items():
        if mode in task.known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = _shape(task, Path(folder))
            start = time.perf_counter()
            entry = asyncio.run(_one_request(task, path, options, input_length, output_length))
            yield mode, entry | {"unit": "ms a token", "start_s": time.perf_counter() - start - entry["seconds"]}


async def _one_request(task: Task, path: Path, options: Entry, input_length: int, output_length: int) -> Entry:
    from quire import AsyncLLM
    from quire.interfaces.cli.bench_perform import perform
    from quire.interfaces.cli.bench_workloads import TokenSource, stream

    async with AsyncLLM(str(path), **_engine_options(task), **options) as engine:
        outcomes = []
        for number in range(2):
            source = TokenSource(256, 0, number)
            work = stream(source, input_length=input_length, output_length=output_length)
            outcomes.append(await perform(engine, work))
        best = outcomes[-1]
        gaps = best.gaps
        return {
            "value": median(gaps) * 1e3,
            "first_token_ms": best.times_to_first_token[0] * 1e3,
            "seconds": sum(outcome.seconds for outcome in outcomes),
        }


def workloads(task: Task) -> Entries:
    with tempfile.TemporaryDirectory() as folder:
        loop = asyncio.new_event_loop()
        engine = _engine(task, _shape(task, Path(folder)))
        loop.run_until_complete(engine.start())
        try:
            yield from _workloads(task, engine, loop)
        finally:
            engine.shutdown()


def _engine(task: Task, path: Path) -> Any:
    from quire import AsyncLLM

    return AsyncLLM(str(path), **_engine_options(task))


def _workloads(task: Task, engine: Any, loop: asyncio.AbstractEventLoop) -> Entries:
    from rival_workloads import PARTS, WORKLOADS, Sizes, jobs, warm_up

    from quire.interfaces.cli.bench_limits import MachineLimits
    from quire.interfaces.cli.bench_perform import perform
    from quire.interfaces.cli.bench_sheet import Ruler

    measured = _limits(task)
    peak = measured["matrix_tflop_per_s"] * 1e12
    rates = dict.fromkeys(("bfloat16", "float16", "float32"), peak)
    ruler = Ruler.of(engine.config, MachineLimits(1, measured["copy_gb_per_s"] * 1e9, rates))
    sizes = Sizes.small(256) if task.is_small else Sizes(vocab_size=256, num_requests=64)
    limits = {"W1": ruler.decode_rate(), "W5": ruler.prompt_rate(sizes.prompt)}

    def answer(job: Any) -> dict[str, float]:
        outcome = loop.run_until_complete(perform(engine, job.work, clock=time.perf_counter))
        arrivals = [[(now - line.start, count) for now, count in line.arrivals] for line in outcome.timelines]
        values: dict[str, float] = job.read({"seconds": outcome.seconds, "arrivals": arrivals})
        return values

    for job in warm_up(sizes):
        answer(job)
    for workload in WORKLOADS:
        # round 0 makes what is made once, graphs of other sizes for example
        for number in range(1 if workload == "W2" else 2):
            for job in jobs(workload, sizes, number):
                found = answer(job)
                if number == 0 and workload != "W2":
                    continue
                for key, value in found.items():
                    limit = limits.get(key)
                    entry = {"value": value, "unit": PARTS[key].unit}
                    yield key, entry | ({"share_of_limit": value / limit} if limit else {})


def _engine_options(task: Task) -> dict[str, Any]:
    options: dict[str, Any] = {"device": task.device, "load_format": "dummy", "packed_weights_cache": 0}
    if task.is_small:
        return options | {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 16}
    return options | {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 64}


def _shape(task: Task, folder: Path) -> Path:
    from quire.testing.tiny_checkpoints import write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    shape = SMALL_SHAPE if task.is_small else SHAPE_8B
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    write_tokenizer(folder)
    return folder


def _limits(task: Task) -> dict[str, float]:
    """Measured again, because the clock of a device changes with its heat."""
    return dict(list(machine(task))[-1][1])


def _seconds(task: Task, work: Callable[[], Any]) -> float:
    """Median of some repetitions, the memory of the device written over before each."""
    import torch

    work()
    if not task.is_gpu:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    # Without the host in between: a step of a model is replayed as well.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    other = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(20):
        other.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _kernel_files() -> list[str]:
    from quire.worker.kernels import triton as home

    return sorted({*home.TWINS.values(), *home.FURTHER})


def _examples(file: str) -> tuple[Any, ...]:
    from quire.worker.kernels import triton as home

    examples: tuple[Any, ...] = importlib.import_module(f"{home.__name__}.{file}").EXAMPLES
    return examples


UNITS: dict[str, Callable[[Task], Entries]] = {
    "machine": machine,
    "build": build,
    "contracts": contracts,
    "tokens": tokens,
    "kernels": kernels,
    "figure": figure,
    "workloads": workloads,
}


def main() -> None:
    told = json.loads(sys.argv[1])
    task = Task(**(told | {"known": tuple(told["known"])}))
    for name, entry in UNITS[task.unit](task):
        if name not in task.known:
            print(json.dumps({"entry": name, **entry}), flush=True)


if __name__ == "__main__":
    main()
