"""No field is ignored in silence: each field of each request changes the answer, the stream or an error.

A row is (field, what else is sent, the value). The same request with the value and without it, or with `None`, must not
get the same answer. It runs on the embedded model with a tokenizer that adds a token, and a template that looks at a
value. A new request type, or a field without a row, fails here.
"""

import json
import re
import secrets
import shutil
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest
from fastapi.routing import APIRoute
from tests.support.server_process import ServerProcess

from quire.interfaces.gateway import create_app
from quire.interfaces.server.llama_cpp.fields import LlamaCppFields
from quire.interfaces.server.openai.requests import PromptPiece, StreamedCompletionRequest, StreamOptions
from quire.interfaces.server.wire.api_description import description_of
from quire.interfaces.server.wire.field_rules import IGNORED

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "src" / "quire" / "embedded"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PREFIXES = "/v1/admin/pinned_prefixes"
LONG = "Once upon a time there was a little dog who lived in a house beside the sea. " * 3
SEA = {"role": "user", "content": "Tell me about the sea. " * 8}
WHOLE_CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
FUNCTION = {"type": "function", "name": "get_weather", "parameters": WHOLE_CITY}
TOOL = {"name": "get_weather", "input_schema": WHOLE_CITY}
SCORES = "message.output_text.logprobs"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WHOLE_CITY}}]
GOES_ON = {"max_tokens": 40, "ignore_eos": True}
FREE = {**GOES_ON, "temperature": 2.0, "seed": 1}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
NO_END = {"logit_bias": {"0": -100, "5": -100}}

# of both endpoints
GENERATION = [
    ("model", {}, "another"),
    ("n", {}, 2),
    ("temperature", {**FREE, "temperature": 0}, 2.0),
    ("top_p", FREE, 0.01),
    ("presence_penalty", GOES_ON, 2.0),
    ("frequency_penalty", GOES_ON, 2.0),
    ("seed", FREE, 2),
    ("stop", GOES_ON, "e"),
    ("logit_bias", {}, {"300": 100}),
    ("stream", {}, True),
    ("stream_options", {"stream": True}, {"include_usage": True}),
    ("top_k", FREE, 1),
    ("min_p", FREE, 1.0),
    ("repetition_penalty", GOES_ON, 2.0),
    ("min_tokens", {"stop": "e", "max_tokens": 40}, 20),
    # this model does not think, and says so; what it does to one that does: tests/interfaces/test_thinking_budget.py
    ("thinking_token_budget", {}, 5),
    ("ignore_eos", {"logit_bias": {"5": 100}}, True),
    ("stop_token_ids", {"allowed_token_ids": [300]}, [300]),
    ("skip_special_tokens", {"allowed_token_ids": [2]}, False),
    ("include_stop_str_in_output", {"stop": "e", "max_tokens": 40}, True),
    ("bad_words", {"allowed_token_ids": [300, 301], "logit_bias": {"300": 1}}, ["{300}"]),
    ("allowed_token_ids", {}, [300]),
    ("response_format", {}, FORM),
    ("structured_outputs", {}, {"choice": ["a", "b"]}),
    ("guided_json", {}, {"enum": ["a"]}),
    ("guided_regex", {}, "ab*c"),
    ("guided_choice", {}, ["a", "b"]),
    ("guided_grammar", {}, 'start: "a"'),
    ("prompt_logprobs", {}, 1),
    ("truncate_prompt_tokens", {}, 4),
    ("truncation_side", {"truncate_prompt_tokens": 7, "return_token_ids": True}, "right"),
    ("use_beam_search", {"n": 2}, True),
    ("length_penalty", {"use_beam_search": True, "n": 4, "logit_bias": None}, -30.0),
    ("early_stopping", {"use_beam_search": False}, True),
    ("do_sample", {"use_beam_search": True, "n": 4, "temperature": 2.0, "seed": 1, "logit_bias": None}, True),
    ("cache_salt", {"cached": True}, "mine"),
    ("kv_transfer_params", {}, {"whose": "nobody's"}),
    # refused here; what it does: tests/interfaces/server/test_watermark.py
    ("watermarking", FREE, True),
]


# of what is made into a chat; the name of the field for its length, and of its stop strings
def dialect(limit: str, stop: str) -> list[tuple[str, dict, object]]:
    goes_on = {limit: 40, "ignore_eos": True}
    free = {**goes_on, "temperature": 2.0, "seed": 1}
    stops = {**goes_on, stop: ["e"]}
    return [
        ("model", {}, "another"),
        ("stream", {}, True),
        ("temperature", {**free, "temperature": 0}, 2.0),
        ("top_p", free, 0.01),
        ("top_k", free, 1),
        ("min_p", free, 1.0),
        ("seed", free, 2),
        ("presence_penalty", goes_on, 2.0),
        ("frequency_penalty", goes_on, 2.0),
        ("repetition_penalty", goes_on, 2.0),
        ("min_tokens", stops, 20),
        ("thinking_token_budget", {}, 5),
        ("ignore_eos", {limit: 60}, True),
        ("priority", {}, 10**30),
        ("cache_salt", {"cached": True}, "mine"),
        ("chat_template_kwargs", {}, {"mood": "calm"}),
        (limit, {}, 3),
        (stop, goes_on, ["e"]),
    ]


# in an answer
NEW_EACH_TIME = r"\w*id|created|\w+_at|obfuscation|\w+_duration|\w+_ms|\w+_per_second|per_token_ms"
OLLAMA = {"model": "quire", "stream": False, "options": {"num_predict": 10, "temperature": 0}}
GOES_ON_LLAMA = {"n_predict": 40, "ignore_eos": True}
FREE_LLAMA = {**GOES_ON_LLAMA, "temperature": 2.0, "seed": 1}


def of_ollama() -> list[tuple[str, dict, object]]:
    return [
        ("model", {}, "another"),
        ("stream", {}, True),
        ("options", {}, {"num_predict": 3, "temperature": 0}),
        ("format", {}, {"enum": ["a"]}),
        ("think", {}, "low"),
        ("keep_alive", {}, "soon"),
        ("logprobs", {}, True),
        ("top_logprobs", {"logprobs": True}, 2),
    ]


ROWS = {
    "CompletionRequest": (COMPLETIONS, {"prompt": LONG, "max_tokens": 10, "temperature": 0}, [
        *GENERATION,
        ("prompt", {}, "Another"),
        ("max_tokens", {}, 3),
        ("echo", {}, True),
        ("logprobs", {}, 1),
        ("logprob_token_ids", {"logprobs": 1}, [300, 301]),
        # this model fills no holes, and says so; what one does that can: tests/interfaces/server/test_vllm_fields.py
        ("suffix", {}, "x"),
        # refused here; what comes of vectors: tests/interfaces/server/test_prompt_embeds.py
        ("prompt_embeds", {}, "AAAA"),
        ("add_special_tokens", {}, False),
        ("return_token_ids", {}, True),
        ("return_tokens_as_token_ids", {"logprobs": 1}, True),
    ]),
    "ChatRequest": (CHAT, {"messages": [SEA], "max_tokens": 10, "temperature": 0}, [
        *GENERATION,
        ("messages", {}, [{"role": "user", "content": "x"}]),
        ("max_completion_tokens", {"max_tokens": None}, 3),
        ("max_tokens", {}, 3),
        ("logprobs", {}, True),
        ("top_logprobs", {"logprobs": True}, 2),
        ("logprob_token_ids", {"logprobs": True}, [300, 301]),
        ("tools", {}, TOOLS),
        ("tool_choice", {"tools": TOOLS, "max_tokens": 60}, "required"),
        ("parallel_tool_calls", {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, **NO_END}, False),
        ("add_generation_prompt", {}, False),
        ("add_special_tokens", {}, True),
        ("continue_final_message", {"messages": [SEA, {"role": "assistant", "content": "The"}]}, True),
        ("chat_template", {}, "{{ messages }}"),
        ("chat_template_kwargs", {}, {"mood": "calm"}),
        ("reasoning_effort", {}, "low"),
        ("echo", {}, True),
        ("return_token_ids", {}, True),
        ("return_tokens_as_token_ids", {"logprobs": True}, True),
    ]),
    "ResponsesRequest": (RESPONSES, {"input": SEA["content"], "max_output_tokens": 10, "temperature": 0}, [
        *dialect("max_output_tokens", "stop"),
        ("input", {}, "x"),
        ("enable_response_messages", {}, True),
        ("instructions", {}, "Be short."),
        ("previous_response_id", {}, "resp_none"),
        ("store", {}, False),
        ("background", {}, True),
        ("text", {}, {"format": {"type": "json_object"}}),
        ("tools", {}, [FUNCTION]),
        ("tool_choice", {"tools": [FUNCTION], "max_output_tokens": 60}, "required"),
        ("parallel_tool_calls", {}, False),
        ("include", {}, [SCORES]),
        ("top_logprobs", {"include": [SCORES]}, 2),
        ("truncation", {"input": [{"role": "user", "content": LONG * 30}, SEA]}, "auto"),
        ("metadata", {}, {"a": "b"}),
        ("reasoning", {}, {"effort": "low"}),
        ("stream_options", {}, {"include_obfuscation": True}),
    ]),
    "MessagesRequest": (MESSAGES, {"messages": [SEA], "max_tokens": 10, "temperature": 0}, [
        *dialect("max_tokens", "stop_sequences"),
        ("messages", {}, [{"role": "user", "content": "x"}]),
        ("system", {}, "Be short."),
        ("tools", {}, [TOOL]),
        ("tool_choice", {"tools": [TOOL], "max_tokens": 60}, {"type": "any"}),
        ("thinking", {}, {"type": "enabled", "budget_tokens": 1024}),
        ("output_config", {}, {"effort": "low"}),
        ("kv_transfer_params", {}, {"whose": "nobody's"}),
    ]),
    "OllamaChatRequest": ("/api/chat", {**OLLAMA, "messages": [SEA]}, [
        *of_ollama(),
        ("messages", {}, [{"role": "user", "content": "x"}]),
        ("tools", {}, TOOLS),
    ]),
    "OllamaGenerateRequest": ("/api/generate", {**OLLAMA, "prompt": LONG}, [
        *of_ollama(),
        ("prompt", {}, "x"),
        ("system", {}, "Be short."),
        ("raw", {}, True),
        # this model neither sees nor fills holes, and says so
        ("images", {}, ["aGVsbG8="]),
        ("suffix", {}, "the end"),
    ]),
    "OllamaEmbedRequest": ("/api/embed", {"model": "quire", "input": "dog"}, [
        ("model", {}, "another"),
        ("input", {}, "cat"),
        ("dimensions", {}, 8),
        ("keep_alive", {}, "soon"),
    ]),
    "OllamaEmbeddingsRequest": ("/api/embeddings", {"model": "quire", "prompt": "dog"}, [
        ("model", {}, "another"),
        ("prompt", {}, "cat"),
        ("keep_alive", {}, "soon"),
    ]),
    "ShowRequest": ("/api/show", {"model": "quire"}, [("model", {}, "another"), ("name", {"model": None}, "quire")]),
    "PullRequest": ("/api/pull", {"model": "quire"}, [("model", {}, "another"), ("name", {"model": None}, "quire")]),
    "CompletionOfLlamaCpp": ("/completion", {"prompt": LONG, "n_predict": 10, "temperature": 0}, [
        ("model", {}, "another"),
        ("prompt", {}, "Another"),
        ("stream", {}, True),
        ("n_predict", {}, 3),
        ("temperature", {**FREE_LLAMA, "temperature": 0}, 2.0),
        ("top_k", FREE_LLAMA, 1),
        ("top_p", FREE_LLAMA, 0.01),
        ("min_p", FREE_LLAMA, 1.0),
        ("seed", FREE_LLAMA, 2),
        ("stop", GOES_ON_LLAMA, "e"),
        ("repeat_penalty", GOES_ON_LLAMA, 2.0),
        ("presence_penalty", GOES_ON_LLAMA, 2.0),
        ("frequency_penalty", GOES_ON_LLAMA, 2.0),
        ("ignore_eos", {"logit_bias": [[5, 100]]}, True),
        ("logit_bias", {}, [[300, 100]]),
        ("grammar", {}, 'root ::= "a"'),
        ("json_schema", {}, {"enum": ["a"]}),
        ("n_probs", {}, 1),
        ("return_tokens", {}, True),
        ("timings_per_token", {"stream": True}, True),
    ]),
    "TemplateRequest": ("/apply-template", {"messages": [SEA]}, [
        ("messages", {}, [SEA, SEA]),
        ("tools", {}, TOOLS),
        ("chat_template_kwargs", {}, {"mood": "calm"}),
    ]),
    "CountTokensRequest": (f"{MESSAGES}/count_tokens", {"messages": [SEA]}, [
        ("model", {}, "another"),
        ("messages", {}, [SEA, SEA]),
        ("system", {}, "Be short."),
        ("tools", {}, [TOOL]),
        ("tool_choice", {"tools": [TOOL]}, {"type": "none"}),
        ("thinking", {}, {"type": "enabled", "budget_tokens": 1024}),
        ("output_config", {}, {"format": {"type": "yaml"}}),
        ("chat_template_kwargs", {}, {"mood": "calm"}),
    ]),
    "StreamOptions": (CHAT, {"messages": [SEA], "max_tokens": 4, "stream": True}, [
        ("include_usage", {"in": "stream_options"}, True),
        ("include_obfuscation", {"in": "stream_options"}, True),
        ("continuous_usage_stats", {"in": "stream_options", "stream_options": {"include_usage": True}}, True),
    ]),
    "EmbeddingRequest": ("/v1/embeddings", {"input": "dog"}, [
        ("model", {}, "another"),
        ("input", {}, "cat"),
        ("encoding_format", {}, "base64"),
        ("messages", {}, [SEA]),
        ("add_generation_prompt", {"input": None, "messages": [SEA]}, True),
        ("continue_final_message", {"input": None, "messages": [SEA]}, True),
        ("chat_template_kwargs", {"input": None, "messages": [SEA]}, {"mood": "calm"}),
        ("embed_dtype", {"encoding_format": "base64"}, "float16"),
        ("endianness", {"encoding_format": "base64"}, "big"),
        ("truncate_prompt_tokens", {"input": LONG}, 4),
        ("truncation_side", {"input": LONG, "truncate_prompt_tokens": 4}, "left"),
        ("dimensions", {}, 8),
        ("normalize", {}, False),
        ("padding", {}, "max_length"),
        ("use_activation", {}, False),
        ("pooling", {}, "mean"),
        ("add_special_tokens", {}, False),
    ]),
    "CohereEmbedRequest": ("/v2/embed", {"texts": ["dog"]}, [
        ("model", {}, "another"),
        ("texts", {}, ["cat"]),
        ("inputs", {"texts": None}, [{"content": [{"type": "text", "text": "cat"}]}]),
        ("input_type", {}, "none of them"),
        ("embedding_types", {}, ["base64"]),
        ("output_dimension", {}, 8),
        ("max_tokens", {"texts": [LONG]}, 4),
        ("truncate", {"texts": [LONG], "max_tokens": 4}, "START"),
    ]),
    "PoolingRequest": ("/pooling", {"input": "dog"}, [
        ("model", {}, "another"),
        ("input", {}, "cat"),
        ("task", {}, "classify"),
        ("encoding_format", {}, "base64"),
        ("dimensions", {}, 8),
        ("normalize", {}, False),
        ("add_special_tokens", {}, False),
    ]),
    "TokenizeRequest": ("/tokenize", {"prompt": "dog"}, [
        ("model", {}, "another"),
        ("prompt", {}, "cat"),
        ("messages", {"prompt": None, "messages": [SEA]}, [SEA, SEA]),
        ("tools", {"prompt": None, "messages": [SEA]}, TOOLS),
        ("add_special_tokens", {}, False),
        ("add_generation_prompt", {"prompt": None, "messages": [SEA]}, False),
        ("continue_final_message", {"prompt": None, "messages": [SEA, {"role": "assistant", "content": "The"}]}, True),
        ("reasoning_effort", {"prompt": None, "messages": [SEA]}, "low"),
        ("chat_template_kwargs", {"prompt": None, "messages": [SEA]}, {"mood": "calm"}),
        ("return_token_strs", {}, True),
    ]),
    "DetokenizeRequest": ("/detokenize", {"tokens": [300]}, [("model", {}, "another"), ("tokens", {}, [301])]),
    "PinPrefixRequest": (PREFIXES, {}, [
        ("name", {"text": "abc"}, "a name that is refused"),
        ("text", {"text": "abc"}, "a longer one"),
        ("messages", {"messages": [SEA]}, [SEA, SEA]),
        ("token_ids", {"token_ids": [300]}, [300, 301]),
    ]),
    "PromptPiece": (COMPLETIONS, {}, [
        ("text", {"lines": True, "text": "dog"}, "cats and dogs, all of them"),
        ("token_ids", {"lines": True, "token_ids": [300]}, [301]),
        ("is_final", {"lines": True, "text": "dog"}, True),
    ]),
}  # fmt: skip
# A body is counted as it will be sent: these make no difference to its tokens.
NOT_COUNTED = {
    "stream": True, "temperature": 1.0, "top_p": 0.5, "top_k": 1, "min_p": 0.5, "seed": 1, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "repetition_penalty": 1.5, "min_tokens": 1, "ignore_eos": True, "priority": 1,
    "cache_salt": "mine", "thinking_token_budget": 5,
}  # fmt: skip
RANKINGS = "interfaces/server/test_pooling_endpoints.py"
# What cannot be seen in one answer, and the test that sees it.
ELSEWHERE = {
    (
        "CompletionRequest",
        "logits_processors",
    ): "interfaces/server/test_chat.py::test_named_processors_reach_the_engine",
    ("ChatRequest", "logits_processors"): "interfaces/server/test_chat.py::test_named_processors_reach_the_engine",
    ("UpdateWeightsRequest", "path"): "interfaces/server/test_weights.py::test_the_server_answers_as_the_other_model",
    ("CompletionRequest", "priority"): "interfaces/server/test_chat.py::test_every_sampling_field_reaches_the_engine",
    ("EmbeddingRequest", "priority"): "interfaces/server/test_embeddings.py::test_what_reaches_the_engine",
    ("CohereEmbedRequest", "priority"): "interfaces/server/test_cohere.py::test_an_answer",
    ("EmbeddingRequest", "cache_salt"): "interfaces/server/test_embeddings.py::test_what_reaches_the_engine",
    **{
        ("RerankRequest", name): f"{RANKINGS}::test_documents_are_ranked_as_transformers_would"
        for name in ("query", "documents", "model", "top_n", "return_documents", "use_activation")
    },
    **{
        ("ScoreRequest", name): f"{RANKINGS}::test_documents_are_ranked_as_transformers_would"
        for name in ("text_1", "text_2", "model", "use_activation")
    },
    **{
        ("ClassifyRequest", name): f"{RANKINGS}::test_labels_and_their_probabilities"
        for name in ("input", "model", "use_activation", "add_special_tokens")
    },
    ("PoolingRequest", "use_activation"): f"{RANKINGS}::test_labels_and_their_probabilities",
    **{
        (kind, name): f"{RANKINGS}::test_what_reaches_the_engine"
        for kind in ("RerankRequest", "ScoreRequest", "ClassifyRequest", "PoolingRequest")
        for name in ("priority", "cache_salt")
    },
    ("ChatRequest", "include_reasoning"): "interfaces/server/test_chat_tools.py::test_thoughts_are_left_out",
    ("ChatRequest", "priority"): "interfaces/server/test_chat.py::test_every_sampling_field_reaches_the_engine",
    ("PinPrefixRequest", "cache_salt"): "interfaces/server/test_admin.py::test_three_forms_and_a_salt",
    ("LogLevelRequest", "level"): "interfaces/server/test_admin.py::test_other_administration",
    ("BatchRequest", "input_file_id"): "interfaces/server/test_batches.py::test_an_input_must_be_there",
    ("BatchRequest", "endpoint"): "interfaces/server/test_batches.py::test_completions_are_batched_too",
    ("BatchRequest", "completion_window"): "interfaces/server/test_batches.py::test_a_batch_ends_with_its_window",
    ("BatchRequest", "metadata"): "interfaces/server/test_batches.py::test_fields_are_checked",
    ("BatchRequest", "output_expires_after"): "interfaces/server/test_batches.py::test_fields_are_checked",
    ("SessionRequest", "cache_salt"): "conformance/test_every_field.py::test_the_salt_of_a_session",
    (
        "LoadAdapterRequest",
        "lora_name",
    ): "interfaces/server/test_adapters.py::test_an_adapter_is_loaded_listed_used_and_unloaded",
    (
        "LoadAdapterRequest",
        "lora_path",
    ): "interfaces/server/test_adapters.py::test_an_adapter_is_loaded_listed_used_and_unloaded",
    (
        "LoadAdapterRequest",
        "load_inplace",
    ): "interfaces/server/test_adapters.py::test_an_adapter_is_loaded_listed_used_and_unloaded",
    (
        "UnloadAdapterRequest",
        "lora_name",
    ): "interfaces/server/test_adapters.py::test_an_adapter_is_loaded_listed_used_and_unloaded",
    **{
        ("InfillRequest", name): "interfaces/server/test_llama_cpp.py::test_a_hole_is_filled_by_a_model_that_can"
        for name in ("input_prefix", "input_suffix", "input_extra", "prompt")
    },
    ("RewindRequest", "num_turns"): "interfaces/server/test_sessions.py::test_rewinding",
    ("RewindRequest", "num_tokens"): "interfaces/server/test_sessions.py::test_a_text_is_rewound_to_any_token",
}


def request_types() -> dict[str, type[msgspec.Struct]]:
    """Of all endpoints, and what their requests are made of."""
    types = [PromptPiece, StreamOptions]
    for route in create_app(is_local=True).routes:
        description = description_of(route) if isinstance(route, APIRoute) else None
        if description is not None and description.request is not None:
            types.append(description.request)
    return {kind.__name__: kind for kind in types}


def rows():
    for kind, (path, least, fields) in ROWS.items():
        for name, more, value in fields:
            yield pytest.param(path, {**least, **more}, name, value, id=f"{kind}.{name}")


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(EMBEDDED, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    template.write_text(
        "{%- if mood %}[{{ mood }}]{% endif -%}{%- if enable_thinking %}[thinking]{% endif -%}"
        "{%- if reasoning_effort %}[{{ reasoning_effort }}]{% endif -%}" + template.read_text()
    )
    storage = f"sqlite:///{tmp_path_factory.mktemp('storage') / 'stored.db'}"
    command = ["-m", "quire.interfaces.cli", "serve", str(folder), "--port", "0", "--storage-url", storage]
    command += ["--served-model-name", "quire"]
    with ServerProcess(command) as server, httpx.Client(base_url=server.wait_ready(300), timeout=60) as http:
        yield http


def answer_to(http, path, body) -> str:
    """What came, without what is new each time."""
    if body.pop("cached", False):
        http.post(path, json={**body, "cache_salt": None})
    if body.pop("lines", False):
        # a piece, and one more: which is a mistake if the first was the last
        last = {"text": "s"} if "text" in body else {"token_ids": [302]}
        pieces = ({"max_tokens": 8, "temperature": 0}, body, last)
        lines = "\n".join(json.dumps(piece) for piece in pieces)
        response = http.post(path, content=lines.encode(), headers={"content-type": "application/x-ndjson"})
    else:
        response = http.post(path, json=body)
    assert response.status_code < 500, response.text
    told = re.sub(rf'"({NEW_EACH_TIME})":("[^"]*"|[\d.e+-]+)', r'"\1":0', response.text)
    return f"{response.status_code} {told}"


def with_words(http, value):
    """`{300}` stands for the text of token 300, "mine" for a salt that nobody had before."""
    if value == "mine":
        return secrets.token_hex(8)
    if value == ["{300}"]:
        return [http.post("/detokenize", json={"tokens": [300]}).json()["prompt"]]
    return value


@pytest.mark.parametrize("path, body, name, value", list(rows()))
def test_a_field_changes_something(http, path, body, name, value):
    where = body.pop("in", None)
    changed = (
        {**body, where: {**body.get(where, {}), name: value}} if where else {**body, name: with_words(http, value)}
    )
    plain, other = answer_to(http, path, dict(body)), answer_to(http, path, changed)
    assert plain != other
    # and what makes the difference is no mistake in the row
    assert plain.startswith("20") or other.startswith("20"), (plain, other)


def test_every_field_of_every_request_has_a_row():
    covered = {(kind, name) for kind, (_, _, fields) in ROWS.items() for name, *_ in fields} | set(ELSEWHERE)
    covered |= {("CountTokensRequest", name) for name in NOT_COUNTED}
    # the same fields as CompletionRequest's, by the same code
    assert set(StreamedCompletionRequest.__struct_fields__) == {
        name for kind, name in covered if kind == "CompletionRequest"
    }
    # what it shares with /completion, by the same code
    covered |= {("InfillRequest", name) for name in LlamaCppFields.__struct_fields__}
    wanted = {(kind, name) for kind, request in request_types().items() for name in request.__struct_fields__}
    assert wanted - covered == set()
    assert covered - wanted == set()


def test_the_salt_of_a_session(http):
    """Only sessions without one find what others have computed."""

    def num_cached(**fields) -> int:
        session = http.post("/v1/sessions", json=fields).json()["id"]
        turn = {"messages": [SEA], "max_tokens": 1, "temperature": 0}
        usage = http.post(f"/v1/sessions/{session}/messages", json=turn).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    http.post(CHAT, json={"messages": [SEA], "max_tokens": 1})
    assert num_cached() > 0
    assert num_cached(cache_salt="of a session") == 0


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_what_is_not_counted(http, name):
    path, body, _ = ROWS["CountTokensRequest"]
    assert answer_to(http, path, dict(body)) == answer_to(http, path, {**body, name: NOT_COUNTED[name]})


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_a_test_elsewhere_is_there(test):
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_an_ignored_field_changes_nothing(http, name):
    """Else it would be no ignored one."""
    body = {"messages": [SEA], "max_tokens": 6, "temperature": 0}
    # why a prompt is not in the cache is said of the first one only
    answer_to(http, CHAT, dict(body))
    plain = re.sub(r'"cached_tokens":\d+', "", answer_to(http, CHAT, dict(body)))
    assert plain == re.sub(r'"cached_tokens":\d+', "", answer_to(http, CHAT, {**body, name: "low"}))
