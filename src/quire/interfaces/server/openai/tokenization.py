"""POST /tokenize and POST /detokenize (vLLM's)."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fastapi import APIRouter, Request, Response

from quire.interfaces.server.openai.chat_tools import tool_choice_of
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.rendering import opens_answer, render, template_kwargs_of, text_of
from quire.interfaces.server.openai.requests import DetokenizeRequest, TokenizeRequest
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import ApiError, invalid
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.server.wire.prompt_forms import check_token_ids
from quire.renderer.special_tokens import read_json

router = APIRouter()
TOKENIZE_RULES = rules_for(TokenizeRequest)
DETOKENIZE_RULES = rules_for(DetokenizeRequest)


class Tokenized(msgspec.Struct):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    # with return_token_strs
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """POST /detokenize."""

    prompt: str


@router.post("/tokenize", openapi_extra=described(request=TokenizeRequest, answer=Tokenized))
async def tokenize(request: Request) -> Response:
    """The tokens of a prompt or of a chat, as the model would see them."""
    body = await read_request(request, TokenizeRequest, TOKENIZE_RULES)
    model: ServedModel = await request.app.state.models.named(body.model)
    renderer = model.renderer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        rendered = await render(model, body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        rendered = await render(
            model,
            body.messages or [],
            tools=tool_choice_of(body.tools, None).tools,
            add_generation_prompt=opens_answer(body),
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=body.add_special_tokens,
            template_kwargs=template_kwargs_of(body.reasoning_effort, body.chat_template_kwargs),
        )
    tokens = rendered.token_ids
    strings = [renderer.piece(token) for token in tokens] if body.return_token_strs else None
    return json_answer(Tokenized(len(tokens), model.max_model_len, tokens, strings))


@router.get("/tokenizer_info", openapi_extra=described(errors=(404,)))
async def tokenizer_info(request: Request) -> Response:
    """vLLM's: the tokenizer's settings as its authors wrote them down, and the chat template. Only with the option
    tokenizer_info."""
    if not request.app.state.shows_tokenizer_info:
        raise ApiError(404, "Not shown here. Start the server with tokenizer_info (--tokenizer-info).")
    own: ServedModel = request.app.state.models.own
    folder = own.engine.config.tokenizer_path
    if folder is None:
        raise ApiError(404, "This server has no tokenizer (tokenizer=none).")
    settings = read_json(Path(folder) / "tokenizer_config.json")
    templates = own.renderer.chat_templates
    settings |= {"chat_template": templates.get("default")} if templates else {}
    # a number that stands for no limit is none
    if int(settings.get("model_max_length") or 0) < own.max_model_len or settings["model_max_length"] > 2**53:
        settings["model_max_length"] = own.max_model_len
    return json_answer({"tokenizer_class": "PreTrainedTokenizerFast", **settings})


@router.post("/detokenize", openapi_extra=described(request=DetokenizeRequest, answer=Detokenized))
async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included."""
    body = await read_request(request, DetokenizeRequest, DETOKENIZE_RULES)
    model: ServedModel = await request.app.state.models.named(body.model)
    check_token_ids(body.tokens, model.renderer.vocab_size, "tokens")
    return json_answer(Detokenized(await text_of(model, body.tokens, skip_special_tokens=False)))
