"""The watching that decides whether a model may run on paged attention, on models of a few lines."""

import pytest
import torch
from torch import nn

from quire.errors import ModelError
from quire.worker.models.transformers_probe import PROBE, probe, register_probe

SIZE = 8


def causal(batch, head, query, key):
    return key <= query


def sliding(width):
    return lambda batch, head, query, key: (key <= query) & (key > query - width)


def chunked(width):
    return lambda batch, head, query, key: (key <= query) & (key // width == query // width)


class Layer(nn.Module):
    """One attention layer with learned positions; what can go wrong is switched on by a test."""

    def __init__(self, *, mask=causal, window=None, leak=False, uses_positions=True, calls=1, arguments=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randn(16, SIZE, generator=generator)
        self.positions = torch.randn(16, SIZE, generator=generator) * uses_positions
        self.mask, self.sliding_window, self.leak, self.calls = mask, window, leak, calls
        self.arguments = arguments or {}

    def run(self, input_ids, positions):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        hidden = self.tokens[input_ids] + self.positions[positions]
        if self.leak:
            hidden = hidden + hidden.cumsum(0)
        mask = self.mask
        if callable(mask):
            length = len(input_ids)
            mask = ALL_MASK_ATTENTION_FUNCTIONS[PROBE](q_length=length, kv_length=length, mask_function=mask)
        heads = hidden.view(1, -1, 2, SIZE // 2).transpose(1, 2)
        for _ in range(self.calls):
            out, _ = ALL_ATTENTION_FUNCTIONS[PROBE](self, heads, heads[:, :1], heads[:, :1], mask, **self.arguments)
        return hidden + out[0].flatten(1)


def watch(layer):
    register_probe()
    return probe(layer.run, lambda hidden: hidden, torch.device("cpu"))


def test_shapes_and_defaults_are_recorded():
    (call,) = watch(Layer())
    assert (call.num_heads, call.num_kv_heads, call.key_dim, call.value_dim) == (2, 1, 4, 4)
    assert (call.scale, call.sliding_window, call.soft_cap, call.sinks) == (0.5, 0, 0.0, None)


def test_arguments_are_recorded():
    sinks = torch.zeros(2)
    (call,) = watch(Layer(arguments={"scaling": 0.25, "softcap": 30.0, "s_aux": sinks}))
    assert (call.scale, call.soft_cap) == (0.25, 30.0)
    assert call.sinks is sinks


@pytest.mark.parametrize("width", [1, 2, 3, 24, 4096])
def test_the_mask_says_how_wide_a_window_is(width):
    (call,) = watch(Layer(mask=sliding(width), window=width))
    assert call.sliding_window == width


def test_a_window_that_the_mask_does_not_have_does_not_count():
    (call,) = watch(Layer(mask=causal, window=24))
    assert call.sliding_window == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"leak": True}, "outside of attention"),
        ({"uses_positions": False}, "position_ids change nothing"),
        ({"calls": 0}, "do not call the attention interface"),
        ({"calls": 2}, "twice in a pass"),
        ({"mask": lambda batch, head, query, key: torch.tensor(True)}, "not causal"),
        ({"mask": chunked(24), "window": 24}, "chunked"),
        ({"mask": sliding(24)}, "pattern other than"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "changes the attention mask"),
        ({"mask": None}, "no causal mask"),
        ({"arguments": {"position_bias": torch.zeros(1)}}, "position_bias"),
    ],
)
def test_what_the_cache_cannot_serve_is_refused(options, reason):
    if options.get("calls") == 0:
        layer = Layer()
        layer.run = lambda input_ids, positions: layer.tokens[input_ids]
    else:
        layer = Layer(**options)
    with pytest.raises(ModelError, match=reason):
        watch(layer)
