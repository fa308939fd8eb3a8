"""Triton's interpreter: kernels run on the CPU, one program after the other, slowly, to be tested.

It keeps bfloat16 and eight-bit floats as whole numbers. Where it casts them it does not round as devices do, and it
multiplies bfloat16 as the whole numbers (triton issues 11585, 10945, 11604). Both are mended here. Nothing else may be
computed in bfloat16 or eight bits, in no kernel: a test looks at what the kernels are compiled to.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch


def interpret() -> None:
    """From now on. Triton decides when it is imported, so it must not be there yet."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported to compile. Set TRITON_INTERPRET=1 where the process starts.")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter as interpreter
    from triton import language

    if interpreter._convert_float is not _convert_float:
        interpreter._convert_float = _convert_float
        interpreter.InterpreterBuilder.create_dot = _product_of(interpreter, language)
        _patch_once(interpreter)


def _patch_once(interpreter: Any) -> None:
    """At each call of one kernel's function by another it would look for what to replace in Triton's language, all of
    which was replaced when the first function of that file was called: that takes most of the time."""
    run_grid = interpreter.GridExecutor.__call__
    files: set[int] = set()

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        files.clear()  # a grid ends with the language as it was
        return run_grid(self, *arguments, **options)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        file = id(self.fn.__globals__)
        if file not in files:
            interpreter._patch_lang(self.fn)
            files.add(file)
        return self.rewrite()(*arguments, **options)

    interpreter.GridExecutor.__call__ = run
    interpreter.InterpretedFunction.__call__ = call


def _convert_float(values: Any, kind: Any, other_kind: Any, rounding: Any) -> Any:
    """Bits in another type, rounded to the nearest."""
    bits = np.ascontiguousarray(values).view(f"uint{kind.primitive_bitwidth}")
    tensor = torch.from_numpy(bits.copy()).view(_torch_type(kind)).to(_torch_type(other_kind))
    whole = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}[other_kind.primitive_bitwidth]
    return tensor.view(whole).numpy().reshape(values.shape)


def _torch_type(kind: Any) -> torch.dtype:
    names = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }
    return names[kind.name]


def _product_of(interpreter: Any, language: Any) -> Any:
    """A product of two tiles, made of float32, which holds each product of two numbers of 16 or 8 bits exactly."""

    def create_dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        if not a.dtype.is_floating():
            product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
        else:
            product = np.matmul(
                *(_convert_float(x.data, x.dtype, language.float32, None).view("float32") for x in (a, b))
            )
        return interpreter.TensorHandle((product + total.data).astype(total.data.dtype), total.dtype.scalar)

    return create_dot
