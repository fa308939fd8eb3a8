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


# too few blocks for three requests, and enough for one: its layers keep keys in three ways
THREE_GROUPS = {"max_model_len": 32, "num_gpu_blocks_override": 14}


def run(path: Path, home: str, options: dict) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "QUIRE_CPU_KERNELS": home}
    module = "tests.worker.kernels.triton.engine_run"
    command = [sys.executable, "-m", module, str(path), "float32", json.dumps(options)]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("architecture", "options", "kernels"),
    [
        ("qwen3", {}, ["_prepare_heads"]),
        ("qwen3", {"all": {"quantization": "int8"}}, ["_prepare_heads", "_packed_linear", "_round_inputs"]),
        ("qwen3", {"all": {"quantization": "int4_weight_only"}}, ["_prepare_heads", "_packed_linear"]),
        (
            "gpt_oss",
            {"swap": {"max_model_len": 32, "num_gpu_blocks_override": 14}},
            ["_grouped_linear", "_route_tokens"],
        ),
        ("deepseek_v3_groups", {}, ["_rotary_embedding", "_write_kv", "_grouped_linear", "_route_tokens"]),
    ],
    ids=["qwen3", "int8 weights", "int4 weights", "gpt_oss", "latent attention"],
)
def test_tokens_are_those_of_the_reference(architecture, options, kernels, tmp_path):
    """Chunks of prompts and a search of beams, swapping, drafts."""
    path = make_checkpoint(tmp_path / architecture, architecture)
    found, expected = run(path, "triton", options), run(path, "reference", options)
    assert found["tokens"] == expected["tokens"]
    assert found["signs"]["swap"] > 0
    assert found["home"]["kernels"] == "triton"
    missing = {"_attention", "_rms_norm", "_move", *kernels} - found["launches"].keys()
    assert not missing
    assert expected["launches"] == {}
