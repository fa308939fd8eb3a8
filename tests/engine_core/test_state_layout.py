"""Where the states of a sequence lie in its blocks."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.errors import ModelError
from quire.messages import LayerSpec
from quire.state_layout import state_layout


def attention(name: str, *, window: int = 0) -> LayerSpec:
    """64 bytes a token."""
    return LayerSpec(name=name, num_kv_heads=2, key_dim=8, value_dim=8, bytes_per_element=2, sliding_window=window)


def state(name: str, num_bytes: int) -> LayerSpec:
    return LayerSpec(name=name, num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=0, state_bytes=num_bytes)


def test_a_model_without_states_has_no_layout() -> None:
    assert state_layout([attention("0")], [["0"]], 16) is None


def test_each_layer_takes_whole_chunks_one_after_the_other() -> None:
    layers = [state("0", 1025), attention("1"), state("2", 1024), attention("3"), state("4", 2048)]
    layout = state_layout(layers, [["1", "3"]], 16)
    assert layout is not None
    assert (layout.chunk_bytes, layout.num_places) == (1024, 2)
    assert layout.first_chunk_by_layer == {"0": 0, "2": 2, "4": 3}
    assert layout.num_blocks == 3  # of five chunks
    assert [layout.place_of(chunk) for chunk in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_the_largest_group_without_its_draft_sets_the_number_of_places() -> None:
    layers = [*(attention(str(i), window=8) for i in range(4)), *(attention(f"w{i}") for i in range(2))]
    groups = [["0", "1", "draft.0"], ["2", "3"], ["w0", "w1"]]
    layout = state_layout([*layers, attention("draft.0"), state("s", 3000)], groups, 16)
    assert layout is not None
    assert (layout.num_places, layout.num_blocks) == (2, 2)


def test_without_attention_of_the_target_states_lie_beside_what_a_draft_keeps() -> None:
    draft = attention("draft.0")
    _, of_states = make_groups([state("0", 1000), state("1", 500)], 16)
    groups, of_both = make_groups([state("0", 1000), state("1", 500), draft], 16)
    assert (of_states, of_both) == (2 * 1024, 2 * 1024 + 64 * 16)
    assert [group.layer_names for group in groups] == [("draft.0",), ("0", "1")]


def test_states_beside_attention_layers_of_two_sizes_are_refused() -> None:
    layers = [attention("0"), msgspec.structs.replace(attention("1"), key_dim=16), state("s", 100)]
    with pytest.raises(ModelError, match=r"keep 64, 96 bytes of a token beside layers that keep a state"):
        state_layout(layers, [["0", "1"]], 16)


def test_without_attention_one_block_holds_all_states() -> None:
    layout = state_layout([state("0", 1000), state("1", 1000), state("2", 500)], [], 16)
    assert layout is not None
    assert (layout.chunk_bytes, layout.num_places, layout.num_blocks) == (1024, 3, 1)
    assert layout.first_chunk_by_layer == {"0": 0, "1": 1, "2": 2}
