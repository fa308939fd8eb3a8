"""What the model is given of a step in which rows have images: what an encoder made of them, and their positions. Of
rows that bring vectors of their own: these.

Owns the images of each row and their positions of three dimensions. A row without images gets the same numbers whoever
shares its batch. Called by StepComputation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.messages import AdmittedSequence, ForkedSequence, IntArray, Media, SchedulerOutput, StepOutput
from quire.worker.attention import Attention
from quire.worker.encoded_media import EncodedMedia
from quire.worker.input_batch import InputBatch
from quire.worker.staging import send
from quire.worker.step_member import StepMember


@dataclass(frozen=True)
class _Images:
    media: list[Media]
    # of all tokens up to the end of the last image; those behind it count on from their number plus `delta`
    positions_3P: IntArray
    delta: int

    @classmethod
    def of(cls, media: list[Media]) -> _Images:
        """Text counts by one in all three dimensions, and so do vectors; an image stands at one moment, its tokens at
        rows and columns, and what follows goes on behind the longest of its sides. Later frames of a video stand at the
        rows and columns of its first ones, and time is a side of it."""
        images = [one for one in media if not one.is_vectors]
        positions_3P = np.empty((3, images[-1].end if images else 0), dtype=np.int64)
        done = 0
        following = 0
        first = 0
        for image in images:
            positions_3P[:, done : image.start] = following + np.arange(image.start - done)
            following += image.start - done
            time = image.time or 0
            first = following if image.time is None else first
            height, width = image.cells
            index = np.arange(image.length)
            positions_3P[0, image.start : image.end] = first + time
            positions_3P[1, image.start : image.end] = first + index // width
            positions_3P[2, image.start : image.end] = first + index % width
            following = max(following, first + max(time + 1, height, width))
            done = image.end
        return cls(media, positions_3P, following - done)

    def positions(self, first: int, end: int) -> IntArray:
        known = self.positions_3P[:, first:end]
        num_behind = end - first - known.shape[1]
        behind = np.arange(end - num_behind, end) + self.delta
        return np.concatenate([known, np.broadcast_to(behind, (3, num_behind))], axis=1)


class ImageRows(StepMember):
    """Of a model with an encoder of images, or one that takes vectors. Positions have three dimensions if it has grid
    positions.

    `cache_bytes`: what was encoded is kept in so many bytes of memory. `layers` have their groups.
    """

    def __init__(
        self, model: Any, device: torch.device, cache_bytes: int = 256 << 20, layers: Iterable[Attention] = ()
    ) -> None:
        self._model = model
        self._device = device
        self._by_row: dict[int, _Images] = {}
        self._encoded = EncodedMedia(cache_bytes)
        # groups whose layers see nothing ahead, not even of an image that is whole
        sees_ahead = getattr(model, "sees_ahead", _everywhere)
        self._causal = frozenset(layer.group for layer in layers if not sees_ahead(layer))

    def admit(self, sequence: AdmittedSequence) -> None:
        self.release(sequence.row)
        if sequence.media:
            for image in sequence.media:
                _check(image)  # a strange shape is this row's trouble, not that of a step
            self._by_row[sequence.row] = _Images.of(sequence.media)

    def fork(self, fork: ForkedSequence) -> None:
        self.release(fork.row)
        if fork.parent_row in self._by_row:
            self._by_row[fork.row] = self._by_row[fork.parent_row]

    def release(self, row: int) -> None:
        self._by_row.pop(row, None)

    def of(self, batch: InputBatch) -> tuple[Tensor, ...]:
        embeds_TE: Tensor | None = None
        for image, low, high, place in self._touched(batch):
            if embeds_TE is None:
                embeds_TE = self._model.embed_tokens(batch.input_ids_T).clone()
            part = slice(low - image.start, high - image.start)
            given = _vectors_of(image, part, self._device) if image.is_vectors else self._encode(image)
            own = embeds_TE[place : place + high - low]
            if image.line_ends and len(given) != image.length:
                given = _with_line_ends(image, part, given.to(own.dtype), own)
            elif not image.is_vectors:
                given = given[part]
            # a token may be wider than a vector, for what only images fill
            own[:, : given.shape[1]] = given.to(own.dtype)
        positions = self.positions(batch)
        return (batch.input_ids_T, positions) if embeds_TE is None else (batch.input_ids_T, positions, embeds_TE)

    def positions(self, batch: InputBatch) -> Tensor:
        if not self._model.has_grid_positions:
            return batch.positions_T
        positions_3T = self._grid_positions(batch)
        # Without tokens of images all three dimensions agree, and a model may be recorded for plain positions.
        return positions_3T if any(self._touched(batch)) else positions_3T[0]

    def _grid_positions(self, batch: InputBatch) -> Tensor:
        positions_3T = batch.positions_T.repeat(3, 1)
        for images, first, last, start in self._rows_with_images(batch):
            known = send(torch.from_numpy(images.positions(first, last)), self._device)
            positions_3T[:, start : start + last - first] = known
        return positions_3T

    def seen(self, batch: InputBatch) -> InputBatch:
        """The tokens of an image that is whole see it to its end, in layers that look ahead."""
        ends_T: Tensor | None = None
        for image, low, high, place in self._touched(batch):
            if image.is_whole:
                if high < image.end:
                    raise ModelError(f"media: a step ends at {high}, within an image that is whole up to {image.end}.")
                if ends_T is None:
                    ends_T = batch.positions_T + 1
                ends_T[place : place + high - low] = image.end
        if ends_T is None:
            return batch
        groups = enumerate(batch.attention)
        seen = tuple(group if number in self._causal else replace(group, ends_T=ends_T) for number, group in groups)
        return replace(batch, attention=seen)

    def middle(self, row: int, first: int, end: int) -> int:
        middle = (first + end) // 2
        for image in self._by_row[row].media if row in self._by_row else ():
            if image.is_whole and image.start < middle < image.end:
                return image.start if image.start > first else image.end if image.end < end else first
        return middle

    def _rows_with_images(self, batch: InputBatch) -> Iterator[tuple[_Images, int, int, int]]:
        """Images of a row, which positions it computes, and where the first of these stands in the step."""
        for number, row in enumerate(batch.rows_S.tolist()):
            images = self._by_row.get(row)
            if images is not None:
                first = int(batch.num_computed_S[number])
                yield images, first, first + int(batch.num_tokens_S[number]), int(batch.query_starts_S1[number])

    def _touched(self, batch: InputBatch) -> Iterator[tuple[Media, int, int, int]]:
        """Images with tokens in the step, their positions there, and where the first of these stands."""
        for images, first, last, start in self._rows_with_images(batch):
            if first >= images.media[-1].end:
                continue  # a long answer to a video of many media
            for image in images.media:
                low, high = max(first, image.start), min(last, image.end)
                if low < high:
                    yield image, low, high, start + low - first

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        self._encoded.report(output)

    def _encode(self, image: Media) -> Tensor:
        return self._encoded.of(
            image, lambda: self._model.encode_image(pixels_of(image, self._device), [*image.grid, *image.margin])
        )

    def weights_changed(self) -> None:
        self._encoded.clear()

    def statistics(self) -> dict[str, float]:
        return self._encoded.statistics()


def _everywhere(layer: Attention) -> bool:
    """Of models that do not say."""
    return True


def _check(image: Media) -> None:
    if image.is_vectors:
        if len(image.shape) != 2 or image.shape[0] != image.length or 4 * math.prod(image.shape) != len(image.pixels):
            raise ModelError(f"media: {len(image.pixels)} bytes are no {image.length} vectors of shape {image.shape}.")
        return
    num_patches = image.grid[0] * image.grid[1] * image.grid[2]
    is_cut = len(image.shape) == 3 and image.shape[0] == num_patches and math.prod(image.shape) == len(image.pixels)
    if not is_cut or not len(image.mean) == len(image.std) == image.shape[1]:
        raise ModelError(f"media: {image.shape} pixels do not fill a grid of {image.grid} patches.")


def _with_line_ends(image: Media, part: slice, encoded: Tensor, text: Tensor) -> Tensor:
    """What stands for these tokens of an image: some of them are text."""
    _, width = image.cells
    index_T = torch.arange(part.start, part.stop, device=encoded.device)
    row_T, column_T = index_T // (width + image.line_ends), index_T % (width + image.line_ends)
    cells_TE = encoded[row_T * width + column_T.clamp(max=width - 1)]
    return torch.where((column_T < width)[:, None], cells_TE, text)


def _vectors_of(vectors: Media, part: slice, device: torch.device) -> Tensor:
    """[tokens, width] of these."""
    width = vectors.shape[1]
    num_bytes = 4 * width
    wanted = memoryview(vectors.pixels)[part.start * num_bytes : part.stop * num_bytes]
    return send(torch.frombuffer(bytearray(wanted), dtype=torch.float32).reshape(-1, width), device)


def pixels_of(image: Media, device: torch.device) -> Tensor:
    """[patches, colours * frames * pixels], as the encoder takes them. The same bits on every device: each number is
    made of one byte, by one multiplication, subtraction and division."""
    levels_PCS = send(torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).reshape(image.shape), device)
    numbers = send(torch.tensor([image.mean, image.std], dtype=torch.float32), device)
    mean_C1, std_C1 = numbers[:, :, None]
    pixels_PCS = levels_PCS.to(torch.float32).mul_(1 / 255).sub_(mean_C1).div_(std_C1)
    num_patches, num_colours, num_pixels = image.shape
    frames_PCFS = pixels_PCS[:, :, None].expand(-1, -1, image.num_frames, -1)
    return frames_PCFS.reshape(num_patches, num_colours * image.num_frames * num_pixels)
