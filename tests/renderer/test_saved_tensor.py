"""What torch.save writes is read back to the bit; whatever else the bytes are, nothing of it is run or believed."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.renderer.saved_tensor import NoTensorError, read_saved_tensor

MOST = 1000


def saved(thing) -> bytes:
    stream = io.BytesIO()
    torch.save(thing, stream)
    return stream.getvalue()


def written(program: bytes, numbers: bytes = bytes(48), *, compression: int = zipfile.ZIP_STORED, beside: int = 0):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", numbers)
        for number in range(beside):
            archive.writestr(f"archive/{number}", b"")
    return stream.getvalue()


def program_of(tensor) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as archive:
        return archive.read("archive/data.pkl")


NUMBERS = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "of",
    [
        lambda whole: whole,
        lambda whole: whole.t(),
        lambda whole: whole[1:, ::2],
        lambda whole: whole[:0],
        lambda whole: whole[:1].expand(5, 4),
        lambda whole: torch.nn.Parameter(whole),
        lambda whole: whole[None],
    ],
)
def test_the_same_numbers(dtype, of):
    tensor = of(NUMBERS.to(dtype))
    read = read_saved_tensor(saved(tensor), MOST)
    assert read.dtype == np.float32
    assert np.array_equal(read, tensor.detach().float().numpy())


class Bad:
    def __reduce__(self):
        return os.mkdir, ("/nowhere/at/all",)


@pytest.mark.parametrize(
    "thing",
    [
        NUMBERS.to_sparse(), NUMBERS.to_sparse_csr(), NUMBERS.to_sparse_csc(), torch.zeros(3, dtype=torch.int64), {},
        [NUMBERS], {"a": NUMBERS}, None, 3, "text", torch.zeros(2, dtype=torch.complex64), torch.Generator, Bad(),
        torch.quantize_per_tensor(NUMBERS, 0.1, 0, torch.qint8), torch.nn.Linear(2, 2), torch.zeros(MOST + 1),
        torch.zeros(3 * MOST)[:2],
    ],
)  # fmt: skip
def test_nothing_else_is_read(thing):
    with pytest.raises(NoTensorError):
        read_saved_tensor(saved(thing), MOST)


def test_what_is_called_is_never_run(tmp_path):
    class Writes:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    for content in (saved(Writes()), written(pickle.dumps(Writes(), 2)), pickle.dumps(Writes())):
        with pytest.raises(NoTensorError):
            read_saved_tensor(content, MOST)
    assert not (tmp_path / "made").exists()


def test_an_archive_that_takes_more_than_it_has():
    program = program_of(NUMBERS)
    read_saved_tensor(written(program), MOST)
    bombs = [
        written(program, compression=zipfile.ZIP_DEFLATED),
        written(program, bytes(47)),
        written(program, bytes(49)),
        written(program, beside=100),
        written(program + bytes(5000)),
        # BININT1 12, the numbers beneath, and the sizes 3 and 4
        written(program.replace(b"K\x0c", b"K\x0b")),
        written(program.replace(b"K\x03K\x04\x86", b"K\x04K\x04\x86")),
        written(program.replace(b"K\x03K\x04\x86", b"J\xff\xff\xff\xffK\x04\x86")),
        written(program.replace(b"K\x03K\x04\x86", b"\x8a\x14" + b"\x01" * 20 + b"K\x04\x86")),
        written(program.replace(b"q\x0b.", b"r\xff\xff\xff\x7f.")).replace(b"FloatStorage", b"FloatSt0rage"),
        saved(NUMBERS)[:-40],
        b"",
        b"PK",
    ]
    for content in bombs:
        with pytest.raises(NoTensorError):
            read_saved_tensor(content, MOST)


@pytest.mark.parametrize("place", [b"ctorch\nFloatStorage\nq", b"X\x01\x00\x00\x000q"])
def test_words_that_hold_themselves(place):
    """A tuple of two that are one, which has two that are one: all of it is longer than any memory."""
    nested = b"K\x01q\x20" + b"h\x20\x86q\x20" * 400
    program = program_of(NUMBERS)
    at = program.index(place)
    end = at + len(place) + 1
    with pytest.raises(NoTensorError, match="no name"):
        read_saved_tensor(written(program[:at] + nested + program[end:]), MOST)


def test_a_view_that_shows_one_number_often():
    with pytest.raises(NoTensorError, match="1 numbers stand for"):
        read_saved_tensor(saved(torch.zeros(1).expand(1 << 15)), 1 << 20)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
def test_bytes_of_any_kind(changes, in_program):
    whole = bytearray(program_of(NUMBERS) if in_program else saved(NUMBERS))
    for place, value in changes:
        whole[place % len(whole)] = value
    try:
        read = read_saved_tensor(written(bytes(whole)) if in_program else bytes(whole), MOST)
    except NoTensorError:
        return
    assert read.size <= MOST
