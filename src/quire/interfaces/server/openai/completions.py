"""POST /v1/completions. A prompt that arrives in pieces has a file of its own: streamed_completion.py."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from starlette.datastructures import State

from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.chunks import CompletionChunk
from quire.interfaces.server.openai.continuations import Continuations
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.rendering import render, text_of
from quire.interfaces.server.openai.requests import CompletionRequest
from quire.interfaces.server.openai.responses import Completion
from quire.interfaces.server.openai.sampling import check_length, check_stream_options, completion_params
from quire.interfaces.server.openai.streamed_completion import answer_to_lines, is_in_lines
from quire.interfaces.server.openai.work import Work, num_sequences
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.interfaces.server.wire.field_rules import REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS
from quire.interfaces.server.wire.prompt_forms import check_token_ids, names_of, split_prompts

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
    check_stream_options(body)
    params = completion_params(body, model.defaults)
    prompts: list[list[int]] = []
    texts: list[str] = []
    asked = split_prompts(body.prompt, "prompt", MAX_PROMPTS)
    num_tokens = sum(len(prompt) for prompt in asked if isinstance(prompt, list))
    caller = current_caller()
    caller.admission.check(caller.tenant, len(asked) * num_sequences(params), num_tokens, num_prompts=len(asked))
    names = names_of(body.prompt, asked, "prompt")
    for prompt, name in zip(asked, names, strict=True):
        token_ids, text = await _tokens_and_text(model, prompt, name, body)
        check_length(len(token_ids), "max_tokens", body.max_tokens, model.max_model_len, what=name)
        prompts.append(token_ids)
        texts.append(text)
        if len(asked) > 1:
            # between many short texts others have their turn
            await asyncio.sleep(0)
    return Continuations(body, await Work.prepare(model, prompts, params, body, prompt_names=names), texts)


ENDPOINT = Endpoint(CompletionRequest, RULES, _answer)


async def _tokens_and_text(
    model: ServedModel, prompt: str | list[int], name: str, body: CompletionRequest
) -> tuple[list[int], str]:
    """The prompt as tokens, and as text if it is echoed."""
    if isinstance(prompt, str):
        with in_words_of({"prompt": name}):
            rendered = await render(model, prompt, add_special_tokens=body.add_special_tokens)
        if not rendered.token_ids:
            raise invalid(f"{name}: holds no tokens. Give at least one character.", name)
        return rendered.token_ids, prompt
    check_token_ids(prompt, model.engine.config.facts.vocab_size, name)
    if not body.echo:
        return prompt, ""
    return prompt, await text_of(model, prompt, skip_special_tokens=body.skip_special_tokens is not False)
