"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.datastructures import State

from quire.beam_search_params import GenerationParams
from quire.errors import ContextLengthError, RequestError
from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.chat_answer import ChatAnswer
from quire.interfaces.server.openai.chat_tools import NO_TOOLS, ToolChoice, tool_choice_of, with_call_enforced
from quire.interfaces.server.openai.chunks import ChatChunk
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.kv_transfer import forwarded_prompt
from quire.interfaces.server.openai.rendering import (
    NO_EFFORT,
    Cut,
    opens_answer,
    render,
    template_kwargs_of,
    text_of,
)
from quire.interfaces.server.openai.requests import ChatRequest
from quire.interfaces.server.openai.responses import ChatCompletion
from quire.interfaces.server.openai.sampling import check_length, check_stream_options, count_always, generation_params
from quire.interfaces.server.openai.work import Work, num_sequences
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import invalid, renamed
from quire.interfaces.server.wire.field_rules import REFUSED_BY_BOTH, REFUSED_BY_CHAT
from quire.renderer import RenderedPrompt, Renderer
from quire.renderer.output_formats import AnswerFormats, OutputFormats
from quire.sampling_params import SamplingParams

router = APIRouter()
RULES = rules_for(ChatRequest, REFUSED_BY_BOTH, REFUSED_BY_CHAT)


@router.post(
    "/v1/chat/completions",
    openapi_extra=described(request=ChatRequest, answer=ChatCompletion, event=ChatChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answers a chat."""
    return await ENDPOINT.respond(request)


async def _answer(body: ChatRequest, state: State) -> ChatAnswer:
    if state.force_include_usage:
        count_always(body)
    if body.chat_template is not None:
        _check_template(body.chat_template, is_trusted=state.trusts_templates)
    if state.names_tokens_by_id and body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = True
    work = await prepare_chat(body, await state.models.named(body.model))
    work.shows_times = state.shows_times
    return ChatAnswer(body, work)


ENDPOINT = Endpoint(ChatRequest, RULES, _answer)


# as long as those of models; what becomes of it has a bound, too (chat_template.py)
_MOST_TEMPLATE_CHARACTERS = 32_768


def _check_template(template: str, *, is_trusted: bool) -> None:
    if not is_trusted:
        text = "templates of requests are not taken; start with chat_template, or trust_request_chat_template"
        raise invalid(f"chat_template: not supported: {text}.", "chat_template")
    if "{{" not in template and "{%" not in template:
        raise invalid("chat_template: must be a Jinja template itself; files are not read.", "chat_template")
    if len(template) > _MOST_TEMPLATE_CHARACTERS:
        text = f"{len(template):,} characters, at most {_MOST_TEMPLATE_CHARACTERS:,} are taken from a request"
        raise invalid(f"chat_template: {text}. Start with it as the option chat_template.", "chat_template")


async def prepare_chat(body: ChatRequest, model: ServedModel, *, conversation: str = "messages") -> Work:
    """A chat, checked and not started. Other dialects come this way, too, which may call its messages something
    else."""
    check_stream_options(body)
    params = _params(body, model)
    caller = current_caller()
    caller.admission.check(caller.tenant, num_sequences(params))
    says_tools = body.tools or body.tool_choice is not None
    choice = tool_choice_of(body.tools, body.tool_choice) if says_tools else NO_TOOLS
    if choice.must_call:
        forms = model.renderer.output_formats
        params = with_call_enforced(params, choice, forms, parallel_calls=body.parallel_tool_calls is not False)
    limit = model.max_model_len
    cut = Cut.asked(body.truncate_prompt_tokens, body.truncation_side, limit, limit - (_max_tokens(body) or 1))
    prompt = await _prompt_of(body, model, choice, cut)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_length(len(prompt.token_ids), name, _max_tokens(body), model.max_model_len, what=conversation)
    formats = _answer_formats(body, prompt.text or "", choice, params, model.renderer)
    if formats is not None and formats.needs_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    work = await Work.prepare(
        model,
        [prompt],
        params,
        body,
        names={"prompt": conversation, **({"structured_outputs": "tools"} if choice.must_call else {})},
    )
    work.formats = formats
    work.echo = _text_of(body.messages[-1]) if body.echo else ""
    return work


async def _prompt_of(body: ChatRequest, model: ServedModel, choice: ToolChoice, cut: Cut) -> RenderedPrompt:
    """Of its messages, or the tokens that another server has made of them."""
    if (forwarded := forwarded_prompt(body, model)) is not None:
        if model.renderer.media_sources(body.messages) or model.renderer.has_vectors(body.messages):
            text = "not with images, videos and prompt_embeds, which they do not hold"
            raise invalid(f"kv_transfer_params.prompt_token_ids: {text}.", "messages")
        return RenderedPrompt(cut.of(forwarded), text=await text_of(model, forwarded, skip_special_tokens=False))
    return await render(
        model,
        body.messages,
        cut=cut,
        tools=choice.tools,
        add_generation_prompt=opens_answer(body),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=body.add_special_tokens,
        chat_template=body.chat_template,
        template_kwargs=template_kwargs_of(body.reasoning_effort, body.chat_template_kwargs),
    )


async def prepare_chat_that_fits(body: ChatRequest, model: ServedModel, *, conversation: str = "messages") -> Work:
    """Clients of some dialects ask for as many tokens as a large model writes; a smaller one writes what it can."""
    try:
        return await prepare_chat(body, model, conversation=conversation)
    except ContextLengthError as error:
        if error.param != "max_completion_tokens":
            raise
    unbounded = msgspec.structs.replace(body, max_completion_tokens=None)
    return await prepare_chat(unbounded, model, conversation=conversation)


def _answer_formats(
    body: ChatRequest, prompt: str, choice: ToolChoice, params: GenerationParams, renderer: Renderer
) -> AnswerFormats | None:
    """How to read the answers; None: as they are."""
    formats = renderer.output_formats
    if formats.reasoning is None and not choice.tools:
        return None
    if params.structured_outputs is not None:
        # a form leaves no room for thoughts, nor for calls unless it is made of them
        formats = OutputFormats(tool=formats.tool if choice.must_call else None)
    return formats.answers(
        prompt,
        tools=choice.tools or (),
        continued=_text_of(body.messages[-1]) if body.continue_final_message else None,
        special_tokens=renderer.special_tokens if params.skip_special_tokens else frozenset(),
        parallel_calls=body.parallel_tool_calls is not False,
        shows_reasoning=body.include_reasoning is not False,
    )


def _text_of(message: dict[str, Any]) -> str:
    """Of a message that was rendered, so its parts are texts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)


def _max_tokens(body: ChatRequest) -> int | None:
    newer = body.max_completion_tokens
    older = body.max_tokens
    if newer is not None and older is not None and newer != older:
        text = f"max_tokens={older} and max_completion_tokens={newer}: they mean the same. Give one of them."
        raise invalid(text, "max_tokens")
    return older if newer is None else newer


def _params(body: ChatRequest, model: ServedModel) -> GenerationParams:
    decided: dict[str, int | None] = {"max_tokens": None}
    asked = _max_tokens(body)
    if asked is not None:
        decided["max_tokens"] = asked
    elif "max_tokens" in model.defaults:
        del decided["max_tokens"]
    if body.logprob_token_ids is not None and not body.logprobs and not body.use_beam_search:
        raise invalid("logprob_token_ids: needs logprobs=true.", "logprob_token_ids")
    if body.logprobs:
        limit = model.engine.config.max_logprobs
        asked_top = model.engine.config.facts.vocab_size if body.top_logprobs == -1 else body.top_logprobs or 0
        if asked_top > limit >= 0:
            raise invalid(f"top_logprobs={body.top_logprobs}: at most {limit} are allowed.", "top_logprobs")
        decided["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs: needs logprobs=true.", "top_logprobs")
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        params = generation_params(body, model.defaults, **decided)
    except RequestError as error:
        raise renamed(error, names) from None
    if body.reasoning_effort == NO_EFFORT and isinstance(params, SamplingParams):
        return _without_thoughts(params, model.renderer)
    return params


def _without_thoughts(params: SamplingParams, renderer: Renderer) -> SamplingParams:
    """Also of a model that thinks whatever its template was told, if its thoughts can be counted."""
    if params.thinking_token_budget is not None or not renderer.can_count_thoughts:
        return params
    return msgspec.structs.replace(params, thinking_token_budget=0)
