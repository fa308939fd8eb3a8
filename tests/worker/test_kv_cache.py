"""Allocation, sharing between groups, and copies of blocks."""

import numpy as np
import pytest
import torch

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.worker.attention import Attention
from quire.worker.kernels.sequence_states import SequenceStates
from quire.worker.kv_cache import KVCache
from quire.worker.state_cache import RecurrentLayer, StateTensor

CPU = torch.device("cpu")


def layers(*names, **fields):
    return {name: Attention(4, 2, 8, 1.0, name=name, **fields) for name in names}


def test_layers_at_the_same_place_of_their_groups_share_a_tensor():
    model = layers("a", "b") | layers("c", "d", sliding_window=4)
    cache = KVCache()
    cache.allocate(model, [["a", "b"], ["c", "d"]], num_blocks=5, block_size=4, device=CPU)

    assert model["a"].k_cache is model["c"].k_cache
    assert model["b"].v_cache is model["d"].v_cache
    assert model["a"].k_cache.data_ptr() != model["b"].k_cache.data_ptr()
    assert [model[name].group for name in "abcd"] == [0, 0, 1, 1]
    assert cache.num_bytes == 2 * 2 * 5 * 2 * 4 * 8 * 4
    assert model["a"].k_cache.shape == (5, 2, 4, 8)
    assert not model["a"].k_cache.any()


def test_values_may_be_narrower_than_keys():
    model = layers("a", value_dim=3)
    KVCache().allocate(model, [["a"]], num_blocks=5, block_size=4, device=CPU)

    assert model["a"].v_cache.shape == (5, 2, 4, 3)


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_values_that_are_in_keys_take_no_memory(kind):
    model = {"a": Attention(4, 1, 12, 1.0, name="a", value_dim=8, values_in_keys=True)}
    model["a"].cache_dtype = kind
    cache = KVCache()
    cache.allocate(model, [["a"]], num_blocks=5, block_size=4, device=CPU)

    assert model["a"].v_cache is model["a"].k_cache
    assert cache.num_bytes == 5 * 4 * model["a"].spec.bytes_per_token
    assert model["a"].spec.bytes_per_token == (48 if kind == torch.float32 else 16)


class Kept(RecurrentLayer):
    """Nothing is computed here."""

    def compute(self, states, inputs, out, spans):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_states_lie_in_blocks_whose_values_are_in_keys(kind):
    """The plan's bytes of a block are those of the tensors: `allocate` would raise, or the states overlap."""
    model = {name: Attention(4, 1, 12, 1.0, name=name, value_dim=8, values_in_keys=True) for name in "ab"}
    for layer in model.values():
        layer.cache_dtype = kind
    states = {name: Kept(name, {"x": StateTensor((20,), torch.float32)}) for name in "st"}
    specs = [layer.spec for layer in (*model.values(), *states.values())]
    groups, block_bytes = make_groups(specs, block_size=4)
    cache = KVCache()
    cache.allocate(model, [group.layer_names for group in groups], 5, 4, CPU, states)

    assert block_bytes == 2 * 4 * model["a"].spec.bytes_per_token
    assert cache.num_bytes == 5 * block_bytes
    # 96 bytes of each state
    num_chunks = 1 if kind == torch.float32 else 2
    none = torch.zeros(0)
    for layer in states.values():
        chunks = SequenceStates(layer.places, layer.first_chunk, none, none, none, none).chunks(layer.state_bytes)
        assert len(chunks) == num_chunks
        for entry, place in chunks:
            layer.places[place][1 + entry] += 1
    written = torch.cat([tensor.view(torch.uint8).flatten() for tensor in cache.tensors])
    assert written.max() == 1
    assert written.sum() == num_chunks * block_bytes


@pytest.mark.parametrize("groups", [[["a"]], [["a", "b", "x"]]])
def test_groups_must_name_the_layers_of_the_model(groups):
    with pytest.raises(ValueError, match="differ in layers"):
        KVCache().allocate(layers("a", "b"), groups, num_blocks=5, block_size=4, device=CPU)


def test_layers_of_other_shapes_have_tensors_of_their_own():
    """Those of a draft: two beside the first layer of the target, one beside the other, which share what they can."""
    target = layers("a") | layers("b", sliding_window=4)
    draft = layers("draft.c", "draft.d", "draft.e", value_dim=3)
    cache = KVCache()
    groups = [["a", "draft.c", "draft.d"], ["b", "draft.e"]]
    cache.allocate(target | draft, groups, num_blocks=5, block_size=4, device=CPU)

    assert target["a"].k_cache is target["b"].k_cache
    assert draft["draft.c"].k_cache is draft["draft.e"].k_cache
    assert len({id(tensor) for tensor in cache.tensors}) == len(cache.tensors) == 3
    assert [layer.group for layer in draft.values()] == [0, 0, 1]
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in cache.tensors]
    cache.copy_blocks(np.array([[1], [4]]))
    assert all(torch.equal(new[4], old[1]) for old, new in zip(before, cache.tensors, strict=True))


def test_blocks_are_copied_in_every_tensor():
    model = layers("a", "b")
    cache = KVCache()
    cache.allocate(model, [["a", "b"]], num_blocks=6, block_size=4, device=CPU)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in cache.tensors]
    cache.copy_blocks(np.array([[1, 2], [4, 5]]))

    for old, new in zip(before, cache.tensors, strict=True):
        assert torch.equal(new[4], old[1])
        assert torch.equal(new[5], old[2])
        assert torch.equal(new[:4], old[:4])


def test_no_copies_and_no_layers_cost_nothing():
    cache = KVCache()
    cache.allocate({}, [], num_blocks=6, block_size=4, device=CPU)
    cache.copy_blocks(np.empty((2, 0), dtype=np.int64))

    assert cache.num_bytes == 0


def test_codes_are_bytes_to_whoever_moves_blocks():
    model = layers("a")
    model["a"].cache_dtype = torch.int8
    cache = KVCache()
    cache.allocate(model, [["a"]], num_blocks=6, block_size=4, device=CPU)
    assert model["a"].k_cache.shape == model["a"].v_cache.shape == (6, 2, 4, 8 + 4)
    assert cache.num_bytes == 6 * 4 * model["a"].spec.bytes_per_token
    assert [tensor.dtype for tensor in cache.tensors] == [torch.uint8]

    model["a"].v_cache[1] = 7
    cache.copy_blocks(np.array([[1], [4]]))
    assert (model["a"].v_cache[4] == 7).all()
    assert not model["a"].k_cache.any()
