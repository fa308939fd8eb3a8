"""Compiles what the examples of the Triton kernels would launch, for devices that are not there.

    python -m tests.worker.kernels.triton.ahead_of_time [--write] [FILE ...]

prints what each kernel needs on each target; without files, all of them. `--write` makes that the budget of the file
(`budgets/FILE.json`), which a test holds. The compiler and NVIDIA's disassembler come with Triton. What was compiled is
kept in Triton's cache.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.worker.kernels import triton as home

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
BUDGETS = Path(__file__).parent / "budgets"
# Arithmetic that the interpreter cannot do in these types; products and casts are mended (interpreter.py).
_NARROW = re.compile(r"(arith\.(?!extf|truncf|sitofp|uitofp|constant|select|bitcast)\w+|math\.\w+) .*(bf16|f8E)")
# Instructions of the matrix units, as each target calls them in its assembly.
_MATRIX = {
    "sm_80": r"\bHMMA|\bIMMA",
    "sm_90": r"\bHGMMA|\bIGMMA|\bQGMMA",
    "sm_100": r"\bUTC\w*MMA",
    "sm_120": r"\bHMMA|\bIMMA|\bQMMA",
    "gfx942": r"\bv_mfma",
}


@dataclass(frozen=True)
class Compiled:
    """What a kernel of an example needs on a target. Spills are bytes of a thread that do not fit into registers."""

    file: str
    example: str
    # which of the launches of the example
    launch: int
    kernel: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: int
    narrow_arithmetic: int

    @property
    def place(self) -> tuple[str, str, int, str, str]:
        return self.file, self.example, self.launch, self.kernel, self.target


def compile_examples(files: list[str], targets: list[str]) -> Iterator[Compiled]:
    """All kernels of all examples, each for all targets."""
    from quire.worker.kernels.triton.launch import record_launches

    for file in files:
        for example in importlib.import_module(f"{home.__name__}.{file}").EXAMPLES:
            for target in targets:
                with record_launches(target) as launches:
                    example.call()
                for number, launched in enumerate(launches):
                    name = launched.kernel.__name__
                    yield Compiled(file, example.name, number, name, target, *_measure(launched, target))


def _measure(launched: Any, target_name: str) -> tuple[int, int, int, int, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget(*TARGETS[target_name])
    compiled = triton.compile(ASTSource(*_source(launched, target)), target=target, options=launched.options)
    shared = compiled.metadata.shared
    if target.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1])
        spills = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)[1])
    else:
        resources, assembly = _disassembled(compiled.asm["cubin"])
        registers = int(re.search(r"REG:(\d+)", resources)[1])
        spills = int(re.search(r"STACK:(\d+)", resources)[1]) + int(re.search(r"LOCAL:(\d+)", resources)[1])
    matrix = len(re.findall(_MATRIX[target_name], assembly))
    return registers, spills, shared, matrix, len(_NARROW.findall(str(compiled.asm["ttir"])))


def _source(launched: Any, target: Any) -> tuple[Any, dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """As the launcher of a device would have it: which numbers are constants, and what is a multiple of 16."""
    from triton._C.libtriton import native_specialize_impl
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    signature, constants, attributes = {}, {}, {}
    for parameter in launched.kernel.params:
        value = launched.arguments[parameter.name]
        if parameter.is_constexpr:
            kind, hint = "constexpr", value
        else:
            kind, hint = native_specialize_impl(
                type(backend),
                value,
                parameter.is_const,
                not parameter.do_not_specialize,
                not parameter.do_not_specialize_on_alignment,
            )
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif hint:
            attributes[parameter.num,] = backend.parse_attr(hint)
    return launched.kernel, signature, constants, attributes


@functools.cache
def _disassembled(cubin: bytes) -> tuple[str, str]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = [[tools / "cuobjdump", "--dump-resource-usage", file.name], [tools / "nvdisasm", "-c", file.name]]
        outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    return outputs[0], outputs[1]


def budgets(file: str) -> list[Compiled]:
    """What a file's kernels may need at most, and how many matrix instructions they must have at the least."""
    path = BUDGETS / f"{file}.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        # an example's launches stand in their order
        row["launch"] = counts[row["example"], row["target"]]
        counts[row["example"], row["target"]] += 1
    return [Compiled(**row) for row in rows]


def main(arguments: list[str]) -> None:
    is_write = "--write" in arguments
    files = [argument for argument in arguments if argument != "--write"] or sorted(
        {*home.TWINS.values(), *home.FURTHER}
    )
    for file in files:
        rows = list(compile_examples([file], list(TARGETS)))
        lines = [json.dumps(asdict(row)) for row in rows]
        print("\n".join(lines))
        if is_write:
            BUDGETS.mkdir(exist_ok=True)
            # the order of an example's launches is that of its rows
            kept = ({name: value for name, value in asdict(row).items() if name != "launch"} for row in rows)
            lines = [json.dumps(row) for row in kept]
            (BUDGETS / f"{file}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
