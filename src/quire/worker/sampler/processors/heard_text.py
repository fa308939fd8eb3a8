"""What may be written down of a sound: tokens that never are, and times that stand in pairs and do not go back.

A model that says times writes <|0.00|> text<|2.40|><|2.40|> more<|4.00|>: one at the beginning, two between pieces, one
at the end. It writes a time as soon as all times together are likelier than the likeliest token of text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.speech_tokens import SpeechTokens
from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import User
from quire.worker.staging import send, to_device


@dataclass(frozen=True)
class Heard:
    says_times: bool


class HeardText:
    """Of a model that listens, for all of its rows."""

    def __init__(self, table: RowTable, tokens: SpeechTokens) -> None:
        self._table = table
        self._tokens = tokens
        # [vocabulary], once its size and its device are known
        self._never_V = torch.empty(0, dtype=torch.bool)
        self._not_first_V = torch.empty(0, dtype=torch.bool)

    def state_of(self, sequence: AdmittedSequence) -> Heard:
        return Heard(self._tokens.says_times(sequence.token_ids[: sequence.num_prompt_tokens].tolist()))

    def state_of_child(self, parent: Heard) -> Heard:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Heard]]) -> None:
        if len(self._never_V) != logits_NV.shape[1]:
            self._never_V = _mask(self._tokens.suppressed, logits_NV)
            self._not_first_V = _mask(self._tokens.suppressed_first, logits_NV)
        is_all = len(users) == len(logits_NV)
        [positions] = to_device([int_array([user.position for user in users])], logits_NV.device)
        rows_nV = logits_NV if is_all else logits_NV[positions]
        rows_nV.masked_fill_(self._never_V, -torch.inf)
        timed = []
        for number, user in enumerate(users):
            output = self._table.token_ids[user.row, int(self._table.num_prompt[user.row]) : user.length]
            if not len(output):
                rows_nV[number].masked_fill_(self._not_first_V, -torch.inf)
            if user.state.says_times:
                timed.append(number)
                self._keep_pairs(rows_nV[number], output)
        if timed:
            self._prefer_times(rows_nV, timed)
        if not is_all:
            logits_NV[positions] = rows_nV

    def _keep_pairs(self, logits_V: Tensor, output: IntArray) -> None:
        tokens = self._tokens
        first = tokens.first_timestamp
        assert first is not None
        # a slice: a number that is assigned to one place would wait for a device
        logits_V[first - 1 : first] = -torch.inf
        times = output[output >= first]
        is_behind_time = bool(len(output)) and output[-1] >= first
        is_pair = is_behind_time and (len(output) < 2 or output[-2] >= first)
        if is_pair:
            logits_V[first:] = -torch.inf
        elif is_behind_time:
            # the second of a pair, or the end
            logits_V[: tokens.end] = -torch.inf
        if len(times):
            # the second of a pair may be the first once more
            least = int(times[-1]) + (0 if is_behind_time and not is_pair else 1)
            logits_V[first:least] = -torch.inf
        if not len(output):
            logits_V[:first] = -torch.inf
            if tokens.max_initial is not None:
                logits_V[first + tokens.max_initial + 1 :] = -torch.inf

    def _prefer_times(self, rows_nV: Tensor, timed: list[int]) -> None:
        first = self._tokens.first_timestamp
        [index] = to_device([int_array(timed)], rows_nV.device)
        logprobs_tV = rows_nV[index].log_softmax(-1)
        is_time_t = logprobs_tV[:, first:].logsumexp(-1) > logprobs_tV[:, :first].amax(-1)
        logits_tV = rows_nV[index]
        logits_tV[:, :first].masked_fill_(is_time_t[:, None], -torch.inf)
        rows_nV[index] = logits_tV


def _mask(token_ids: tuple[int, ...], logits_NV: Tensor) -> Tensor:
    """A token that is not in the vocabulary cannot be chosen."""
    mask_V = torch.zeros(logits_NV.shape[1], dtype=torch.bool)
    mask_V[[token for token in token_ids if token < len(mask_V)]] = True
    return send(mask_V, logits_NV.device)
