"""The facts of a model's config.json that the engine itself needs. No torch, no Transformers.

Reads both spellings of Transformers 4 and 5: `torch_dtype` and `dtype`, nested `text_config`.
Attention layers and their shapes are not guessed here: the worker reports them after building the model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from quire.config.gguf_config import config_of
from quire.config.gguf_file import GGUFFile
from quire.config.model_numbers import check_numbers
from quire.config.shape_numbers import size_of
from quire.errors import ModelError
from quire.json_files import read_object

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")


_LONGEST_NAME = 100
# Encoders: the tokens of a text see each other, so that there is no next one.
_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "modernbert"})
# Tables of positions that begin behind that of the padding token, and which that is where nothing is said.
_POSITIONS_BEHIND_PADDING = {"roberta": 1, "xlm-roberta": 1}
_CLASSIFIES = "ForSequenceClassification"
# Encoder and decoder: what is heard, or read, stands before what is written.
_LISTENERS = frozenset({"whisper"})
_READERS = frozenset({"t5", "mt5", "umt5"})
# tokens of a text that these were trained with, where config.json does not say
_READ_AT_ONCE = 512
# What published files leave out of the text's configuration although the engine itself needs it.
_LEFT_OUT: dict[str, dict[str, Any]] = {"gemma3": {"vocab_size": 262_208, "max_position_embeddings": 131_072}}
_NO_GENERATION_CONFIG: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What config.json and generation_config.json say, or the metadata of a GGUF file."""

    # a directory, or a GGUF file
    path: Path
    model_type: str
    architecture: str
    vocab_size: int
    max_model_len: int | None
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    # size of the weight files; 0 where there are none
    num_weight_bytes: int

    @property
    def makes(self) -> str:
        """What an answer is: text, transcripts, labels or vectors."""
        if self.listens:
            return "transcripts"
        if self.classifies:
            return "labels"
        return "text" if self.has_head else "vectors"

    @property
    def embedding_size(self) -> int:
        """Numbers of a token before the first layer."""
        inner = self.hf_config.get("text_config")
        config = {**self.hf_config, **(inner if isinstance(inner, dict) else {})}
        return size_of(config, "word_embed_proj_dim", "hidden_size", "n_embd", "d_model")

    @property
    def sees_images(self) -> bool:
        """Whether there is an encoder of images."""
        return "vision_config" in self.hf_config

    @classmethod
    def read(cls, path: Path) -> ModelFacts:
        if path.is_file():
            gguf = GGUFFile.read(path)
            config = config_of(gguf)
            generation = _NO_GENERATION_CONFIG
            num_weight_bytes = sum(tensor.num_bytes for tensor in gguf.tensors.values())
        else:
            config = _config_of(path)
            generation = _NO_GENERATION_CONFIG
            if (path / "generation_config.json").is_file():
                generation = read_object(path / "generation_config.json")
            files = list(path.glob("*.safetensors")) or list(path.glob("*.bin"))
            num_weight_bytes = sum(file.stat().st_size for file in files)
            config = _with_quantization(path, config)
        inner = config.get("text_config")
        left_out = _LEFT_OUT.get(str(config.get("model_type")), {})
        text_config = {**left_out, **config, **(inner if isinstance(inner, dict) else {})}
        check_numbers(config, path if path.is_file() else path / "config.json")
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or len(model_type) > _LONGEST_NAME:
            raise ModelError(f"{path / 'config.json'}: no model_type. Is this a Hugging Face checkpoint?")
        architectures = config.get("architectures") or [""]
        if not isinstance(architectures, list) or not isinstance(architectures[0], str):
            raise ModelError(f"{path / 'config.json'}: architectures must be a list of names. Correct config.json.")
        vocab_size = text_config.get("vocab_size")
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ModelError(f"{path / 'config.json'}: vocab_size={vocab_size!r} must be a positive whole number.")
        lengths = [text_config[key] for key in _LENGTH_KEYS if isinstance(text_config.get(key), int)]
        if lengths and model_type in _POSITIONS_BEHIND_PADDING:
            padding = text_config.get("pad_token_id", _POSITIONS_BEHIND_PADDING[model_type])
            lengths[0] -= 1 + (padding if isinstance(padding, int) else 0)
        if model_type in _LISTENERS:
            lengths = [config.get("max_source_positions", 1500) + config.get("max_target_positions", 448)]
        if model_type in _READERS:
            lengths = [2 * (lengths[0] if lengths and lengths[0] > 0 else _READ_AT_ONCE)]
        if lengths:
            lengths[0] = max(lengths[0], _stretched_length(text_config))
        eos = generation.get("eos_token_id", text_config.get("eos_token_id"))
        return cls(
            path=path,
            model_type=model_type,
            architecture=architectures[0],
            vocab_size=vocab_size,
            max_model_len=lengths[0] if lengths and lengths[0] > 0 else None,
            dtype=text_config.get("dtype") or text_config.get("torch_dtype"),
            eos_token_ids=_token_ids(path, eos),
            hf_config=config,
            generation_config=generation,
            num_weight_bytes=num_weight_bytes,
        )

    @property
    def has_head(self) -> bool:
        """Of tokens. False for an encoder, a head of labels, and what calls itself a backbone (LlamaModel)."""
        if self.sees_all or self.classifies:
            return False
        return self.architecture.endswith("LMHeadModel") or not self.architecture.endswith("Model")

    @property
    def listens(self) -> bool:
        """Every prompt begins with a sound."""
        return self.model_type in _LISTENERS

    @property
    def has_sources(self) -> bool:
        """An encoder reads what a sequence begins with, as a whole."""
        return self.listens or self.model_type in _READERS

    @property
    def has_any_length(self) -> bool:
        """Positions are distances alone: its own length is one that it was trained with, not the greatest."""
        return self.model_type in _READERS

    @property
    def decoder_start_token_id(self) -> int | None:
        """What is written begins with it, where a prompt is read by an encoder; None: a prompt is what is continued."""
        if self.model_type not in _READERS:
            return None
        names = ("decoder_start_token_id", "pad_token_id")
        given = [config.get(name) for name in names for config in (self.generation_config, self.hf_config)]
        token_id = next((one for one in given if one is not None), 0)
        if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
            raise ModelError(
                f"{self.config_file}: decoder_start_token_id={str(token_id)[:60]} must be a token id from 0 to "
                f"{self.vocab_size - 1}. Correct it."
            )
        return token_id

    @property
    def sees_all(self) -> bool:
        """An encoder: it is given a text as a whole."""
        return self.model_type in _ENCODERS

    @property
    def classifies(self) -> bool:
        """Its head says something of a whole text."""
        return self.architecture.endswith(_CLASSIFIES)

    @property
    def config_file(self) -> Path:
        """The file that says what kind of model this is: for messages."""
        return self.path if self.path.is_file() else self.path / "config.json"


def _stretched_length(config: dict[str, Any]) -> int:
    """Positions that YaRN makes of those of the training, where both are said; 0: it does not stretch them."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return 0
    factor = rope.get("factor")
    trained = rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(trained, int):
        return 0
    return int(trained * factor)


def _config_of(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json there. A Hugging Face checkpoint directory is needed.")
    return read_object(path / "config.json")


def _with_quantization(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt says how weights are quantised in a file of its own."""
    file = path / "hf_quant_config.json"
    if config.get("quantization_config") or not file.is_file():
        return config
    declared = read_object(file).get("quantization")
    return (
        {**config, "quantization_config": {"quant_method": "modelopt", **declared}}
        if isinstance(declared, dict)
        else config
    )


def _token_ids(path: Path, value: Any) -> tuple[int, ...]:
    """One, several or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int for one in ids):
        raise ModelError(f"{path}: eos_token_id={str(value)[:60]} must be a token id or a list of them. Correct it.")
    return tuple(ids)
