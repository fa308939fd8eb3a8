"""Model code goes through torch.compile as one graph, with attention opaque (4.3.1)."""

import pytest
import torch

from quire.testing.model_harness import ModelHarness, worker_config
from quire.worker.model_loader import load_model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama_rope_llama3", "qwen3_tied"])
def test_one_graph_with_any_number_of_tokens(name, checkpoint, prompt):
    model = load_model(worker_config(checkpoint(name)))
    expected = ModelHarness(model).run(0, prompt)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    harness = ModelHarness(model)
    harness.model = Compiled(model, torch.compile(model, fullgraph=True, dynamic=True, backend=backend))
    logits = torch.cat([harness.step({0: prompt[begin:end]})[0] for begin, end in ((0, 9), (9, 24), (24, 60))])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert len(graphs) == 1, "a new length must not be a new graph"
    called = [node for node in graphs[0].graph.nodes if "quire.attention" in str(node.target)]
    assert len(called) == 3
    assert not any("paged_attention" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.nightly
def test_inductor_computes_the_same(checkpoint, prompt):
    model = load_model(worker_config(checkpoint("llama")))
    expected = ModelHarness(model).run(0, prompt)
    harness = ModelHarness(model)
    harness.model = Compiled(model, torch.compile(model, fullgraph=True, dynamic=True))
    torch.testing.assert_close(harness.run(0, prompt, chunk_size=20), expected, atol=1e-4, rtol=0)


class Compiled:
    """A model whose forward pass is compiled; the rest is the model's own."""

    def __init__(self, model, forward):
        self.compute_logits = model.compute_logits
        self.forward = forward

    def __call__(self, *arguments):
        return self.forward(*arguments)
