"""Prompts to vectors, for LLM and AsyncLLM: requests that pool, and what becomes of the hidden states that come back.

The engine pools; what follows is done here (a dense layer, cutting a vector and giving it the length 1, probabilities
of labels), so two requests for the same text share everything but these few operations. Owns what the model's authors
say about pooling, read when it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.engine_client import AsyncEngineClient, TokenDelta, items_of
from quire.errors import EngineDeadError, QuireError, RequestError, RequestFailedError
from quire.interfaces.class_labels import EMBED, ClassLabels, cosine
from quire.interfaces.own_pooling import OwnPooling, own_pooling
from quire.interfaces.requests import PreparedRequest, RequestMaker
from quire.messages import EngineRequest
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import CLS, LAST, MEAN, PoolingParams
from quire.renderer import RenderedPrompt
from quire.sampling_params import SamplingParams

# Nothing is sampled; the core still asks every request how it would be.
_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
_DEFAULTS = PoolingParams()
_SIZE_KEYS = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class PreparedEmbedding(PreparedRequest):
    """A request for a vector that passed every check and was not started yet."""

    # what becomes of the numbers that the engine gives
    finish: Callable[[NDArray[np.float32]], NDArray[np.float32]] = field(default=lambda numbers: numbers)
    # it multiplies matrices, so it is kept off event loops
    is_long: bool = False


class Embeddings:
    """Of one engine."""

    def __init__(self, config: EngineConfig, maker: RequestMaker) -> None:
        self._facts = config.facts
        self.labels = ClassLabels(config.facts)
        inner = config.facts.hf_config.get("text_config")
        text_config = {**config.facts.hf_config, **(inner if isinstance(inner, dict) else {})}
        self._size = next((text_config[key] for key in _SIZE_KEYS if isinstance(text_config.get(key), int)), None)
        self._maker = maker
        self._own: OwnPooling | None = None

    def prepare(
        self,
        prompt: RenderedPrompt,
        params: PoolingParams | None,
        task: str = EMBED,
        **request: Any,
    ) -> PreparedEmbedding:
        """Raises RequestError for what cannot be done."""
        params = _DEFAULTS if params is None else params
        if not isinstance(params, PoolingParams):
            raise RequestError(f"pooling_params={params!r}: must be PoolingParams.", param="pooling_params")
        self.labels.check(task)
        if task == EMBED:
            return self._vector(prompt, params, request)
        labels = self.labels
        head: dict[str, Any] = {"label_token_ids": labels.token_ids, "is_classified": not labels.token_ids}
        made = self._made(prompt, pooling=labels.pooling, **head, **request)
        finish = partial(labels.finished, use_activation=params.use_activation is not False)
        return PreparedEmbedding(made, prompt.text, shows_logprobs=False, finish=finish)

    def _made(self, prompt: RenderedPrompt, **request: Any) -> EngineRequest:
        return self._maker.make(
            prompt.token_ids, _NO_SAMPLING, media=prompt.media, second_start=prompt.second_start, **request
        )

    def _vector(self, prompt: RenderedPrompt, params: PoolingParams, request: dict[str, Any]) -> PreparedEmbedding:
        # who says how is not asked how the authors would
        own = OwnPooling(params.pooling) if params.pooling else self._own_pooling()
        if own.how == CLS and not self._facts.sees_all:
            raise RequestError(
                "pooling=cls: the first token of this model has seen no other. Take last or mean.", param="pooling"
            )
        _check_dimensions(params, self._size if not own.dense else len(own.dense[-1].weight))
        made = self._made(prompt, pooling=own.how, **request)
        finish = partial(_finished, params=params, own=own)
        return PreparedEmbedding(made, prompt.text, shows_logprobs=False, finish=finish, is_long=bool(own.dense))

    def _own_pooling(self) -> OwnPooling:
        if self._own is None:
            # as sentence-transformers does of an encoder of which nothing is said
            self._own = own_pooling(self._facts.path, MEAN if self._facts.sees_all else LAST)
        return self._own


class EmbeddingJob:
    """One prompt on its way to its vector."""

    def __init__(self, prepared: PreparedEmbedding, label: str | None = None) -> None:
        self.request = prepared.request
        self._prepared = prepared
        self._label = str(prepared.request.request_id) if label is None else label
        self._num_cached_tokens: int | None = None
        self._vector: bytes | None = None
        self._error: QuireError | None = None
        self.needs_each_token = False
        self.is_finished = False
        self.num_output_tokens = 0

    def push(self, delta: TokenDelta) -> bool:
        """Never ends early, unlike a text that meets a stop string."""
        if delta.num_cached_tokens is not None:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.vector is not None:
            self._vector = delta.vector
        if delta.finish_reason is not None:
            self.is_finished = True
        if delta.is_lost:
            self._error = EngineDeadError(str(delta.error))
        elif delta.finish_reason == "error":
            # One that never started was refused: the core found that it could not run even alone.
            was_refused = self._num_cached_tokens is None
            self._error = RequestError(str(delta.error)) if was_refused else RequestFailedError(str(delta.error))
        elif delta.finish_reason == "abort":
            self._error = RequestFailedError("The request was aborted before its vector was there.")
        return False

    def output(self) -> EmbeddingRequestOutput:
        """Raises what ended it instead: nobody is to take an empty vector for one."""
        if self._error is not None:
            raise self._error
        assert self._vector is not None, "a prompt that was pooled ended without its vector"
        vector = self._prepared.finish(np.frombuffer(self._vector, dtype=np.float32))
        return EmbeddingRequestOutput(
            request_id=self._label,
            prompt=self._prepared.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=EmbeddingOutput(vector),
            num_cached_tokens=self._num_cached_tokens,
        )


async def embedded(
    prepared: PreparedEmbedding, client: AsyncEngineClient, on_start: Callable[[int], None], label: str | None = None
) -> EmbeddingRequestOutput:
    """The vector, when it is there; a caller that is cancelled aborts the request."""
    job = EmbeddingJob(prepared, label)
    deltas = prepared.start(client)
    try:
        async for delta in items_of(deltas):
            if delta.num_cached_tokens is not None:
                on_start(delta.num_cached_tokens)
            job.push(delta)
    finally:
        await deltas.aclose()
    return await asyncio.to_thread(job.output) if prepared.is_long else job.output()


def classification(output: EmbeddingRequestOutput) -> ClassificationRequestOutput:
    """What came back, as probabilities of labels."""
    return ClassificationRequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        outputs=ClassificationOutput(output.outputs.embedding),
        num_cached_tokens=output.num_cached_tokens,
    )


def scoring(outputs: Sequence[EmbeddingRequestOutput]) -> ScoringRequestOutput:
    """What a model says that has read both texts, or the vectors of both."""
    vectors = [output.outputs.vector for output in outputs]
    return ScoringRequestOutput(
        request_id=outputs[0].request_id,
        prompt_token_ids=[token for output in outputs for token in output.prompt_token_ids],
        outputs=ScoringOutput(float(vectors[0][0]) if len(vectors) == 1 else cosine(*vectors)),
        num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
    )


def pooled(output: EmbeddingRequestOutput) -> PoolingRequestOutput:
    """What came back, whatever it means."""
    return PoolingRequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        outputs=PoolingOutput(output.outputs.vector),
        num_cached_tokens=output.num_cached_tokens,
    )


def _check_dimensions(params: PoolingParams, size: int | None) -> None:
    if params.dimensions is not None and size is not None and params.dimensions > size:
        raise RequestError(
            f"dimensions={params.dimensions}: this model's vectors have {size} numbers, and the first of these are "
            "kept. Ask for fewer, or leave it out for all.",
            param="dimensions",
        )


def _finished(vector: NDArray[np.float32], params: PoolingParams, own: OwnPooling) -> NDArray[np.float32]:
    for dense in own.dense:
        vector = dense(vector)
    _check_dimensions(params, len(vector))
    vector = vector[: params.dimensions].astype(np.float64)
    if own.normalizes if params.normalize is None else params.normalize:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype(np.float32)
