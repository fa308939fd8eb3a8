"""POST /v1/completions. A prompt that arrives in pieces has a file of its own: streamed_completion.py."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.datastructures import State

from quire.beam_search_params import GenerationParams
from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.chunks import CompletionChunk
from quire.interfaces.server.openai.continuations import Continuations
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.rendering import (
    WHOLE,
    Cut,
    around_a_hole,
    check_repeated,
    render,
    render_vectors,
    text_of,
)
from quire.interfaces.server.openai.requests import CompletionRequest
from quire.interfaces.server.openai.responses import Completion
from quire.interfaces.server.openai.sampling import (
    check_length,
    check_stream_options,
    completion_params,
    count_always,
)
from quire.interfaces.server.openai.streamed_completion import answer_to_lines, is_in_lines
from quire.interfaces.server.openai.work import Work, num_sequences
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.interfaces.server.wire.field_rules import REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS
from quire.interfaces.server.wire.prompt_forms import check_token_ids, names_of, split_prompts
from quire.renderer import RenderedPrompt

router = APIRouter()
RULES = rules_for(CompletionRequest, REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS)
MAX_PROMPTS = 256


_LINES = 'the prompt in pieces: a first line with the fields, then lines that are each a piece ({"text": ...})'


@router.post(
    "/v1/completions",
    openapi_extra=described(
        request=CompletionRequest,
        other_bodies={"application/x-ndjson": _LINES},
        answer=Completion,
        event=CompletionChunk,
        errors=(408,),
    ),
)
async def create_completion(request: Request) -> Response:
    """Continues prompts."""
    if is_in_lines(request):
        return await answer_to_lines(request)
    return await ENDPOINT.respond(request)


async def _answer(body: CompletionRequest, state: State) -> Continuations:
    model: ServedModel = await state.models.named(body.model)
    if state.force_include_usage:
        count_always(body)
    if state.names_tokens_by_id and body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = True
    check_stream_options(body)
    if body.kv_transfer_params and body.kv_transfer_params.get("prompt_token_ids"):
        raise invalid("kv_transfer_params.prompt_token_ids: of chats only. Give them as prompt.", "kv_transfer_params")
    params = completion_params(body, model.defaults)
    vectors = _vectors_of(body)
    if vectors and body.prompt in ("", []):
        # clients that must give a prompt, as the official one, say so that there is no other
        body.prompt = None
    asked = [] if body.prompt is None else split_prompts(body.prompt, "prompt", MAX_PROMPTS - len(vectors))
    num_tokens = sum(len(prompt) for prompt in asked if isinstance(prompt, list))
    caller = current_caller()
    num_prompts = len(vectors) + len(asked)
    caller.admission.check(caller.tenant, num_prompts * num_sequences(params), num_tokens, num_prompts=num_prompts)
    names = [] if body.prompt is None else names_of(body.prompt, asked, "prompt")
    cut = _cut_of(body, params, model)
    if body.suffix:
        check_repeated(body.suffix, len(asked), "suffix", "prompts")
    prompts: list[RenderedPrompt] = []
    texts = [""] * len(vectors)
    for given, name in vectors:
        rendered = await render_vectors(model, given, name)
        check_length(len(rendered.token_ids), "max_tokens", body.max_tokens, model.max_model_len, what=name)
        prompts.append(rendered)
    for prompt, name in zip(asked, names, strict=True):
        token_ids, text = await _tokens_and_text(model, prompt, name, body, cut)
        check_length(len(token_ids), "max_tokens", body.max_tokens, model.max_model_len, what=name)
        prompts.append(RenderedPrompt(token_ids))
        texts.append(text)
        if len(asked) > 1:
            # between many short texts others have their turn
            await asyncio.sleep(0)
    names = [name for _, name in vectors] + names
    work = await Work.prepare(model, prompts, params, body, prompt_names=names)
    work.shows_times = state.shows_times
    return Continuations(body, work, texts)


def _vectors_of(body: CompletionRequest) -> list[tuple[str, str]]:
    """Prompts that are vectors, each with its name for messages; they come before the others."""
    given = body.prompt_embeds or []
    if not given:
        if body.prompt is None:
            raise invalid("prompt: Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return []
    for name in ("echo", "suffix", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise invalid(f"{name} is not supported with prompt_embeds, which are no text. Leave it out.", name)
    if isinstance(given, str):
        return [(given, "prompt_embeds")]
    if len(given) > MAX_PROMPTS:
        raise invalid(f"prompt_embeds: {len(given)} prompts, at most {MAX_PROMPTS} are allowed.", "prompt_embeds")
    return [(one, f"prompt_embeds[{index}]") for index, one in enumerate(given)]


async def prepare_text(body: CompletionRequest, model: ServedModel) -> Work:
    """One text, or its tokens, that is continued, checked and not started, for other dialects: without an echo, and as
    long as the model allows, whatever it says beyond that."""
    params = completion_params(body, {"max_tokens": None, **model.defaults})
    caller = current_caller()
    caller.admission.check(caller.tenant, num_sequences(params))
    if body.prompt is None:
        raise invalid("prompt: is missing. Give a text.", "prompt")
    token_ids, _ = await _tokens_and_text(model, body.prompt, "prompt", body, WHOLE)
    check_length(len(token_ids), "max_tokens", None, model.max_model_len, what="prompt")
    room = model.max_model_len - len(token_ids)
    if params.max_tokens is not None and params.max_tokens > room:
        params = msgspec.structs.replace(params, max_tokens=room)
    return await Work.prepare(model, [RenderedPrompt(token_ids)], params, body)


ENDPOINT = Endpoint(CompletionRequest, RULES, _answer)


def _cut_of(body: CompletionRequest, params: GenerationParams, model: ServedModel) -> Cut:
    limit = model.max_model_len
    return Cut.asked(body.truncate_prompt_tokens, body.truncation_side, limit, limit - (params.max_tokens or 1))


async def _tokens_and_text(
    model: ServedModel, prompt: str | list[int], name: str, body: CompletionRequest, cut: Cut
) -> tuple[list[int], str]:
    """The prompt as tokens, and as text if it is echoed."""
    if isinstance(prompt, str):
        asked = around_a_hole(model.renderer, prompt, body.suffix) if body.suffix else prompt
        with in_words_of({"prompt": name}):
            rendered = await render(model, asked, cut=cut, add_special_tokens=body.add_special_tokens)
        if not rendered.token_ids:
            raise invalid(f"{name}: holds no tokens. Give at least one character.", name)
        if len(rendered.token_ids) != cut.length:
            return rendered.token_ids, prompt
        prompt = rendered.token_ids
    elif body.suffix:
        raise invalid("suffix: only with a prompt that is a text.", "suffix")
    check_token_ids(prompt, model.engine.config.facts.vocab_size, name)
    prompt = cut.of(prompt)
    if not (body.echo and model.renderer.has_tokenizer):
        return prompt, ""
    return prompt, await text_of(model, prompt, skip_special_tokens=body.skip_special_tokens is not False)
