"""Encoded images are kept by content: the second use of one runs no encoder."""

from types import SimpleNamespace

import numpy as np
import torch

from quire.messages import AdmittedSequence, Media
from quire.sampling_params import SamplingParams
from quire.worker.image_rows import ImageRows


class Model:
    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), 1)

    def encode_image(self, pixels: torch.Tensor, grid: list[int]) -> torch.Tensor:
        return pixels[::4] + 1


def image(start: int, value: int) -> Media:
    return Media(
        start=start, length=2, pixels=bytes([value] * 8), shape=[8, 1, 1], mean=[0.0], std=[1 / 255], grid=[1, 2, 4],
        merge_size=2, content_hash=bytes([value]),
    )  # fmt: skip


def admitted(row: int, value: int) -> AdmittedSequence:
    return AdmittedSequence(
        row=row, sequence_id=row, token_ids=np.zeros(5), num_prompt_tokens=5, num_computed_tokens=0,
        sampling=SamplingParams(), seed=0, media=[image(1, value)],
    )  # fmt: skip


def batch(row: int, first: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        rows_S=np.array([row]), query_starts_S1=np.array([0, count]), num_computed_S=np.array([first]),
        input_ids_T=torch.zeros(count, dtype=torch.int64), positions_T=torch.arange(first, first + count),
    )  # fmt: skip


def test_cut_within_an_image_and_used_again():
    rows = ImageRows(Model(), torch.device("cpu"))
    for row, value in enumerate((7, 7, 9)):
        rows.admit(admitted(row, value))
    found = []
    for row in range(3):
        _, positions, embeds = rows.of(batch(row, 0, 2))
        assert positions.tolist() == [[0, 1], [0, 1], [0, 1]]
        _, positions, more = rows.of(batch(row, 2, 3))
        assert positions.tolist() == [[1, 3, 4], [1, 3, 4], [2, 3, 4]]
        found.append([*embeds.flatten().tolist(), *more.flatten().tolist()])
    assert found == [[0, 8, 8, 0, 0], [0, 8, 8, 0, 0], [0, 10, 10, 0, 0]]
    statistics = rows.statistics()
    assert (statistics["num_images_encoded"], statistics["num_image_cache_hits"]) == (2, 4)


def test_the_least_recently_used_go_when_its_bytes_are_full():
    """Two images of two numbers fit."""
    rows = ImageRows(Model(), torch.device("cpu"), cache_bytes=2 * 2 * 4)

    def use(value: int) -> int:
        rows.admit(admitted(0, value))
        rows.of(batch(0, 0, 5))
        assert rows.statistics()["image_cache_bytes"] <= 16
        return rows.statistics()["num_images_encoded"]

    assert [use(value) for value in (7, 9, 7)] == [1, 2, 2]
    assert use(8) == 3, "9 has gone, which was used before 7"
    assert use(7) == 3
    assert use(9) == 4


def test_the_last_image_stays_without_any_bytes():
    """Its row may be in the middle of it."""
    rows = ImageRows(Model(), torch.device("cpu"), cache_bytes=0)
    rows.admit(admitted(0, 7))
    for first in range(1, 5):
        rows.of(batch(0, first, 1))
    assert rows.statistics()["num_images_encoded"] == 1
