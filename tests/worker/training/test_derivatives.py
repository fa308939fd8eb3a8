"""Gradients of the served kernels are those of Transformers' autograd, for every kind of layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.modeling import LoRA, TrainedModel, load_for_training
from quire.testing.tiny_adapters import make_adapter, merged_checkpoint
from quire.testing.tiny_checkpoints import make_checkpoint

_ORDER = {"q": 0, "k": 1, "v": 2}
_LENGTHS = (40, 17, 33)


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in _LENGTHS]


def load(path: Path, **options: Any) -> TrainedModel:
    return load_for_training(str(path), dtype="float32", num_threads=1, max_model_len=128, **options)


def backward_through_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for sequence in sequences():
        logprobs = model(torch.tensor([sequence]), use_cache=False).logits[0].float().log_softmax(-1)
        (-logprobs[:-1].gather(1, torch.tensor(sequence[1:])[:, None]).sum()).backward()
    return model


def expected_gradients(trained: TrainedModel, reference: Any) -> dict[str, Tensor]:
    """Those of Transformers, by the names that the parameters have here."""
    pieces: dict[str, list[tuple[Any, Tensor]]] = {}
    for source, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        for name, part, gradient in trained.model.checkpoint_map.place(source, parameter.grad):
            path, _, leaf = name.rpartition(".")
            if path.endswith(".experts") and leaf in ("gate_up_proj", "down_proj"):  # of all experts in one tensor
                for number, own in enumerate(gradient):
                    pieces[f"{path}.{number}.{leaf}.weight"] = [(None, own)]
            elif path.endswith(("conv", "conv1d")) and gradient.ndim == 3:
                pieces[name] = [(None, gradient.squeeze(1).T)]
            else:
                pieces.setdefault(name, []).append((part, gradient))
    return {
        name: torch.cat([one for _, one in sorted(parts, key=lambda entry: _ORDER.get(entry[0], entry[0] or 0))])
        for name, parts in pieces.items()
    }


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3_tied",
        "qwen3_moe",
        "lfm2",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "phi3", "phi_norm", "ministral3", "olmo3",
                "llama_bias", "mistral", "qwen2_window", "opt", "gpt2", "gemma3_cap", "gpt_oss", "mixtral", "qwen2_moe",
                "qwen3_next", "mamba2", "granitemoehybrid", "deepseek_v2", "deepseek_v3", "llama4",
            )
        ),
    ],
)  # fmt: skip
def test_gradients_are_those_of_transformers(tmp_path: Path, name: str):
    path = make_checkpoint(tmp_path / name, name)
    trained = load(path)
    (-torch.cat(trained.logprobs(sequences())).sum()).backward()
    expected = expected_gradients(trained, backward_through_transformers(path))
    own = {name: parameter.grad for name, parameter in trained.named_parameters() if parameter.grad is not None}
    assert own.keys() == expected.keys()
    for parameter, gradient in own.items():
        scale = expected[parameter].abs().max()
        torch.testing.assert_close(gradient, expected[parameter], atol=2e-4 * float(scale), rtol=0, msg=parameter)


def test_what_reads_the_keys_of_another_layer_is_refused_by_name(tmp_path: Path):
    trained = load(make_checkpoint(tmp_path / "gemma4", "gemma4"))
    with pytest.raises(ModelError, match=r"model\.layers\.\d+\.self_attn.*cannot be trained"):
        trained.logprobs(sequences())


def test_what_transformers_runs_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="Train it with Transformers"):
        load(make_checkpoint(tmp_path / "gemma2", "gemma2"))


def test_codes_are_refused_but_take_an_adapter(tmp_path: Path):
    path = make_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(ModelError, match="codes cannot be trained"):
        load(path, quantization="int8")
    trained = load(path, quantization="int8", lora=LoRA(rank=2))
    (-torch.cat(trained.logprobs(sequences())).sum()).backward()
    assert all(
        bool(parameter.grad.abs().max() > 0)
        for name, parameter in trained.named_parameters()
        if "lora_B" in name and parameter.grad is not None
    )


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ("q_proj", "v_proj", "down_proj")), ("phi3", ("qkv_proj", "gate_up_proj", "down_proj"))],
)
def test_gradients_of_an_adapter_follow_from_those_of_the_merged_weights(tmp_path: Path, name: str, targets: Any):
    """W' = W + s B A, so dA = s B^T dW' and dB = s dW' A^T."""
    path = make_checkpoint(tmp_path / name, name)
    adapter = make_adapter(tmp_path / "adapter", path, seed=1, rank=4, targets=targets)
    trained = load(path, lora=LoRA.of(str(adapter)))
    (-torch.cat(trained.logprobs(sequences())).sum()).backward()
    merged = backward_through_transformers(merged_checkpoint(tmp_path / "merged", path, adapter))
    gradients = {f"base_model.model.{name}": parameter.grad for name, parameter in merged.named_parameters()}
    own = dict(trained.named_parameters())
    scale = trained.adapter.lora.alpha / trained.adapter.lora.rank
    assert len(own) == 2 * 3 * 3
    for name, parameter in own.items():
        of_weight = gradients[name.partition(".lora_")[0] + ".weight"]
        other = own[name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")].detach()
        expected = scale * (other.t() @ of_weight if "lora_A" in name else of_weight @ other.t())
        bound = 5e-4 * float(expected.abs().max())
        torch.testing.assert_close(parameter.grad, expected, atol=bound, rtol=0, msg=name)


def test_without_its_adapter_the_model_itself_speaks(tmp_path: Path):
    path = make_checkpoint(tmp_path / "llama", "llama")
    adapter = make_adapter(tmp_path / "adapter", path, seed=1, rank=4, targets=("q_proj", "down_proj"))
    alone, trained = load(path), load(path, lora=LoRA.of(str(adapter)))
    with torch.no_grad():
        for ask in (TrainedModel.logits, TrainedModel.logprobs):
            expected = torch.cat(ask(alone, sequences()))
            assert torch.equal(torch.cat(ask(trained, sequences(), with_adapter=False)), expected)
            assert not torch.allclose(torch.cat(ask(trained, sequences())), expected)


def test_what_is_no_adapter_of_this_model_is_refused(tmp_path: Path):
    path = make_checkpoint(tmp_path / "llama", "llama")
    trained = load(path, lora=LoRA(rank=2))
    with pytest.raises(ModelError, match=r"Take adapter\.save"):
        trained.state_dict()
    folder = tmp_path / "adapter"
    trained.adapter.save(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for values, words in (
        ({**config, "alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"target_modules": config["target_modules"]}, "lora_alpha"),
        ({**config, "r": 1}, "sizes"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(values))
        with pytest.raises(ModelError, match=words):
            load(path, lora=LoRA.of(str(folder)))


def test_a_step_lowers_the_loss_and_packs_what_has_changed(tmp_path: Path):
    trained = load(make_checkpoint(tmp_path / "llama", "llama_tied"), master_dtype=torch.float32)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = -torch.cat(trained.logprobs(sequences())).sum()
        loss.backward()
        optimizer.step()
        assert trained.update() == len(trained.parameters())
        losses.append(float(loss.detach()))
    assert trained.update() == 0
    assert losses[0] > losses[1] > losses[2]


def test_masters_in_float32_train_a_model_in_bfloat16(tmp_path: Path):
    path = make_checkpoint(tmp_path / "llama", "llama", dtype=torch.bfloat16)
    trained = load_for_training(str(path), dtype="bfloat16", num_threads=1, max_model_len=128)
    exact = load(path)
    for model in (trained, exact):
        (-torch.cat(model.logprobs(sequences())).sum()).backward()
    expected = dict(exact.named_parameters())
    for name, parameter in trained.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        other = expected[name].grad
        assert other is not None
        cosine = torch.nn.functional.cosine_similarity(parameter.grad.flatten(), other.flatten(), dim=0)
        assert cosine > 0.98, name


@pytest.mark.parametrize("name", ["falcon", "bloom"])
def test_what_holds_several_layers_in_turn_is_no_target(tmp_path, name):
    path = make_checkpoint(tmp_path / name, name)
    others = r"Choose targets among dense, dense_4h_to_h, dense_h_to_4h\.$"
    with pytest.raises(
        ModelError, match=f"^lora: query_key_value holds the rows of several layers in turn, .* {others}"
    ):
        load(path, lora=LoRA(targets=["query_key_value", "dense"]))
    with pytest.raises(ModelError, match=f"^lora: the model has no linear layer named q_proj, .* {others}"):
        load(path, lora=LoRA())
    assert len(load(path, lora=LoRA(targets=["dense"])).parameters()) > 0
