"""Models of experts, of recurrences and of codes on the kernels of a GPU, in Triton's interpreter: their tokens, greedy
and drawn, are those of the reference."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire.testing.tiny_checkpoints import make_checkpoint

ROOT = Path(__file__).parents[4]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("triton") is None, reason='needs triton: pip install "quire[gpu-dev]"'),
]
ALWAYS = ("_best_of_piece", "_choose_tokens", "_token_logprobs", "_penalise", "_apply_changes", "_prepare_blocks")
EXPERTS = ("_route_tokens", "_grouped_linear", "_weigh_experts")


def run(path: Path, home: str, scheme: str | None) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "QUIRE_CPU_KERNELS": home}
    command = [sys.executable, "-m", "tests.worker.kernels.triton.layers_run", str(path), *([scheme] if scheme else [])]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("architecture", "scheme", "kernels"),
    [
        ("qwen3_moe", None, EXPERTS),
        ("qwen3_next", None, (*EXPERTS, "_causal_conv", "_gated_delta_rule")),
        ("deepseek_v3_groups", None, EXPERTS),
        ("bamba", None, ("_causal_conv", "_ssd_scan")),
        ("qwen3", "int8", ("_packed_linear", "_round_inputs", "_prepare_heads")),
        ("qwen3", "int4_weight_only", ("_packed_linear",)),
    ],
)
def test_tokens_are_those_of_the_reference(architecture, scheme, kernels, tmp_path):
    path = make_checkpoint(tmp_path / architecture, architecture)
    found, expected = run(path, "triton", scheme), run(path, "reference", scheme)
    assert found["tokens"] == expected["tokens"]
    for kernel in (*ALWAYS, *kernels):
        assert found["launches"].get(kernel, 0) > 0, kernel
    assert expected["launches"] == {}
