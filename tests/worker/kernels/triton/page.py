"""docs/gpu-kernels.md, made of the registry, the budgets and the examples.

    python -m tests.worker.kernels.triton.page --write

A test fails when the page is out of date.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.worker.kernels.triton.ahead_of_time import budgets

from quire.config.device_sheets import DEVICE_SHEETS
from quire.worker.kernels import operators
from quire.worker.kernels import triton as home

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "gpu-kernels.md"
COSTS = "## What an H100 would take (not measured)\n"
_OPENING = """\
# Kernels on a GPU

Made by `python -m tests.worker.kernels.triton.page --write`. None of these kernels has run on a GPU yet: they are run
by Triton's interpreter against the reference, and compiled for the targets below. `make gpu-check` runs, verifies and
times all of them on the first GPU that it meets.

## Where an operator runs

| operator | CPU | GPU |
| --- | --- | --- |
"""
_NOT_FUSED = """
## What has no kernel of its own

- **Norms of heads, rotary positions and the write into the cache** are one kernel (`prepare_heads`) of models built
  like Llama and Qwen 3. Where the model is compiled they are two: torch.compile makes one of norms and positions, which
  are plain PyTorch to it, and the write stays behind them. Other models have a kernel for each.
- **Gate and up with SiLU behind them**: products of floats are torch's, that is cuBLAS's, which has no such epilogue.
  For one token it would save one launch; for a prompt of 2,048 tokens of 8B most of the gate's 53 microseconds, beside
  490 of the product (both at the rates of the sheet).
- **Weights of eight-bit floats** are made eight-bit whole numbers when they are read. These are as short, and a Hopper
  multiplies both at the same rate; a large Blackwell multiplies them as float16.
- **Packing a weight and reading rows of a packed one** (`pack_weight`, `pack_quantized`, `unpack_weight`,
  `packed_rows`) are plain PyTorch in the layout of `packed_linear`: the first is done once, the last for few rows.
"""
_BUDGETS = """
## What a kernel needs of a Hopper (sm_90)

Registers of a thread, shared memory of a program, and instructions of the tensor cores in the compiled code. What the
other targets need (sm_80, sm_100, sm_120, gfx942) stands beside it in `tests/worker/kernels/triton/budgets`.

| file | example | kernel | registers | spilled bytes | shared KB | tensor-core instructions |
| --- | --- | --- | --- | --- | --- | --- |
"""
_COSTS = f"""
{COSTS}
The longer of two times: its bytes at the bandwidth of the data sheet, its products at the rate of the tensor cores in
bfloat16. What is computed outside of tensor cores is not counted. Beside it what the best published kernel of the kind
would take: one that reaches the share of the sheet that its authors measured. `gpu_check.py` measures ours.

Latent attention computes the scores of a row once for each slice of its values, 1.5 times the products below on a
Hopper (two slices) and 2.6 times on a large Blackwell (four): the sums of 512 columns leave no registers for the rest.

| share | of | measured for | by |
| --- | --- | --- | --- |
"""
_COST_TABLE = """
| file | example | MB | GFLOP | microseconds | bound by | at the published share |
| --- | --- | --- | --- | --- | --- | --- |
"""
# What others have measured, of the rates of the sheet. The files, whether it is their memory, and where it is said.
_PUBLISHED = (
    (("paged_attention",), False, 0.75, "attention of long prompts", "FlashAttention-3, arXiv 2407.08608"),
    (("paged_attention",), True, 0.90, "latent attention of single tokens, 3.0 TB/s", "FlashMLA, README"),
    (
        ("grouped_linear", "packed_linear"),
        False,
        0.78,
        "products of experts in eight bits, 1,550 of 1,979 TFLOP/s",
        "DeepGEMM, README",
    ),
    ((), True, 0.90, "what is bound by memory (the same 3.0 TB/s)", "FlashMLA, README"),
)


def page() -> str:
    """All of it; the last chapter needs Triton."""
    costs = _COSTS + "".join(_published_rows()) + _COST_TABLE + "".join(_cost_rows())
    return page_without_costs() + costs


def page_without_costs() -> str:
    return _OPENING + "".join(_twins()) + _NOT_FUSED + _BUDGETS + "".join(_budget_rows())


def _twins() -> Iterator[str]:
    source = "".join(path.read_text() for path in (ROOT / "src/quire/csrc/cpu").glob("operators_*.cpp"))
    in_cpp = set(re.findall(r'impl\("(\w+)"', source))
    for name in sorted(operators._SCHEMAS):
        cpu = "C++" if name in in_cpp else "PyTorch"
        gpu = f"Triton, `{home.TWINS[name]}`" if name in home.TWINS else f"PyTorch: {home.REASONS[name]}"
        yield f"| `{name}` | {cpu} | {gpu} |\n"


def _budget_rows() -> Iterator[str]:
    for file in sorted({*home.TWINS.values(), *home.FURTHER}):
        for row in budgets(file):
            if row.target == "sm_90":
                numbers = f"{row.registers} | {row.spills} | {row.shared_bytes / 1024:.1f} | {row.matrix_instructions}"
                yield f"| `{file}` | {row.example} | `{row.kernel}` | {numbers} |\n"


def _cost_rows() -> Iterator[str]:
    from quire.worker.kernels.triton.launch import least_bytes

    sheet = DEVICE_SHEETS["h100"]
    for file in sorted({*home.TWINS.values(), *home.FURTHER}):
        for example in importlib.import_module(f"{home.__name__}.{file}").EXAMPLES:
            num_bytes = least_bytes(example)
            of_memory, of_products = num_bytes / sheet.bytes_per_second, example.operations / sheet.flops
            bound = "memory" if of_memory >= of_products else "products"
            time = max(of_memory, of_products) * 1e6
            published = time / _share(file, is_memory=bound == "memory")
            numbers = f"{num_bytes / 1e6:.2f} | {example.operations / 1e9:.1f} | {time:.1f} | {bound} | {published:.1f}"
            yield f"| `{file}` | {example.name} | {numbers} |\n"


def _published_rows() -> Iterator[str]:
    for _, is_memory, share, kind, source in _PUBLISHED:
        yield f"| {share:.2f} | {'the bandwidth' if is_memory else 'the matrix rate'} | {kind} | {source} |\n"


def _share(file: str, *, is_memory: bool) -> float:
    """Of the first kind that this kernel is of."""
    return next(
        share for files, memory, share, _, _ in _PUBLISHED if memory == is_memory and file in (files or (file,))
    )


if __name__ == "__main__":
    if find_spec("triton") is None:
        raise SystemExit('needs triton: pip install "quire[gpu-dev]"')
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
