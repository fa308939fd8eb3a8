"""Images on the worker's side: which rows have some, what the model gets in the place of their placeholders.

Owns the images of each row and the outputs of the encoder, kept by content up to a bound. An image is encoded by itself
and when a step first needs one of its tokens, so its embeddings do not depend on who else is there. What is dropped is
computed again, with the same bits. Called by StepComputation, and told of rows like any follower.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.errors import RequestError
from quire.messages import AdmittedSequence, ForkedSequence, ImageItem, SchedulerOutput, StepOutput
from quire.worker.input_batch import InputBatch
from quire.worker.step_member import StepMember

# of outputs of the encoder
DEFAULT_CACHE_BYTES = 256 * 2**20


class ModelInputs(Protocol):
    """What a model gets beside token ids."""

    def inputs(self, batch: InputBatch) -> tuple[Tensor, ...]:
        """Positions, [T] or [3, T], and then embeddings in the place of token ids if some are those of images."""
        ...


class ImageModel(Protocol):
    """What a model offers that sees images."""

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens of text, [T, hidden_size]."""
        ...

    def encode_image(self, pixels_HWC: Tensor) -> Tensor:
        """One embedding for each placeholder of an image, [tokens, hidden_size]."""
        ...

    def image_positions(self, num_rows: int, num_columns: int) -> Tensor:
        """Positions of the placeholders of an image, [3, tokens], counted from its first."""
        ...


class NoImages(StepMember):
    """Of a model that reads text only."""

    def admit(self, sequence: AdmittedSequence) -> None:
        if sequence.media:
            raise RequestError("this model sees no images; leave them out.", param="media")

    def fork(self, fork: ForkedSequence) -> None:
        pass

    def release(self, row: int) -> None:
        pass

    def inputs(self, batch: InputBatch) -> tuple[Tensor, ...]:
        return (batch.positions_T,)

    def statistics(self) -> dict[str, float]:
        return {}


NO_IMAGES = NoImages()


class _Piece(NamedTuple):
    """Tokens [start, stop) of a step are tokens of an image, from `first` on."""

    start: int
    stop: int
    item: ImageItem
    first: int


class RowImages(StepMember):
    """Of a model that sees images."""

    def __init__(self, model: ImageModel, num_rows: int, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._model = model
        self._encoder = ImageEncoder(model, cache_bytes)
        self._num_reported_runs = 0
        self._by_row: dict[int, list[ImageItem]] = {}
        self._has_images = np.zeros(num_rows, dtype=np.bool_)

    def admit(self, sequence: AdmittedSequence) -> None:
        self._set(sequence.row, sequence.media)

    def fork(self, fork: ForkedSequence) -> None:
        self._set(fork.row, self._by_row.get(fork.parent_row, []))

    def release(self, row: int) -> None:
        self._set(row, [])

    def _set(self, row: int, items: list[ImageItem]) -> None:
        self._has_images[row] = bool(items)
        if items:
            self._by_row[row] = items
        else:
            self._by_row.pop(row, None)

    def inputs(self, batch: InputBatch) -> tuple[Tensor, ...]:
        if not self._by_row or not self._has_images[batch.rows_S].any():
            return (batch.positions_T,)
        device = batch.positions_T.device
        positions_3T = np.tile(batch.positions_T.cpu().numpy(), (3, 1))
        pieces: list[_Piece] = []
        for index in np.flatnonzero(self._has_images[batch.rows_S]).tolist():
            start = int(batch.query_starts_S1[index])
            stop = int(batch.query_starts_S1[index + 1])
            first = int(batch.num_computed_S[index])
            items = self._by_row[int(batch.rows_S[index])]
            pieces += self._place(items, positions_3T[:, start:stop], first, start)
        if not pieces:
            # Behind images all dimensions agree: a plain position, which is smaller than the number of tokens.
            return (torch.from_numpy(positions_3T[0].copy()).to(device),)
        embeds_TE = self._model.embed_tokens(batch.input_ids_T)
        for piece in pieces:
            encoded = self._encoder.encode(piece.item)
            embeds_TE[piece.start : piece.stop] = encoded[piece.first : piece.first + piece.stop - piece.start]
        return torch.from_numpy(positions_3T).to(device), embeds_TE

    def _place(self, items: list[ImageItem], positions_3t: Any, first: int, start: int) -> list[_Piece]:
        """Writes the positions of a row's tokens in this step, which are those from `first` on."""
        pieces: list[_Piece] = []
        num_tokens = positions_3t.shape[1]
        # how far positions lag behind the number of tokens: an image counts as many as its longer side
        lag = 0
        for item in items:
            begin = min(max(item.position - first, 0), num_tokens)
            end = min(max(item.end - first, 0), num_tokens)
            if begin < end:
                inside = first + begin - item.position
                places_3n = self._model.image_positions(item.num_rows, item.num_columns).numpy()
                positions_3t[:, begin:end] = item.position - lag + places_3n[:, inside : inside + end - begin]
                pieces.append(_Piece(start + begin, start + end, item, inside))
            lag_of_item = item.num_tokens - max(item.num_rows, item.num_columns)
            positions_3t[:, end:] -= lag_of_item
            lag += lag_of_item
        return pieces

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        if num_runs := self._encoder.num_runs - self._num_reported_runs:
            output.counts["num_encoder_runs"] = num_runs
            self._num_reported_runs += num_runs

    def statistics(self) -> dict[str, float]:
        return self._encoder.statistics()


class ImageEncoder:
    """Encodes images, and keeps what came of the last ones."""

    def __init__(self, model: ImageModel, cache_bytes: int) -> None:
        self._model = model
        self._cache_bytes = cache_bytes
        # by content, least recently used first
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_bytes = 0
        self.num_runs = 0
        self._num_hits = 0

    def encode(self, item: ImageItem) -> Tensor:
        """Embeddings of its placeholders."""
        encoded = self._kept.get(item.content_hash)
        if encoded is not None:
            self._kept.move_to_end(item.content_hash)
            self._num_hits += 1
            return encoded
        encoded = self._run(item)
        self._keep(item.content_hash, encoded)
        return encoded

    def _run(self, item: ImageItem) -> Tensor:
        parameter = next(self._model.parameters())  # type: ignore[attr-defined]
        pixels_HWC = torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(item.shape).float()
        scaled = (pixels_HWC * item.scale - torch.tensor(item.mean)) / torch.tensor(item.std)
        encoded = self._model.encode_image(scaled.to(parameter.device, parameter.dtype))
        if len(encoded) != item.num_tokens:
            raise RequestError(
                f"images: {item.shape[1]} x {item.shape[0]} pixels are {len(encoded)} tokens, not {item.num_tokens}.",
                param="media",
            )
        self.num_runs += 1
        return encoded

    def _keep(self, name: bytes, encoded: Tensor) -> None:
        if encoded.nbytes > self._cache_bytes:
            return
        self._kept[name] = encoded
        self._num_bytes += encoded.nbytes
        while self._num_bytes > self._cache_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes

    def statistics(self) -> dict[str, float]:
        return {
            "num_encoder_runs": self.num_runs,
            "num_encoder_hits": self._num_hits,
            "encoder_cache_bytes": self._num_bytes,
        }


Images: TypeAlias = NoImages | RowImages


def images_of(model: Any, num_rows: int) -> Images:
    """Whether a model sees images is for it to say: it can encode one."""
    return RowImages(model, num_rows) if hasattr(model, "encode_image") else NO_IMAGES
