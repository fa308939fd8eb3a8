import types

import pytest
import torch

from quire.errors import ModelError
from quire.worker.layers import RotaryEmbedding

KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_fast": {
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn_scaled": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
}  # fmt: skip


def config(kind, **changes):
    from transformers import LlamaConfig

    rope = {"rope_type": kind.split("_")[0], "rope_theta": 10_000.0, **KINDS[kind]}
    return LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope, **changes
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_that_of_transformers(kind):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(config(kind))(torch.zeros(1), positions[None])
    table = RotaryEmbedding.from_config(config(kind), 256).cos_sin_cache
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1), atol=1e-5, rtol=0)


def test_a_table_is_as_long_as_asked_for():
    short = RotaryEmbedding.from_config(config("yarn"), 64).cos_sin_cache
    whole = RotaryEmbedding.from_config(config("yarn"), 256).cos_sin_cache
    assert torch.equal(short, whole[:64])


def test_both_spellings_say_the_same():
    old = types.SimpleNamespace(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=256, rope_theta=10_000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
    )  # fmt: skip
    table = RotaryEmbedding.from_config(old, 64).cos_sin_cache
    assert torch.equal(table, RotaryEmbedding.from_config(config("linear"), 64).cos_sin_cache)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "spiral"}, ["spiral", "yarn"]),
        ({"rope_type": "linear"}, ["linear", "factor"]),
        (
            {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
            ["kind of layer"],
        ),
    ],
)
def test_what_is_unknown_or_incomplete_is_refused(rope, words):
    odd = types.SimpleNamespace(hidden_size=128, num_attention_heads=4, rope_parameters=rope)
    with pytest.raises(ModelError) as caught:
        RotaryEmbedding.from_config(odd, 64)
    assert all(word in str(caught.value) for word in words)


def test_dynamic_angles_beyond_the_models_own_length_are_refused():
    with pytest.raises(ModelError, match="max_model_len=512"):
        RotaryEmbedding.from_config(config("dynamic"), 512)


def test_only_part_of_a_head_is_turned_if_the_configuration_says_so():
    rotary = RotaryEmbedding.from_config(
        types.SimpleNamespace(
            hidden_size=128, num_attention_heads=4, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
        ),
        64,
    )
    query = torch.randn(3, 128)
    key = torch.randn(3, 64)
    before = query.clone()
    rotary(torch.tensor([0, 5, 9]), query, key, 32)
    heads, heads_before = query.view(3, 4, 32), before.view(3, 4, 32)
    assert torch.equal(heads[..., 16:], heads_before[..., 16:])
    assert torch.equal(heads[0], heads_before[0])
    assert not torch.allclose(heads[1, :, :16], heads_before[1, :, :16])
