"""Why a test of vLLM's does not pass: the first pattern that a test's name holds.

A reason begins with its kind. What needs a real model, or looks into vLLM, says nothing about a server.
"""

from __future__ import annotations

REAL_MODEL = "needs a real model"
INSIDE = "inside of vLLM"
DECISION = "ours by decision"
NOT_BUILT = "not built"
KINDS = (REAL_MODEL, INSIDE, DECISION, NOT_BUILT)

_THINKS = f"{REAL_MODEL}: one that thinks"
_QUALITY = f"{REAL_MODEL}: what a larger one writes"
_VOCABULARY = f"{REAL_MODEL}: tokens of its vocabulary are counted or named"
_LAST = f"{DECISION}: the last event has no text, as with OpenAI: programs may stop at its reason"
_MOCKS = f"{INSIDE}: puts parts of it into the place of others"

REASONS: dict[str, str] = {
    "test_include_reasoning": _THINKS,
    "test_thinking_token_budget": _THINKS,
    "test_reasoning_item": _THINKS,
    "reasoning_tokens": _THINKS,
    "test_function_tool_use": _QUALITY,
    "test_named_tool_use": _QUALITY,
    "test_chat_completion_with_tool_use": _QUALITY,
    "test_chat_completion_with_emoji": _QUALITY,
    "test_comparison_with_prompt_logprobs": _QUALITY,
    "test_complex_message_content": _QUALITY,
    "test_response_format_json": _QUALITY,
    "test_structured_outputs_json_chat": _QUALITY,
    "test_more_than_one_prompt_logprobs_chat": _QUALITY,
    "test_chat_completion_n_parameter": _QUALITY,
    "test_no_bad_words": _QUALITY,
    "with_long_prompts": _QUALITY,
    "same_name_replaces_inplace": _QUALITY,
    "test_structured_output": _QUALITY,
    "test_max_tokens[": _QUALITY,
    "test_anthropic_tool_call": _QUALITY,
    "test_single_chat_session": _VOCABULARY,
    "test_single_completion": _VOCABULARY,
    "test_anthropic_streaming_cache_usage": _VOCABULARY,
    "test_online::test_basic": _VOCABULARY,
    "test_online::test_completion_request": _VOCABULARY,
    "test_online::test_truncate": _VOCABULARY,
    "test_online::test_chat_request": _VOCABULARY,
    "test_online::test_pooling_embed": _VOCABULARY,
    "embed.test_offline": _VOCABULARY,
    "test_load_prompt_embeds": _MOCKS,
    "test_beam_search_abort": _MOCKS,
    "test_online::test_base64_embedding": _VOCABULARY,
    "test_beam_search_online": _MOCKS,
    "test_batched_chat_completions": _MOCKS,
    "test_require_mm_embeds": f"{NOT_BUILT}: images are pixels, not vectors",
    "test_chat_streaming": _LAST,
    "test_completions_with_prompt_embeds": _LAST,
    "test_pooling_not_supported[token_embed": f"{NOT_BUILT}: numbers of each token",
    "test_dynamic_lora_badrequests": f"{DECISION}: an adapter that cannot be used is 400, which no client sends again",
}


def reason_of(test: str) -> str:
    """Empty if none is known."""
    return next((reason for pattern, reason in REASONS.items() if pattern in test), "")


def kind_of(reason: str) -> str:
    """Empty if there is no reason."""
    return next((kind for kind in KINDS if reason.startswith(kind)), "")
