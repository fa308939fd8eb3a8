"""docs/adding-a-model.md, followed by a package that is not Quire: a model in a folder of its own, an entry point."""

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from quire.errors import ModelError
from quire.testing.model_contract import check_cuts_and_mixtures
from quire.testing.model_harness import ModelHarness, worker_config
from quire.worker.model_loader import load_model
from quire.worker.models.registry import native_model_types

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-model.md"
# The model of the page itself, so that the page stays true.
SOURCE = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
CONFIG = json.loads(PAGE.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0])
SIZE, VOCAB, LENGTH = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["max_position_embeddings"]
LAYERS, HEADS = CONFIG["num_hidden_layers"], CONFIG["num_attention_heads"]


@pytest.fixture
def toy_package(tmp_path, monkeypatch):
    """What `pip install toy-models` would leave behind."""
    (tmp_path / "toy_models.py").write_text(SOURCE)
    info = tmp_path / "toy_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.models]\ntoy = toy_models:ToyForCausalLM\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("toy_models", None)


@pytest.fixture
def toy_checkpoint(tmp_path):
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {"backbone.tokens.weight": (VOCAB, SIZE), "backbone.positions.weight": (LENGTH, SIZE)}
    for index in range(LAYERS):
        layer = f"backbone.layers.{index}."
        shapes |= {layer + "norm.weight": (SIZE,), layer + "norm.bias": (SIZE,), layer + "out.weight": (SIZE, SIZE)}
        shapes |= {f"{layer}{name}.weight": (SIZE, SIZE) for name in ("query", "key", "value")}
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path, weights


def plain_logits(weights, tokens):
    """The same model in a dozen lines of PyTorch."""
    import torch.nn.functional as F

    hidden = weights["backbone.tokens.weight"][tokens] + weights["backbone.positions.weight"][: len(tokens)]
    for index in range(LAYERS):
        layer = {name.removeprefix(f"backbone.layers.{index}."): tensor for name, tensor in weights.items()}
        x = F.layer_norm(hidden, (SIZE,), layer["norm.weight"], layer["norm.bias"])
        query, key, value = (
            (x @ layer[f"{name}.weight"].T).view(-1, HEADS, SIZE // HEADS).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + mixed.transpose(0, 1).flatten(1) @ layer["out.weight"].T
    return hidden @ weights["backbone.tokens.weight"].T


def test_a_model_of_another_package_is_found_loaded_and_right(toy_package, toy_checkpoint):
    path, weights = toy_checkpoint
    assert "toy" in {point.name for point in entry_points(group="quire.models")}
    assert "toy" in native_model_types()
    model = load_model(worker_config(path, max_model_len=64))
    assert type(model).__name__ == "ToyForCausalLM"
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = plain_logits(weights, tokens)
    torch.testing.assert_close(ModelHarness(model).run(0, tokens), expected, atol=1e-4, rtol=0)
    check_cuts_and_mixtures(model, tokens, expected)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_key_is_named_with_its_file(key, toy_package, toy_checkpoint):
    path, _ = toy_checkpoint
    (path / "config.json").write_text(json.dumps({name: value for name, value in CONFIG.items() if name != key}))
    with pytest.raises(ModelError, match=rf"config\.json: no {key}, which this model needs"):
        load_model(worker_config(path))


def test_without_the_package_the_model_is_unknown(toy_checkpoint):
    with pytest.raises(ModelError, match="model_type=toy"):
        load_model(worker_config(toy_checkpoint[0]))
