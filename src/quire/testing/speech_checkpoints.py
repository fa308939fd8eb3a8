"""Tiny checkpoints of models that listen, with windows of one second, and sounds like speech."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.config.sound_sizes import RATE
from quire.testing.tiny_checkpoints import EOS_TOKEN_ID, widen, write_tokenizer

MARKS = (
    "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
    "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
START, EN, DE, TRANSLATE, TRANSCRIBE, _, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(259, 268)
FIRST_TIMESTAMP = 268
# every 20 ms of a second
_NUM_TIMESTAMPS = 51
VOCAB_SIZE = FIRST_TIMESTAMP + _NUM_TIMESTAMPS
NUM_SOURCES = 50
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "num_mel_bins": 80,
    "max_source_positions": NUM_SOURCES, "max_target_positions": 48, "decoder_start_token_id": START,
    "bos_token_id": EOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": EOS_TOKEN_ID,
    "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": START, "bos_token_id": EOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID, "max_length": 48, "is_multilingual": True, "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": PREVIOUS, "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE}, "max_initial_timestamp_index": 50,
    "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25, START, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH],
    "begin_suppress_tokens": [32, EOS_TOKEN_ID], "return_timestamps": False,
}  # fmt: skip


def make_speech_checkpoint(path: Path, *, seed: int = 0, **generation: Any) -> Path:
    """A checkpoint directory with tokenizer, preprocessor_config.json and generation_config.json; returns its path."""
    from tokenizers import AddedToken, Tokenizer

    path.mkdir(parents=True, exist_ok=True)
    make_speech_model(seed=seed).save_pretrained(path)
    write_tokenizer(path, chat_template=None, more_special=MARKS)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    moments = [f"<|{number / 50:.2f}|>" for number in range(_NUM_TIMESTAMPS)]
    tokenizer.add_tokens([AddedToken(moment, special=False, normalized=False) for moment in moments])
    tokenizer.save(str(path / "tokenizer.json"))
    numbers = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": RATE,
        "hop_length": 160, "n_fft": 400, "chunk_length": 1, "n_samples": RATE, "nb_max_frames": 2 * NUM_SOURCES,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(numbers), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps({**GENERATION, **generation}), encoding="utf-8")
    return path


def make_speech_model(*, seed: int = 0) -> Any:
    """The Transformers model itself, with wide random weights."""
    from transformers import AutoConfig, AutoModelForSpeechSeq2Seq

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSpeechSeq2Seq.from_config(AutoConfig.for_model("whisper", **_SIZES), dtype=torch.float32)
    widen(model, seed)
    return model.eval()


def speech_like(seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Vowels of changing pitch between pauses, and a little noise."""
    generator = np.random.default_rng(seed)
    moments = np.arange(round(seconds * RATE)) / RATE
    pitch = 110 + 40 * np.sin(2 * np.pi * generator.uniform(0.5, 2) * moments + generator.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = sum(np.sin(number * phase) / number for number in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * generator.uniform(2, 4) * moments + generator.uniform(0, 6)), 0, 1)
    made: npt.NDArray[np.float32] = (0.2 * voice * syllables + 0.01 * generator.normal(size=len(moments))).astype(
        np.float32
    )
    return made
