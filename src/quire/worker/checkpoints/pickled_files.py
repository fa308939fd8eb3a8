"""The .bin files of a checkpoint, which PyTorch wrote before there were safetensors: read with load_format=pt alone.

They are pickles. PyTorch's own reader for weights takes tensors, numbers and plain containers out of them and refuses
whatever else one names, so nothing in them runs; it is larger than a reader of safetensors, so it must be asked for.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError, one_line
from quire.json_files import read_object

_INDEX = "pytorch_model.bin.index.json"
# What trainers leave beside weights.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")


class PickledFiles:
    """The tensors of a checkpoint directory by name."""

    def __init__(self, path: Path) -> None:
        self.files = _files_of(path)

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One file after the other; its pages are mapped, not read, where the file's layout allows it."""
        for file in self.files:
            content = _load(file)
            if not isinstance(content, dict) or not all(_is_weight(*pair) for pair in content.items()):
                raise ModelError(
                    f"{file}: holds something other than tensors by name, plain ones with all their numbers. Save the "
                    "state_dict of the model alone, or convert it with save_pretrained of the Transformers library."
                )
            for name in list(content):
                yield name, content.pop(name)


def _files_of(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise ModelError(f"{index}: weight_map must name a file in the same directory for each tensor.")
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise ModelError(
                f"{path}: {', '.join(absent)} named by {_INDEX} is missing. Download the checkpoint again."
            )
        return [path / name for name in names]
    files = sorted(file for file in path.glob("*.bin") if not file.stem.startswith(_NO_WEIGHTS))
    if not files:
        raise ModelError(f"{path}: load_format=pt: no .bin file of weights there. Leave load_format out.")
    return files


def _is_weight(name: object, value: object) -> bool:
    """A pickle may also hold tensors without numbers, or with few of many."""
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _load(file: Path) -> Any:
    if _is_compressed(file):
        raise ModelError(
            f"{file}: is compressed, which PyTorch never writes: in memory it would be many times as large. Take the "
            "model as safetensors."
        )
    errors = []
    # files from before 2020 have another layout, which cannot be mapped
    for is_mapped in (True, False):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
        except Exception as error:
            # what damaged and hostile files raise is not declared anywhere
            errors.append(one_line(error))
    raise ModelError(
        f"{file}: cannot be read as tensors alone ({errors[-1][:300]}). Compare its size with the source, or take the "
        "model as safetensors."
    )


def _is_compressed(file: Path) -> bool:
    """Whether it is an archive that is larger than it seems. What is no whole archive the reader of weights refuses."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return False
