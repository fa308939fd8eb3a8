import pytest
import torch

from quire.errors import ModelError
from quire.worker.layers import GatedActivation, activation


@pytest.mark.parametrize(
    "name",
    "gelu gelu_fast gelu_new gelu_pytorch_tanh relu relu2 sigmoid silu swish tanh".split(),
)
def test_activations_mean_what_they_mean_in_transformers(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 33)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_multiplies_the_second_half(name):
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(GatedActivation(name)(x), activation(name)(x[:, :6]) * x[:, 6:])


def test_an_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(ModelError, match=r'Did you mean "gelu_fast"'):
        activation("gelu_fst")
