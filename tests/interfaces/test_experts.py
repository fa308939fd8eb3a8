"""Tokens by expert, as users see them: LLM.statistics() and /metrics."""

import json

import pytest

from quire import LLM, SamplingParams
from quire.observability.metrics import ServerMetrics
from quire.testing.tiny_checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def by_layer(statistics):
    counts = {}
    for key, value in statistics.items():
        if key.startswith("expert_"):
            _, layer, expert, *_ = key.split("_")
            counts.setdefault(layer, {})[int(expert)] = value
    return counts


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"num_threads": 2}])
@pytest.mark.parametrize(
    ("name", "layers", "top_k"),
    [("gpt_oss", "012", 2), ("qwen2_moe", "02", 2), ("deepseek_v2", "12", 2), ("llama4_dense", "1", 1)],
)
def test_each_token_is_counted_at_its_experts(name, layers, top_k, options, tmp_path):
    path = make_checkpoint(tmp_path, name)
    with LLM(str(path), dtype="float32", max_model_len=128, **options) as llm:
        assert by_layer(llm.statistics()) == {layer: dict.fromkeys(range(4), 0) for layer in layers}
        llm.generate(["a prompt", "another one"], GREEDY, use_tqdm=False)
        statistics = llm.statistics()
    counts = by_layer(statistics)
    # the last token of an answer is computed by nobody
    num_tokens = len("a prompt" + "another one") + 2 * (9 - 1)
    expected = dict.fromkeys(layers, top_k * num_tokens)
    last = str(json.loads((path / "config.json").read_text())["num_hidden_layers"] - 1)
    if last in layers and not options.get("enforce_eager"):
        # a program computes no more there than the tokens whose results are read
        expected[last] = top_k * 2 * 9
    assert {layer: sum(of_layer.values()) for layer, of_layer in counts.items()} == expected
    assert max(counts[layers[0]].values()) < top_k * num_tokens, "all tokens at one expert: nothing was routed"
    text = ServerMetrics().exposition(statistics).decode()
    line = f'quire:expert_tokens_total{{expert="3",layer="{layers[-1]}",model_name=""}} {counts[layers[-1]][3]:.1f}'
    assert line in text.splitlines()
    assert text.count("quire:expert_tokens_total{") == 4 * len(layers)


def test_a_model_without_experts_has_no_such_metric():
    with LLM() as llm:
        assert by_layer(llm.statistics()) == {}


def test_many_experts_are_summed_over_layers(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.worker.layers.experts.MOST_STATISTICS", 11)
    path = make_checkpoint(tmp_path, "gpt_oss")
    with LLM(str(path), dtype="float32", max_model_len=128, engine_process=False) as llm:
        llm.generate("a prompt", GREEDY, use_tqdm=False)
        counts = by_layer(llm.statistics())
    assert list(counts) == ["all"]
    # of the prompt the last layer computes one token
    assert sum(counts["all"].values()) == 2 * (2 * (8 + 8) + (1 + 8))
