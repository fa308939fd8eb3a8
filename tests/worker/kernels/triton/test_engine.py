"""The whole engine on the kernels of a GPU, in Triton's interpreter: its tokens are those of the reference."""

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


def run(path: Path, home: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "QUIRE_CPU_KERNELS": home}
    command = [sys.executable, "-m", "tests.worker.kernels.triton.engine_run", str(path), "float32"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss", "deepseek_v3_groups"])
def test_tokens_are_those_of_the_reference(architecture, tmp_path):
    """Chunks of prompts and a search of beams, swapping, drafts."""
    path = make_checkpoint(tmp_path / architecture, architecture)
    found, expected = run(path, "triton"), run(path, "reference")
    assert found["tokens"] == expected["tokens"]
    assert found["signs"]["swap"] > 0
    assert found["home"]["kernels"] == "triton"
    for kernel in ("_attention", "_write_kv", "_rms_norm", "_rotary_embedding", "_move"):
        assert found["launches"][kernel] > 0, kernel
    assert expected["launches"] == {}
