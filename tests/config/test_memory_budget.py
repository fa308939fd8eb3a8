"""Table 3.1, and what a worker has of a model that several share."""

import json

import pytest

from quire.config import ModelFacts
from quire.config.arithmetic import ModelShape
from quire.config.device_sheets import DEVICE_SHEETS, device_sheet
from quire.config.memory_budget import LargestStep, MemoryBudget
from quire.errors import OptionError
from quire.interfaces.cli.program import main
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.capacity import measure_largest_step
from quire.worker.model_loader import load_model
from quire.worker.platforms import current_platform

# of the device's memory, the only number that is chosen; the same for all rows
SHARE = 0.94
STEP = LargestStep(num_tokens=2048, num_rows=256)


def opt(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, object]:
    return {
        "model_type": "opt", "hidden_size": hidden_size, "num_hidden_layers": num_layers, "ffn_dim": 4 * hidden_size,
        "num_attention_heads": num_heads, "vocab_size": 50272, "max_position_embeddings": 2048,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "device", "num_devices", "slots", "tolerance"),
    [
        (opt(5120, 40, 40), "a100-40gb", 1, 15_700, 0.02),
        (opt(9216, 64, 72), "a100-40gb", 4, 9_700, 0.02),
        (opt(12288, 96, 96), "a100-80gb", 8, 60_100, 0.02),
    ],
)
def test_table_3_1(config, device, num_devices, slots, tolerance):
    part = ModelShape.of(config).of_worker(num_devices, 1)
    sheet = device_sheet(device)
    weights, step = part.weight_bytes("float16"), STEP.num_bytes(part, "float16")
    budget = MemoryBudget(sheet.memory_bytes, SHARE, sheet.runtime_bytes, weights, step)
    assert budget.left // part.kv_bytes_per_token("float16") == pytest.approx(slots, rel=tolerance)


def test_the_command_says_table_3_1(tmp_path, capsys):
    path = write_config(tmp_path, opt(9216, 64, 72))
    argv = ["plan", path, "--device", "a100-40gb", "--tensor-parallel-size", "4", "--gpu-memory-utilization", "0.94"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "fits                9,632 tokens" in text
    assert "x 0.94 (gpu_memory_utilization)" in text
    assert main([*argv[:-2], "--max-num-seqs", "0"]) == 2
    assert "max_num_seqs=0: must be at least 1" in capsys.readouterr().err


def write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_device_that_nobody_has_a_sheet_of():
    with pytest.raises(OptionError, match="device=a100-41gb: must be one of a100-40gb"):
        device_sheet("a100-41gb")
    assert all(sheet.runtime_bytes < sheet.memory_bytes for sheet in DEVICE_SHEETS.values())


LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def test_latent_vectors_are_whole_on_every_worker():
    whole = ModelShape.of(LATENT)
    part = whole.of_worker(8, 1)
    assert whole.num_parameters == pytest.approx(671e9, rel=0.001)
    assert part.kv_bytes_per_token("bfloat16") == whole.kv_bytes_per_token("bfloat16")
    # what makes latent vectors is whole, and the routers
    whole_everywhere = 61 * 7168 * (1536 + 576) + 58 * 256 * 7168
    shared = whole.num_parameters - whole_everywhere
    assert part.num_parameters == whole_everywhere + shared // 8


def test_a_head_of_keys_that_there_are_too_few_of_is_kept_by_several():
    shape = ModelShape.of(
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    )  # fmt: skip
    assert shape.of_worker(8, 1).kv_bytes_per_token("bfloat16") == shape.kv_bytes_per_token("bfloat16") // 8
    assert shape.of_worker(16, 1).kv_bytes_per_token("bfloat16") == shape.kv_bytes_per_token("bfloat16") // 8
    assert shape.of_worker(4, 1).num_expert_parameters == shape.num_expert_parameters // 4


def test_a_worker_has_whole_experts():
    shape = ModelShape.of(
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    )  # fmt: skip
    # of eight experts, one of three workers has three
    part, divided = shape.of_worker(3, 1, has_whole_experts=True), shape.of_worker(3, 1)
    assert part.num_expert_parameters == shape.num_expert_parameters * 3 // 8
    assert part.num_float_parameters == shape.num_float_parameters
    assert part.num_linear_parameters == divided.num_linear_parameters
    # what an expert makes of a token is as wide as it is
    assert LargestStep(2048, 1).num_bytes(part, "bfloat16") > LargestStep(2048, 1).num_bytes(divided, "bfloat16")


def test_a_stage_has_its_layers_and_one_end_of_the_model():
    shape = ModelShape.of(
        {"hidden_size": 64, "num_hidden_layers": 10, "num_attention_heads": 4, "intermediate_size": 128,
         "vocab_size": 100}
    )  # fmt: skip
    part = shape.of_worker(1, 3)
    ends = 2 * 100 * 64
    assert part.num_parameters == 4 * (shape.num_parameters - ends) // 10 + ends // 2
    assert part.kv_bytes(7, "float32") == shape.kv_bytes(7, "float32") * 4 // 10


TWO_SHAPES = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 14, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "intermediate_size": 128, "vocab_size": 100,
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 4096, "architectures": ["Gemma4ForCausalLM"],
}  # fmt: skip


def test_a_stage_of_layers_of_two_shapes_has_those_that_follow_each_other():
    shape = ModelShape.of(TWO_SHAPES)
    part = shape.of_worker(1, 2)
    # layers 5, 11 and the last one see all tokens: two of them lie in the second half
    assert part.mixed.layers == shape.mixed.layers[7:]
    assert [layer.window == 0 for layer in part.mixed.layers].count(True) == 2
    assert shape.num_linear_parameters / 2 < part.num_linear_parameters < shape.num_linear_parameters * 0.55


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_size_per_layer_input": 8}, "each takes an input of its own"),
        ({"num_kv_shared_layers": 2}, "some read keys and values that others have made"),
        ({}, None),
    ],
    ids=["own inputs", "shared keys", "alone"],
)
def test_stages_are_refused_where_the_worker_refuses_them(tmp_path, capsys, command, changes, why):
    (tmp_path / "config.json").write_text(json.dumps({**TWO_SHAPES, **changes}))
    path = str(tmp_path)
    load = ["--trace", "alpaca", "--rate", "1", "--num-requests", "2"]
    of_command = {"plan": [path], "simulate": ["--model", path, *load]}
    argv = [command, *of_command[command], "--device", "a100-40gb", "--pipeline-parallel-size", "2"]
    assert main(argv) == (2 if why else 0)
    printed = capsys.readouterr()
    assert (why or "") in printed.err + printed.out


@pytest.mark.parametrize("family", ["opt", "llama", "mixtral"])
def test_the_largest_step_is_about_what_a_worker_measures(tmp_path, family):
    """Kernels differ in what they keep at once, so the formula is right within a factor of two."""
    path = make_checkpoint(tmp_path / family, family)
    config = worker_config(path, max_num_batched_tokens=256, max_num_seqs=64)
    measured = measure_largest_step(load_model(config), current_platform("cpu"), config).num_bytes
    calculated = LargestStep(256, 64).num_bytes(ModelShape.of(ModelFacts.read(path).hf_config), "float32")
    assert calculated / 2 < measured < calculated * 2
