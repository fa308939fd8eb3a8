"""POST /v1/score and POST /v1/rerank: how well texts go together, in vLLM's, Jina's and Cohere's words.

A model that was trained for it reads both texts at once; of a model of embeddings it is the cosine of two vectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from starlette.datastructures import State

from quire.interfaces.class_labels import EMBED, SCORE, cosine, paired
from quire.interfaces.server.access.caller import new_id
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.pooling_work import (
    MAX_INPUTS,
    ListOf,
    PoolingAnswer,
    PoolingUsage,
    PoolingWork,
    ScoringFields,
    answer_of,
    inputs_of,
    pairs_of,
)
from quire.interfaces.server.openai.rendering import check_repeated
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.interfaces.server.wire.field_rules import Refused
from quire.pooling_params import PoolingParams

router = APIRouter()
# a text, or {"text": text}
Texts: TypeAlias = "str | list[Any]"


class ScoreRequest(ScoringFields, kw_only=True):
    """Texts to compare."""

    text_1: Annotated[Texts, Meta(description="a text, or as many as in text_2")]
    text_2: Annotated[Texts, Meta(description="a text or several, at most 2,048")]


class RerankRequest(ScoringFields, kw_only=True):
    """Documents to put into an order."""

    query: Annotated[Any, Meta(description='a text, or {"text": text}')]
    documents: Annotated[list[Any], Meta(description='texts, or {"text": text}; at most 2,048')]
    top_n: Annotated[int | None, Meta(description="so many of the best; by default all")] = None
    return_documents: Annotated[bool | None, Meta(description="Cohere's: false leaves texts out of the answer")] = None


_NEVER_CUT = Refused("texts are never cut; shorten them", (False,))
REFUSED = {
    "truncate_prompt_tokens": _NEVER_CUT,
    "truncation": _NEVER_CUT,
    "max_tokens_per_doc": _NEVER_CUT,
    "max_chunks_per_doc": _NEVER_CUT,
    "rank_fields": Refused("documents are texts; join their fields"),
    "instruction": Refused("an instruction is a part of the query; write it there"),
}
SCORE_RULES = rules_for(ScoreRequest, REFUSED)
RERANK_RULES = rules_for(RerankRequest, REFUSED)


class Score(msgspec.Struct):
    """Of one pair."""

    index: int
    score: float
    object: str = "score"


class ScoreList(ListOf[Score]):
    """The answer of /v1/score."""


class Document(msgspec.Struct):
    """As it was sent."""

    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document, best first; `index` says where it stood."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(msgspec.Struct):
    """The answer of /v1/rerank."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


_SCORE = described(request=ScoreRequest, answer=ScoreList)
_RERANK = described(request=RerankRequest, answer=Ranking)


@router.post("/score", name="create_scores_without_version", openapi_extra=_SCORE)
@router.post("/v1/score", openapi_extra=_SCORE)
async def create_scores(request: Request) -> Response:
    """How well texts go together."""
    return await SCORE_ENDPOINT.respond(request)


@router.post("/rerank", name="rerank_without_version", openapi_extra=_RERANK)
@router.post("/v2/rerank", name="rerank_of_cohere", openapi_extra=_RERANK)
@router.post("/v1/rerank", openapi_extra=_RERANK)
async def rerank(request: Request) -> Response:
    """Documents in the order in which they answer a query."""
    return await RERANK_ENDPOINT.respond(request)


async def _score(body: ScoreRequest, state: State) -> PoolingAnswer:
    model: ServedModel = await state.models.named(body.model)
    first = texts_of(body.text_1, "text_1")
    second = texts_of(body.text_2, "text_2")
    comparison = await comparison_of(model, first, second, body, ("text_1", "text_2"))

    async def scored() -> list[Score]:
        return [Score(index, score) for index, score in enumerate(await comparison.scores())]

    return answer_of(ScoreList, "score", body.model or model.name, comparison.usage, scored)


async def _rerank(body: RerankRequest, state: State) -> PoolingAnswer:
    model: ServedModel = await state.models.named(body.model)
    if body.top_n is not None and body.top_n < 1:
        raise invalid(f"top_n={body.top_n}: must be at least 1.", "top_n")
    [query] = texts_of([body.query], "query")
    documents = texts_of(body.documents, "documents")
    comparison = await comparison_of(model, [query], documents, body, ("query", "documents"))

    async def whole() -> Ranking:
        scores = await comparison.scores()
        # of equal ones the first stays first
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        is_shown = body.return_documents is not False
        results = [Ranked(index, scores[index], Document(documents[index]) if is_shown else None) for index in order]
        return Ranking(new_id("rerank"), body.model or model.name, comparison.usage, results)

    return PoolingAnswer(whole, long_field="results")


def texts_of(given: Texts, name: str) -> list[str]:
    """Texts, each also as an object that holds one."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(f"{name}: must not be an empty list.", name)
    if len(given) > MAX_INPUTS:
        raise invalid(f"{name}: {len(given)} texts, at most {MAX_INPUTS} are allowed.", name)
    texts: list[str] = []
    for index, one in enumerate(given):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise invalid(f'{name}[{index}]: must be a text, or {{"text": text}}.', f"{name}[{index}]")
        texts.append(text)
    return texts


class Comparison:
    """Pairs of texts on their way to their scores."""

    def __init__(self, work: PoolingWork, num_first: int, *, reads_pairs: bool) -> None:
        self._work = work
        self._num_first = num_first
        self._reads_pairs = reads_pairs

    @property
    def usage(self) -> PoolingUsage:
        return self._work.usage

    async def scores(self) -> list[float]:
        vectors = [output.outputs.vector for output in await self._work.outputs()]
        if self._reads_pairs:
            return [float(vector[0]) for vector in vectors]
        scores: list[float] = []
        for one, other in paired(vectors[: self._num_first], vectors[self._num_first :]):
            scores.append(cosine(one, other))
            if len(scores) % _FEW == 0:
                await asyncio.sleep(0)
        return scores


# vectors that are compared before others have their turn
_FEW = 64


async def comparison_of(
    model: ServedModel,
    first: Sequence[str],
    second: Sequence[str],
    body: ScoreRequest | RerankRequest,
    names: tuple[str, str],
) -> Comparison:
    """Checked, and not started. `names`: what the client calls both."""
    labels = model.engine.class_labels
    labels.check(SCORE)
    with in_words_of({"text_1": names[0]}):
        pairs = paired(first, second)
    if labels.scores_pairs:
        if len(first) == 1:
            check_repeated(first[0], len(pairs), *names)
        inputs = await pairs_of(model, pairs, names[0], [f"{names[1]}[{index}]" for index in range(len(pairs))])
    else:
        of_texts = [f"{names[0]}[{index}]" for index in range(len(first))]
        of_texts += [f"{names[1]}[{index}]" for index in range(len(second))]
        inputs = await inputs_of(model, [*first, *second], of_texts)
    params = PoolingParams(use_activation=body.use_activation)
    work = PoolingWork(inputs, params, SCORE if labels.scores_pairs else EMBED, model, body)
    return Comparison(work, len(first), reads_pairs=labels.scores_pairs)


SCORE_ENDPOINT = Endpoint(ScoreRequest, SCORE_RULES, _score, PoolingAnswer.whole)
RERANK_ENDPOINT = Endpoint(RerankRequest, RERANK_RULES, _rerank, PoolingAnswer.whole)
