"""What goes into layers of any stage reaches the last one, bit for bit."""

import pytest
import torch

from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.layers.ranks import Ranks, StageGroup, among
from quire.worker.model_loader import load_model

IDS = torch.tensor([5, 7, 11, 13])
POSITIONS = torch.arange(4)


@pytest.mark.parametrize("indices", [[0, 1, 3], [0, 2], [3]], ids=str)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_inputs_of_layers_are_handed_on(tmp_path, indices, num_stages):
    config = worker_config(make_checkpoint(tmp_path, "llama", num_hidden_layers=4))
    whole = load_model(config)
    seen = {}
    for index, layer in enumerate(whole.model.layers):
        layer.register_forward_pre_hook(
            lambda _, arguments, index=index: seen.__setitem__(
                index, arguments[1] if arguments[2] is None else arguments[1] + arguments[2]
            )
        )
    passed = None
    with torch.inference_mode(), forward_context(profiling_context()):
        expected = whole(IDS, POSITIONS)
        for number in range(num_stages):
            with among(Ranks(stages=StageGroup(number, num_stages))):
                stage = load_model(config)
            stage.forward.tap(indices)
            passed = stage(IDS, POSITIONS, None, passed)
    assert torch.equal(passed, expected)
    assert stage.forward.tapped.keys() == set(indices)
    for index, tapped in stage.forward.tapped.items():
        assert torch.equal(tapped, seen[index])
