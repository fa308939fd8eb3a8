"""From tokens to what a user sees: text, stop strings, log-probabilities; as pieces, or gathered into outputs.

Owns the text streams of one request. A stop string that is met here ends the sequence here: the caller must tell the
core to drop it (`ends_early`). Called once a sequence and step, so the common case does little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.engine_client import TokenDelta
from quire.interfaces.requests import PreparedRequest
from quire.messages import TokenLogprobs
from quire.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput

if TYPE_CHECKING:
    from quire.renderer import Renderer, TextStream
    from quire.renderer.output_parsing.answer import Piece


class OutputDelta(msgspec.Struct, gc=False):
    """What is new in one sequence. `finish_reason` is set in its last one."""

    index: int
    token_ids: list[int]
    text: str = ""
    # what a parser made of the text; None: there is none
    pieces: Sequence[Piece] | None = None
    logprobs: Logprobs | None = None
    # of these tokens alone; beams have it in any case, others with log-probabilities
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # it ended with an error that is the client's, and `stop_reason` says why
    is_refused: bool = False
    # or of an engine that died
    is_lost: bool = False
    # of the prompt positions that were computed since the last delta; the first token of a prompt has none
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    # why it was no more, as a word of SequenceStart
    first_miss: str = ""
    # as in TokenDelta
    share_of_others: float | None = None
    # in the last one: drafts that were verified, and those of them that were right (speculation)
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    # a stop string was met, of which the core knows nothing: it must be told to drop the sequence
    ends_early: bool = False


class RequestAssembly:
    """The sequences of one request, from token deltas to output deltas."""

    def __init__(self, prepared: PreparedRequest, renderer: Renderer, first_index: int = 0) -> None:
        """`first_index`: what its first sequence is called outside."""
        self._first_index = first_index
        sampling = prepared.request.sampling
        self._shows_logprobs = prepared.shows_logprobs
        self._streams: list[TextStream] | None = None
        self._text_of: Callable[[int], str | None] = _no_text
        if sampling.detokenize:
            before = [*prepared.before, *prepared.prompt_token_ids]
            self._streams = [renderer.open_stream(before, sampling) for _ in range(sampling.n)]
            if renderer.has_tokenizer:
                self._text_of = renderer.token_text
        self._is_plain = self._streams is not None and all(stream.is_plain for stream in self._streams)
        self._num_open = sampling.n

    @property
    def is_finished(self) -> bool:
        return self._num_open == 0

    def push(self, delta: TokenDelta) -> OutputDelta:
        index = self._first_index + delta.index
        new = OutputDelta(index, delta.token_ids)
        if delta.num_cached_tokens is not None:
            new.num_cached_tokens = delta.num_cached_tokens
            new.first_miss = delta.first_miss
        if delta.share_of_others is not None:
            new.share_of_others = delta.share_of_others
        if delta.finish_reason is not None:
            self._num_open -= 1
            new.finish_reason = delta.finish_reason
            new.stop_reason = delta.stop_reason if delta.error is None else delta.error
            new.is_refused = delta.is_refused
            new.is_lost = delta.is_lost
            new.num_drafted_tokens = delta.num_drafted_tokens
            new.num_accepted_tokens = delta.num_accepted_tokens
        if self._streams is not None:
            if self._is_plain and delta.finish_reason is None:
                new.text = self._streams[delta.index].push_plain(delta.token_ids)
            else:
                self._add_text(new, self._streams[delta.index])
        if delta.logprobs is not None:
            self._add_logprobs(new, delta.logprobs[: len(new.token_ids)])
        if delta.prompt_logprobs is not None:
            new.prompt_logprobs = [self._positions(entry) for entry in delta.prompt_logprobs]
        return new

    def _add_text(self, new: OutputDelta, stream: TextStream) -> None:
        pushed = stream.push(new.token_ids, is_last=new.finish_reason is not None)
        new.text = pushed.text
        if pushed.stop_string is not None:
            new.ends_early = new.finish_reason is None
            new.token_ids = new.token_ids[: pushed.num_tokens]
            self._num_open -= new.ends_early
            new.finish_reason = "stop"
            new.stop_reason = pushed.stop_string

    def _add_logprobs(self, new: OutputDelta, entries: list[TokenLogprobs]) -> None:
        new.cumulative_logprob = sum([entry.logprobs[0] for entry in entries])
        if self._shows_logprobs:
            new.logprobs = [self._positions(entry) for entry in entries]

    def _positions(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first; if it is among the best ones it appears once."""
        text_of = self._text_of
        return {
            token_id: Logprob(logprob, rank or None, text_of(token_id))
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        }


class OutputGatherer:
    """Output deltas of one request, gathered into vLLM's RequestOutput."""

    def __init__(self, label: str, prepared: PreparedRequest) -> None:
        sampling = prepared.request.sampling
        self._label = label
        self._prompt = prepared.prompt
        self._prompt_token_ids = prepared.prompt_token_ids
        self._shows_logprobs = prepared.shows_logprobs
        self._has_sum = sampling.logprobs is not None
        self._has_prompt_logprobs = sampling.prompt_logprobs is not None
        self._num_cached_tokens: int | None = None
        self._first_miss = ""
        self._outputs = [self._empty(index) for index in range(sampling.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if self._has_prompt_logprobs else None

    def add(self, delta: OutputDelta) -> None:
        output = self._outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        output.num_drafted_tokens = delta.num_drafted_tokens
        output.num_accepted_tokens = delta.num_accepted_tokens
        if delta.cumulative_logprob is not None and output.cumulative_logprob is not None:
            output.cumulative_logprob += delta.cumulative_logprob
        if delta.logprobs is not None and output.logprobs is not None:
            output.logprobs += delta.logprobs
        self._add_prompt_facts(delta)

    def gathered(self) -> RequestOutput:
        """All so far. The lists go on growing: the caller gives this away once, at the end."""
        return self._request_output(self._outputs)

    def snapshot(self) -> RequestOutput:
        """All so far, in lists of its own."""
        return self._request_output([_copy_of(output) for output in self._outputs])

    def only(self, delta: OutputDelta) -> RequestOutput:
        """What is new in one sequence, in the same shape."""
        self._add_prompt_facts(delta)
        output = self._empty(delta.index)
        output.text = delta.text
        output.token_ids = delta.token_ids
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        output.num_drafted_tokens = delta.num_drafted_tokens
        output.num_accepted_tokens = delta.num_accepted_tokens
        if delta.cumulative_logprob is not None:
            output.cumulative_logprob = delta.cumulative_logprob
        if delta.logprobs is not None:
            output.logprobs = delta.logprobs
        # Here the state is only whether a sequence has finished.
        self._outputs[delta.index].finish_reason = delta.finish_reason
        return self._request_output([output])

    def _empty(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            logprobs=[] if self._shows_logprobs else None,
            cumulative_logprob=0.0 if self._has_sum else None,
        )

    def _add_prompt_facts(self, delta: OutputDelta) -> None:
        if delta.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs += delta.prompt_logprobs
        if delta.num_cached_tokens is not None and self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens
            self._first_miss = delta.first_miss

    def _request_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self._label,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=all(output.is_finished for output in self._outputs),
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            first_miss=self._first_miss or None,
        )


def _copy_of(output: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids.copy(),
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else output.logprobs.copy(),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        num_drafted_tokens=output.num_drafted_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
    )


def _no_text(token_id: int) -> None:
    return None
