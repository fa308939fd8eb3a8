"""Every name that clients of servers like this one send, and what becomes of it at each endpoint.

A field is of an endpoint (its struct), refused in the endpoint's own words, refused as below, or ignored with a reason
(`IGNORED`). So what would change an answer elsewhere never passes here as if it had. Called once an endpoint, when its
module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quire.interfaces.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quire.interfaces.server.wire.field_rules import (
    IGNORED,
    REFUSED_BY_BOTH,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    FieldRules,
    Refused,
)

_NOTHING: tuple[Any, ...] = ([], {}, "")
_NO_FIELDS: Mapping[str, str] = MappingProxyType({})
_NOTHING_INSIDE: Mapping[str, FieldRules] = MappingProxyType({})


def _no_sampler(*neutral: Any) -> Refused:
    return Refused("there is no such sampler here; use temperature, top_k, top_p and min_p", neutral)


def _use(name: str, *neutral: Any) -> Refused:
    return Refused(f"use {name}", neutral)


def _of(path: str) -> Refused:
    return Refused(f"it belongs to {path}")


_ADAPTER = Refused("an adapter (LoRA) is chosen by its name as the model", _NOTHING)
_LENGTH = "max_tokens"
_FORM = "response_format or structured_outputs"
_ORDER = Refused("the order of the samplers is fixed: penalties, temperature, min_p, top_k, top_p", ([],))
_WINDOW = Refused("penalties count the whole answer, and repetition_penalty the prompt as well", (-1,))
_DISAGGREGATED = Refused("over HTTP the KV cache is not moved between engines")
_EXPERTS = Refused("what happens inside the model is not returned", (False, 0))
_BUDGET = "thinking_token_budget"
_CONTROL = "reasoning_effort, thinking_token_budget, include_reasoning or chat_template_kwargs"

# By the way in which they would change an answer. Where other servers share a name, it stands once.
REFUSED_BY_ALL: dict[str, Refused] = {
    # how tokens are drawn
    "typical_p": _no_sampler(1, 0),
    "typical": _no_sampler(1, 0),
    "tfs_z": _no_sampler(1),
    "tfs": _no_sampler(1),
    "top_a": _no_sampler(0),
    "top_n_sigma": _no_sampler(0, -1),
    "nsigma": _no_sampler(0),
    "epsilon_cutoff": _no_sampler(0),
    "eta_cutoff": _no_sampler(0),
    "skew": _no_sampler(0),
    "smoothing_factor": _no_sampler(0),
    "mirostat": _no_sampler(0),
    "mirostat_mode": _no_sampler(0),
    "dry_multiplier": _no_sampler(0),
    "xtc_probability": _no_sampler(0),
    "adaptive_target": _no_sampler(-1),
    "dynatemp_range": _no_sampler(0),
    "dynatemp_low": _no_sampler(1),
    "dynatemp_high": _no_sampler(1),
    "dynamic_temperature": _no_sampler(False),
    "min_temp": _no_sampler(1),
    "max_temp": _no_sampler(1),
    "temp_exponent": _no_sampler(1),
    "min_keep": Refused("each sampler keeps at least one token, and no more than it has to", (0, 1)),
    "temperature_last": Refused(_ORDER.reason, (False,)),
    "samplers": _ORDER,
    "sampler_seq": _ORDER,
    "sampler_order": _ORDER,
    "sampler_priority": _ORDER,
    "backend_sampling": Refused("tokens are drawn in one place", (False,)),
    "do_sample": _use("temperature; 0 is greedy", True),
    "negative_prompt": Refused("nothing is guided by a second prompt", ("",)),
    "cfg_scale": Refused("nothing is guided by a second prompt", (1,)),
    "guidance_scale": Refused("nothing is guided by a second prompt", (1,)),
    "watermark": _use("watermarking", False),
    "watermarking": Refused("completions and chats have it", (False,)),
    # penalties and forbidden tokens
    "repeat_penalty": _use("repetition_penalty", 1),
    "rep_pen": _use("repetition_penalty", 1),
    "repeat_last_n": _WINDOW,
    "penalty_range": _WINDOW,
    "repetition_range": _WINDOW,
    "repetition_penalty_range": _WINDOW,
    "rep_pen_range": _WINDOW,
    "repetition_decay": Refused("penalties do not fade", (0,)),
    "no_repeat_ngram_size": Refused("no word is forbidden because it was said; use repetition_penalty", (0,)),
    "penalize_nl": Refused("a line break is penalised as any token", (True,)),
    "banned_strings": _use("bad_words", *_NOTHING),
    "banned_tokens": _use("logit_bias", *_NOTHING),
    "custom_token_bans": _use("logit_bias", *_NOTHING),
    "allowed_tokens": _use("allowed_token_ids", *_NOTHING),
    "ban_eos_token": _use("ignore_eos", False),
    "custom_logit_processor": Refused("code and processors are not taken from requests", ("",)),
    "custom_params": Refused("code and processors are not taken from requests", ({},)),
    # where an answer ends
    "n_predict": _use(_LENGTH),
    "num_predict": _use(_LENGTH),
    "max_new_tokens": _use(_LENGTH),
    "max_length": _use(_LENGTH),
    "max_tokens_to_sample": _use(_LENGTH),
    "max_output_tokens": _use(f"{_LENGTH}; this name belongs to /v1/responses"),
    "min_new_tokens": _use("min_tokens", 0),
    "min_length": _use("min_tokens", 0),
    "n_indent": Refused("lines are not looked at; use stop", (0,)),
    "t_max_predict_ms": Refused("answers are bounded by tokens; use max_tokens", (0,)),
    "stop_sequence": _use("stop", *_NOTHING),
    "stop_sequences": _use("stop; this name belongs to /v1/messages", *_NOTHING),
    "stop_strings": _use("stop", *_NOTHING),
    "stopping_strings": _use("stop", *_NOTHING),
    "stop_regex": Refused("a stop is a text, no expression; use stop", _NOTHING),
    "no_stop_trim": _use("include_stop_str_in_output", False),
    "repetition_detection": Refused("repetitions do not end an answer"),
    "generate_window": _use("truncate_prompt_tokens"),
    # the form of an answer
    "grammar": _use("structured_outputs.grammar, in Lark's notation", ""),
    "grammar_string": _use("structured_outputs.grammar", ""),
    "ebnf": _use("structured_outputs.grammar, in Lark's notation", ""),
    "json_schema": _use(_FORM, *_NOTHING),
    "format": _use(_FORM, ""),
    "regex": _use("structured_outputs.regex", ""),
    "regex_pattern": _use("structured_outputs.regex", ""),
    "structural_tag": _use("structured_outputs.structural_tag", *_NOTHING),
    "parse_tool_calls": Refused("calls are always read; leave tools out to see the text", (True,)),
    # prompts and templates
    "inputs": _use("prompt", ""),
    "parameters": Refused("fields stand beside each other, not inside of one", ({},)),
    "options": Refused("fields stand beside each other, not inside of one", ({},)),
    "system": _use("a message of the role system; this name belongs to /v1/messages", ""),
    "raw": _use("/v1/completions", False),
    "template": Refused("templates are not taken from requests", ("",)),
    "context": Refused("it belongs to another server; use sessions", ([],)),
    "num_ctx": Refused("the model's length is an option of the server, max_model_len"),
    "truncate": _use("truncate_prompt_tokens", False),
    "truncation": _use("truncate_prompt_tokens", "disabled", False),
    "transforms": _use("truncate_prompt_tokens", []),
    "tool_prompt": Refused("how tools are shown is the template's", ("",)),
    "guideline": Refused("how messages are shown is the template's", ("",)),
    "add_bos_token": _use("add_special_tokens"),
    "token_healing": Refused("a prompt is taken as it is", (False,)),
    "input_prefix": _use("suffix; this name belongs to /infill", ""),
    "input_suffix": _use("suffix; this name belongs to /infill", ""),
    "input_extra": Refused("it belongs to /infill", ([],)),
    "image_data": Refused("images and videos are parts of messages here, and other media are not taken", ([], {})),
    "audio_data": Refused("images and videos are parts of messages here, and other media are not taken", ([], {})),
    "input_embeds": Refused("prompts are text or token ids"),
    "input_ids": _use("prompt, which may be token ids"),
    "extra_key": _use("cache_salt", ""),
    "session_params": _use("/v1/sessions", {}),
    # thoughts
    "reasoning": Refused(f"it belongs to /v1/responses; use {_CONTROL}", ({},)),
    "thinking": Refused(f"it belongs to /v1/messages; use {_CONTROL}", ({},)),
    "think": Refused(f"use {_CONTROL}"),
    "enable_thinking": Refused("it is a value of chat templates; give it in chat_template_kwargs, or reasoning_effort"),
    "thinking_budget": _use(_BUDGET),
    "reasoning_budget": _use(_BUDGET, -1),
    "reasoning_budget_tokens": _use(_BUDGET, -1),
    "thinking_budget_tokens": _use(_BUDGET, -1),
    "separate_reasoning": Refused(
        "thoughts are kept apart from the answer; include_reasoning leaves them out", (True,)
    ),
    "stream_reasoning": Refused("thoughts are streamed as they come; include_reasoning leaves them out", (True,)),
    "reasoning_format": Refused(
        "thoughts are kept apart from the answer; include_reasoning leaves them out", ("auto", "parsed", "deepseek")
    ),
    "reasoning_in_content": Refused("thoughts are kept apart from the answer", (False,)),
    "thinking_forced_open": Refused("whether the model begins with a thought is the template's", (False,)),
    # which model answers, and how
    "lora": _ADAPTER,
    "lora_request": _ADAPTER,
    "lora_name": _ADAPTER,
    "lora_path": _ADAPTER,
    "lora_id": _ADAPTER,
    "lora_adapter": _ADAPTER,
    "adapter": _ADAPTER,
    "adapter_id": _ADAPTER,
    "adapter_source": _ADAPTER,
    "models": Refused("one model is served; use model", ([],)),
    "plugins": Refused("the server fetches nothing", ([],)),
    "speculative_config": Refused("speculation is chosen when the server starts (speculative_config)", ({},)),
    "bootstrap_host": _DISAGGREGATED,
    "bootstrap_port": _DISAGGREGATED,
    "bootstrap_room": _DISAGGREGATED,
    "ec_transfer_params": _DISAGGREGATED,
    # what else is returned
    "n_probs": _use("logprobs", 0),
    "top_n_tokens": _use("logprobs", 0),
    "post_sampling_probs": Refused("log-probabilities are of the raw logits", (False,)),
    "decoder_input_details": _use("prompt_logprobs", False),
    "return_logprob": _use("logprobs", False),
    "logprob_start_len": _use("prompt_logprobs", -1),
    "top_logprobs_num": _use("logprobs", 0),
    "token_ids_logprob": _use("logprob_token_ids", []),
    "return_full_text": _use("echo", False),
    "return_text_in_logprobs": Refused("log-probabilities always have the text", (True,)),
    "return_tokens": _use("/tokenize for the ids of a prompt", False),
    "return_prompt_text": Refused("the prompt is not returned; use echo, or /tokenize and /detokenize", (False,)),
    "return_token_offsets": Refused("offsets are in the log-probabilities of completions", (False,)),
    "return_progress": Refused("progress is in /metrics and on the page", (False,)),
    "timings_per_token": Refused("times are in /metrics and in traces", (False,)),
    "response_fields": Refused("an answer has all its fields", ([],)),
    "details": Refused("use logprobs and usage", (False,)),
    "usage": _use("stream_options.include_usage", {}, {"include": False}),
    "return_hidden_states": _EXPERTS,
    "return_routed_experts": _EXPERTS,
    "routed_experts_start_len": _EXPERTS,
    "routed_experts_prompt_start": _EXPERTS,
    "return_cached_tokens_details": Refused("usage says how many tokens were cached", (False,)),
    # of this server's other endpoints
    "input": _of("/v1/responses and /v1/embeddings"),
    "task": _of("/pooling"),
    "query": _of("/v1/rerank"),
    "top_n": _of("/v1/rerank"),
    "return_documents": _of("/v1/rerank"),
    "text_1": _of("/v1/score"),
    "text_2": _of("/v1/score"),
    "encoding_format": _of("/v1/embeddings"),
    "dimensions": _of("/v1/embeddings"),
    "normalize": _of("/v1/embeddings"),
    "use_activation": _of("/v1/embeddings"),
    "pooling": _of("/v1/embeddings"),
    "embed_dtype": _of("/v1/embeddings"),
    "endianness": _of("/v1/embeddings"),
    "instructions": _of("/v1/responses"),
    "previous_response_id": _of("/v1/responses"),
    "conversation": _of("/v1/responses"),
    "background": Refused("it belongs to /v1/responses", (False,)),
    "include": Refused("it belongs to /v1/responses", ([],)),
    "output_config": Refused("it belongs to /v1/messages", ({},)),
    "context_management": Refused("nothing is compacted or cleared", _NOTHING),
}

_PATHS: dict[type[msgspec.Struct], str] = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}
# Fields of these endpoints whose `false` asks for nothing.
_SWITCHES = frozenset({
    "stream", "echo", "logprobs", "ignore_eos", "use_beam_search", "continue_final_message", "return_token_strs",
    "include_stop_str_in_output",
})  # fmt: skip


def _of_other_endpoints() -> dict[str, Refused]:
    """By the path that has the field; more than one if several have it."""
    paths: dict[str, list[str]] = {}
    for request_type, path in _PATHS.items():
        for name in request_type.__struct_fields__:
            paths.setdefault(name, []).append(path)
    return {
        name: Refused(f"it belongs to {' and '.join(owners)}", ([], {}, *([False] if name in _SWITCHES else [])))
        for name, owners in paths.items()
    }


def rules_for(
    request_type: type[msgspec.Struct],
    *tables: Mapping[str, Refused],
    ignored: Mapping[str, str] = _NO_FIELDS,
    inner: Mapping[str, FieldRules] = _NOTHING_INSIDE,
) -> FieldRules:
    """`tables` and `ignored` hold the endpoint's own words; the first table that has a name decides over it."""
    own_words = {name for table in tables for name in table}
    ignored_here = {
        name: reason
        for name, reason in {**IGNORED, **ignored}.items()
        if name not in request_type.__struct_fields__ and name not in own_words
    }
    everywhere = (REFUSED_BY_BOTH, REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS, REFUSED_BY_ALL, _of_other_endpoints())
    known = {*request_type.__struct_fields__, *ignored_here}
    refused = {name: rule for table in reversed(everywhere) for name, rule in table.items() if name not in known}
    for table in reversed(tables):
        # a struct may be another endpoint's, less some of its fields
        refused |= table
    return FieldRules(request_type, refused, ignored_here, foreign=refused.keys() - own_words, inner=inner)
