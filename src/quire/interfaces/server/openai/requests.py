"""What a client may send, field by field: type and meaning are declared once, here.

`None` means that the client said nothing; then the model's generation_config.json or the default decides. Ranges are
checked by `SamplingParams`, the one table of them. Fields that are refused or ignored stand in `field_rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(msgspec.Struct, kw_only=True):
    """Fields that every endpoint that generates has, in any dialect, with the same name and the same meaning."""

    model: Annotated[str | None, Meta(description="name of the served model; may be left out")] = None
    stream: Annotated[bool | None, Meta(description="server-sent events")] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy")] = None
    top_p: Annotated[float | None, Meta(description="nucleus sampling")] = None
    top_k: Annotated[int | None, Meta(description="vLLM's and Anthropic's: 0 or -1 means all tokens")] = None
    min_p: Annotated[float | None, Meta(description="vLLM's: least share of the best token's probability")] = None
    seed: Annotated[int | None, Meta(description="same seed and parameters, same text")] = None
    presence_penalty: Annotated[
        float | None, Meta(description="OpenAI's: discourages tokens that the answer has already")
    ] = None
    frequency_penalty: Annotated[float | None, Meta(description="OpenAI's: the same, each time they occur")] = None
    repetition_penalty: Annotated[float | None, Meta(description="vLLM's: above 1 discourages repetition")] = None
    min_tokens: Annotated[int | None, Meta(description="vLLM's: no end before so many tokens")] = None
    thinking_token_budget: Annotated[
        int | None, Meta(description="vLLM's: after so many tokens of thoughts the model is made to end them")
    ] = None
    ignore_eos: Annotated[bool | None, Meta(description="vLLM's: do not end at the end-of-text token")] = None
    priority: Annotated[
        int | None, Meta(description="vLLM's: the greatest number is preempted first; a policy may order by it")
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="vLLM's: shares the prefix cache only with requests of the same salt")
    ] = None


class GenerationFields(SharedFields, kw_only=True):
    """Fields that /v1/completions and /v1/chat/completions share."""

    n: Annotated[int | None, Meta(description="answers per prompt")] = None
    stop: Annotated[
        str | list[str] | None, Meta(description="up to 16 strings of up to 1,024 characters that end the text")
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None, Meta(description="token id: -100 to 100, for up to 1,024 tokens")
    ] = None
    stream_options: Annotated[
        StreamOptions | None,
        Meta(
            description="include_usage; with it continuous_usage_stats: in every event; include_obfuscation: hide the "
            "lengths of tokens"
        ),
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="vLLM's: tokens that end the text")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="vLLM's: leave special tokens out of the text")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="vLLM's: keep the stop string")] = None
    bad_words: Annotated[list[str] | None, Meta(description="vLLM's: up to 128 words that are never generated")] = None
    allowed_token_ids: Annotated[list[int] | None, Meta(description="vLLM's: nothing but these tokens")] = None
    logits_processors: Annotated[
        list[str | dict[str, Any]] | None,
        Meta(description="vLLM's: processors that are installed here, by name, or as objects of name and args"),
    ] = None
    watermarking: Annotated[
        bool | None,
        Meta(description="vLLM's: whether the text has the engine's watermark; else where it is drawn"),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        Meta(description="type text, json_object or json_schema: the answer is any text, a JSON object, or follows it"),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Meta(description="vLLM's: one of json, json_object, regex, choice, grammar, structural_tag; and how"),
    ] = None
    guided_json: Annotated[
        str | dict[str, Any] | bool | None, Meta(description="vLLM's: structured_outputs.json by its older name")
    ] = None
    guided_regex: Annotated[str | None, Meta(description="the same of regex")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="the same of choice")] = None
    guided_grammar: Annotated[str | None, Meta(description="the same of grammar")] = None
    prompt_logprobs: Annotated[
        int | bool | None,
        Meta(description="vLLM's: log-probabilities of the prompt's tokens, true is 1; not with stream"),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        Meta(description="vLLM's: log-probabilities of these tokens, at most 128, in place of the best ones"),
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="vLLM's: whether the tokenizer adds its special tokens to the prompt")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Meta(description="vLLM's: no more than so many tokens of the prompt count; -1: as many as the model takes"),
    ] = None
    truncation_side: Annotated[
        str | None, Meta(description="vLLM's: left (default) or right: where a prompt that is too long is cut")
    ] = None
    return_token_ids: Annotated[
        bool | None, Meta(description="vLLM's: the tokens of the prompt and of the answer as numbers, too")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="vLLM's: tokens of log-probabilities are called token_id:N")
    ] = None
    use_beam_search: Annotated[
        bool | None, Meta(description="vLLM's: follow n beams and return all of them, best first")
    ] = None
    length_penalty: Annotated[
        float | None, Meta(description="vLLM's: beams are ordered by their sum of log-probabilities / length ** this")
    ] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        Meta(description="vLLM's: which half of the request this server has (docs/disaggregation.md)"),
    ] = None
    early_stopping: Annotated[
        bool | str | None, Meta(description='when a search for beams ends: true, false or "never", as in Transformers')
    ] = None
    do_sample: Annotated[
        bool | None, Meta(description="continuations of beams are drawn, by seed and temperature, as in Transformers")
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.prompt_logprobs, bool):
            # as vLLM reads it, and no asks for nothing
            self.prompt_logprobs = 1 if self.prompt_logprobs else None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[Any] | None,
        Meta(description="text, list of texts, list of token ids, or list of such lists; at most 256"),
    ] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        Meta(description="vLLM's: prompts that are vectors, each base64 of torch.save(tensor); before those of prompt"),
    ] = None
    max_tokens: Annotated[int | None, Meta(description="default 16; 0 with echo returns the prompt alone")] = None
    echo: Annotated[bool | None, Meta(description="return the prompt before its continuation")] = None
    logprobs: Annotated[int | None, Meta(description="log-probabilities of so many best tokens")] = None
    suffix: Annotated[
        str | None, Meta(description="what follows the answer, for models that were trained to fill in the middle")
    ] = None


class StreamedCompletionRequest(CompletionRequest, kw_only=True):
    """A completion whose prompt follows in pieces; `prompt` may be the first one."""


class PromptPiece(msgspec.Struct, kw_only=True):
    """A part of a prompt: `text` or `token_ids`."""

    text: Annotated[str | None, Meta(description="the next part of the text, of whole characters; may be empty")] = None
    token_ids: Annotated[list[int] | None, Meta(description="the next tokens; one prompt is of one kind")] = None
    is_final: Annotated[bool, Meta(description="the prompt ends here; the answer follows")] = False


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[dict[str, Any]], Meta(description="roles system, developer, user, assistant, tool; text parts are joined")
    ]
    max_completion_tokens: Annotated[int | None, Meta(description="default: up to the model's length")] = None
    max_tokens: Annotated[int | None, Meta(description="older name of max_completion_tokens")] = None
    logprobs: Annotated[bool | None, Meta(description="return log-probabilities of the answer's tokens")] = None
    top_logprobs: Annotated[int | None, Meta(description="and those of so many best ones; -1: of all tokens")] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="functions that the model may call, at most 128; given to the chat template"),
    ] = None
    tool_choice: Annotated[Any, Meta(description="none, auto, required or a function: whether a tool is called")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: calls after the first are dropped")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="vLLM's: end with the assistant's opening")] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="vLLM's: the answer goes on where the last message, the assistant's, ends")
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(description="vLLM's: a Jinja template in place of the model's, where the server runs with "
             "trust_request_chat_template"),
    ] = None  # fmt: skip
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="vLLM's: values that the chat template can see")
    ] = None
    reasoning_effort: Annotated[
        str | None,
        Meta(description="none, minimal, low, medium, high, xhigh or max: a value that the chat template can see; none "
             "also turns thinking off, the others on, where the template has a switch. A model whose template reads "
             "neither answers as without it"),
    ] = None  # fmt: skip
    echo: Annotated[bool | None, Meta(description="vLLM's: the text of the last message stands before the answer")] = (
        None
    )
    include_reasoning: Annotated[
        bool | None, Meta(description="vLLM's and OpenRouter's: false leaves thoughts out of the answer")
    ] = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DialectFields(SharedFields, kw_only=True):
    """Fields that the other dialects of a chat have (OpenAI's Responses, Anthropic's Messages), all of them with the
    name and the meaning that they have in a chat."""

    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="vLLM's: values that the chat template can see")
    ] = None

    def as_in_a_chat(self) -> dict[str, Any]:
        """By the names that ChatRequest has for them, which are the same."""
        return {name: getattr(self, name) for name in DialectFields.__struct_fields__ if name != "stream"}
