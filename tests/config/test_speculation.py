"""speculative_config: what may be left out, what is refused, and what becomes of it."""

import json

import msgspec
import pytest

from quire.config import EngineConfig, EngineOptions, SpeculationConfig, resolve
from quire.config.model_source import embedded_path
from quire.engine_core.launch_document import LaunchDocument
from quire.errors import ModelError, OptionError
from quire.processes.documents import encode_document, read_document

DRAFT = "embedded"  # any checkpoint may draft


def resolved(given):
    config, reasons = resolve(EngineOptions(speculative_config=given))
    assert config.worker.speculation == config.speculation
    return config.speculation, {name: (value, reason) for name, value, reason in reasons.rows}["speculative_config"]


def spoken(given) -> SpeculationConfig:
    speculation, _ = resolved(given)
    assert speculation is not None
    return speculation


def test_by_default_nobody_proposes():
    assert resolved(None) == (None, ("none", "default"))


def test_ngram_needs_nothing_but_its_name():
    speculation, row = resolved({"method": "ngram"})
    assert speculation == SpeculationConfig(method="ngram", num_speculative_tokens=8)
    assert (speculation.prompt_lookup_min, speculation.prompt_lookup_max, speculation.lookahead) == (2, 4, 0)
    assert row == ("ngram, at most 8 tokens", "as asked")


def test_what_people_type_for_vllm_works():
    speculation = spoken({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4})
    assert (speculation.num_speculative_tokens, speculation.prompt_lookup_max) == (4, 4)
    speculation = spoken({"model": str(embedded_path()), "num_speculative_tokens": 3})
    assert (speculation.method, speculation.model_path) == ("draft_model", str(embedded_path()))
    assert speculation.lookahead == 3
    assert spoken({"method": "eagle3", "model": DRAFT}).method == "eagle"


def test_the_method_follows_from_what_is_given(tmp_path):
    assert spoken({"prompt_lookup_max": 3}).method == "ngram"
    assert spoken({"model": DRAFT}).method == "draft_model"
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 1856}
    (tmp_path / "config.json").write_text(json.dumps(config))
    speculation, row = resolved({"model": str(tmp_path)})
    assert speculation.method == "eagle"
    assert row == ("eagle, at most 4 tokens", "the draft is a LlamaForCausalLMEagle3")


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": 1}, (1, 4)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 9}, (2, 9)),
    ],
)
def test_one_bound_of_the_look_up_moves_the_other(given, bounds):
    speculation = spoken(given)
    assert (speculation.prompt_lookup_min, speculation.prompt_lookup_max) == bounds


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "must say who proposes tokens"),
        ({"num_speculative_tokens": 4}, "must say who proposes tokens"),
        ({"methd": "ngram"}, 'there is no such key.*Did you mean "method"'),
        ({"method": "ngramm"}, 'must be one of ngram, draft_model, eagle, mtp. Did you mean "ngram"'),
        ({"method": 3}, "must be a text"),
        ({"method": "draft_model", "model": " "}, "must be a text that is not empty"),
        ({"method": "draft_model"}, "'embedded-draft' drafts for the embedded model"),
        ({"method": "eagle"}, "a model must propose the tokens"),
        ({"method": "ngram", "model": DRAFT}, "ngram proposes from the text alone"),
        ({"model": DRAFT, "prompt_lookup_max": 4}, "only ngram looks tokens up"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 64 tokens"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "between 1 and 64 tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "must be a whole number"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "Lower prompt_lookup_min to 3"),
        ("ngram", "must be a JSON object"),
        (["ngram"], "must be a JSON object"),
        ("{'method': 'ngram'}", "In a shell, put it into single quotes"),
    ],
)
def test_what_cannot_be_is_refused(given, text):
    with pytest.raises(OptionError, match=text):
        resolved(given)


def test_a_draft_that_is_not_there_is_named_by_its_key():
    with pytest.raises(ModelError, match=r"speculative_config: model=\./missing: no such directory"):
        resolved({"model": "./missing"})


def test_json_means_what_a_dict_means():
    given = {"method": "ngram", "prompt_lookup_max": 3}
    assert resolved(json.dumps(given)) == resolved(given)


def test_another_process_reads_the_same(tmp_path):
    config, _ = resolve(EngineOptions(speculative_config={"model": DRAFT}))
    document = LaunchDocument(config=config, endpoint="", folder="")
    with (tmp_path / "document").open("wb+") as file:
        file.write(encode_document(document))
        file.seek(0)
        read = read_document(file, LaunchDocument)
    assert isinstance(read.config, EngineConfig)
    assert msgspec.to_builtins(read.config.speculation) == msgspec.to_builtins(config.speculation)
