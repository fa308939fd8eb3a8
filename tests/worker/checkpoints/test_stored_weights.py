"""What is cut before it is read is, bit for bit, what is read and then cut; and of the file nothing else is touched."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support import quantized_checkpoints as writers
from tests.support.gguf_checkpoints import write_gguf
from torch import Tensor, nn

from quire.config import ModelFacts
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.checkpoints import gguf, open_checkpoint
from quire.worker.checkpoints.quantized_files import QuantizedFiles, format_of
from quire.worker.layers import ColumnParallelLinear, RowParallelLinear, TensorParallelGroup, tensor_parallel
from quire.worker.layers.quantization import GroupBorderError, find_scheme
from quire.worker.layers.stored_weight import StoredWeight
from quire.worker.weight_loading import load_weights

NUM_RANKS = 4
# a fault brings some pages around it
SLACK = 4 << 20

# name -> (writer, its arguments)
FORMATS = {
    "gptq": (writers.write_gptq, {}),
    "gptq 8 bits, one group": (writers.write_gptq, {"bits": 8, "group": -1}),
    "gptq act-order": (writers.write_gptq, {"act_order": True}),
    "awq": (writers.write_awq, {"group": 64}),
    "int8 with zero points": (writers.write_compressed_int8, {"symmetric": False}),
    "packed 4 with zero points": (writers.write_compressed_packed, {"symmetric": False}),
    "packed 8, act-order": (writers.write_compressed_packed, {"bits": 8, "act_order": True}),
    "fp8 in uneven blocks": (writers.write_fp8, {"block": (24, 40)}),
    "fp8 by output": (writers.write_compressed_fp8, {}),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=1)


def stored_in(path):
    checkpoint = open_checkpoint(ModelFacts.read(path), torch.float32)
    for name, weight in checkpoint.tensors():
        if isinstance(weight, StoredWeight):
            yield name, weight


def numbers(weight):
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def outcome(cut):
    """What `cut` makes of a weight before it is read, and after: numbers, or that groups cannot be cut so."""
    try:
        return numbers(cut())
    except GroupBorderError:
        return None


def check_cuts(weight):
    whole = weight.read()
    num_rows, num_columns = weight.shape
    assert whole.shape == weight.shape
    order = torch.arange(num_rows).view(2, -1).t().flatten()
    turned = whole[order] if isinstance(whole, Tensor) else whole.select_rows(order)
    num_cut = 0
    for size in (1, 2, NUM_RANKS, 8):
        for rank in range(size):
            rows, columns = num_rows // size, num_columns // size
            cuts = (
                (lambda of, _: of.narrow(0, rank * rows, rows)),  # noqa: B023
                (lambda of, _: of.narrow(1, rank * columns, columns)),  # noqa: B023
                (lambda of, _: of.narrow(0, rank * rows, rows).narrow(1, rank * columns, columns)),  # noqa: B023
                (lambda _, other: other.narrow(0, rank * rows, rows)),  # noqa: B023
            )
            for cut in cuts:
                before = outcome(lambda: cut(weight, weight.select_rows(order)).read())  # noqa: B023
                after = outcome(lambda: cut(whole, turned))  # noqa: B023
                assert (before is None) == (after is None)
                assert before is None or torch.equal(before, after)
                num_cut += before is not None
    assert num_cut


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_has_the_bits_of_the_whole(name, source, tmp_path):
    write, arguments = FORMATS[name]
    write(tmp_path, source, **arguments)
    weights = list(stored_in(tmp_path))
    assert len(weights) == 7
    for _, weight in weights[:3] + weights[-1:]:
        check_cuts(weight)


def test_a_part_of_an_expert_has_the_bits_of_the_whole(tmp_path):
    writers.write_mxfp4(tmp_path / "mxfp4", make_checkpoint(tmp_path / "plain", "gpt_oss"))
    weights = list(stored_in(tmp_path / "mxfp4"))
    assert len(weights) > 2
    for _, weight in weights[:2]:
        check_cuts(weight)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q6_K"])
def test_a_part_of_a_gguf_file_has_the_bits_of_the_whole(kind, tmp_path):
    pytest.importorskip("gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
    write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "plain", "llama", **sizes), kind)
    weights = dict(stored_in(tmp_path / "model.gguf"))
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        check_cuts(weights[f"model.layers.0.{module}.weight"])


# ---- what is touched -----------------------------------------------------------------------------------------------


class Watched:
    """A checkpoint of one layer, and the most of its file that was in this process's memory."""

    def __init__(self, folder, declared, tensors):
        self.file = folder / "model.safetensors"
        save_file({f"layer.{leaf}": tensor for leaf, tensor in tensors.items()}, self.file, metadata={"format": "pt"})
        self._files = QuantizedFiles(CheckpointFiles(folder), format_of(declared, torch.float32))
        self.num_bytes = self._files.num_bytes
        self.num_resident_bytes = 0

    def tensors(self):
        for name, weight in self._files.tensors():
            yield name, weight
            maps = Path("/proc/self/smaps").read_text()
            found = re.findall(rf"{re.escape(str(self.file))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)
            self.num_resident_bytes = max(self.num_resident_bytes, sum(map(int, found)) * 1024)


def gptq(num_inputs, num_outputs):
    return {"quant_method": "gptq", "bits": 4}, {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (num_inputs // 8, num_outputs), dtype=torch.int32),
        "qzeros": torch.zeros(1, num_outputs // 8, dtype=torch.int32),
        "scales": torch.ones(1, num_outputs, dtype=torch.float16),
    }


def awq(num_inputs, num_outputs):
    return {"quant_method": "awq", "bits": 4}, {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (num_inputs, num_outputs // 8), dtype=torch.int32),
        "qzeros": torch.zeros(1, num_outputs // 8, dtype=torch.int32),
        "scales": torch.ones(1, num_outputs, dtype=torch.float16),
    }


def fp8(num_inputs, num_outputs):
    return {"quant_method": "fp8"}, {
        "weight": torch.zeros(num_outputs, num_inputs, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale": torch.ones(1),
    }


@pytest.mark.parametrize(
    ("make", "layer", "shape"),
    [
        (gptq, RowParallelLinear, (1 << 13, 1 << 12)),
        (awq, RowParallelLinear, (1 << 13, 1 << 12)),
        (fp8, ColumnParallelLinear, (1 << 12, 1 << 12)),
    ],
)
def test_a_rank_touches_its_own_part_of_the_file(make, layer, shape, tmp_path):
    """Where it lies in one piece. Where it is a part of each row this cannot be seen: pages are mapped together."""
    num_inputs, num_outputs = shape
    checkpoint = Watched(tmp_path, *make(num_inputs, num_outputs))
    model = nn.Module()
    with tensor_parallel(TensorParallelGroup(1, NUM_RANKS)):
        model.layer = layer(num_inputs, num_outputs, bias=False)
    load_weights(model, checkpoint, find_scheme("int8_weight_only") if make is gptq else None)
    assert checkpoint.num_bytes > 15 << 20
    assert 0 < checkpoint.num_resident_bytes <= checkpoint.num_bytes // NUM_RANKS + SLACK


def test_a_rank_reads_its_own_rows_of_a_gguf_file(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
    write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "plain", "llama", **sizes), "Q8_0")
    num_read = [0]
    as_bytes = gguf._as_bytes

    def counting(file, offset, num_bytes):
        num_read[0] += num_bytes
        return as_bytes(file, offset, num_bytes)

    monkeypatch.setattr(gguf, "_as_bytes", counting)
    for name, weight in stored_in(tmp_path / "model.gguf"):
        if "k_proj" in name:
            continue  # fewer heads than ranks, and the rows of a head are not in our order
        num_rows = weight.shape[0] // NUM_RANKS
        num_read[0] = 0
        weight.narrow(0, num_rows, num_rows).read()
        # and one block, which tells what all are like
        assert 0 < num_read[0] <= weight.nbytes // NUM_RANKS + 34, name
