"""Folders that stand for the models, adapters and tokenizers which vLLM's tests name: small ones, made here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quire.config.model_source import embedded_path
from quire.testing.tiny_adapters import make_adapter

# positions that the tests ask for with --max-model-len; the embedded model knows 1,024 by itself
_LENGTH = 32768
_EMBEDDING_NAMES = ("e5", "bge", "MiniLM", "embed")
# of the tests that look for it: texts as longer as these take more tokens than the model has
_SHORT = {"MiniLM": 128, "e5": 512, "bge": 512}
# of models that classify or score
_NUM_LABELS = {"apeach": 2, "rerank": 1}
# tests name tokens up to 5000, and those of the embedded model are fewer
_ROWS = 6144
_EMBEDDINGS = "model.embed_tokens.weight"
# the first tokens of the embedded model; elsewhere special tokens are the last ones
_NUM_SPECIAL = 8
# what stands for the same in Qwen's texts; each is one token here, so that the model sees what it was trained on
_OF_QWEN = {
    "<|end|>": "<|im_end|>",
    "<|system|>": "<|im_start|>system\n",
    "<|user|>": "\n<|im_start|>user\n",
    "<|assistant|>": "\n<|im_start|>assistant\n",
    "<|tool|>": "\n<|im_start|>tool\n",
}
_THOUGHTS = ("<think>", "</think>")

# roles of any name
_CHATML = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# what the embedded template writes -> what Qwen's does
_IN_TEMPLATE_OF_QWEN = {
    "'<|system|>'": "'<|im_start|>system\\n'",
    "'<|' + role + '|>'": "('' if role == 'system' else '\\n') + '<|im_start|>' + role + '\\n'",
    "'<|assistant|>'": "'\\n<|im_start|>assistant\\n' "
    "+ ('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '')",
    "<|end|>": "<|im_end|>",
}


def folder() -> Path:
    return Path(os.environ["QUIRE_VLLM_MODELS"])


@cache
def model_folder(name: str) -> str:
    """The folder of a model. A folder stays what it is."""
    if Path(name).is_dir() or name == "embedded":
        return name
    length = next((length for part, length in _SHORT.items() if part in name), _LENGTH)
    made = folder() / name.replace("/", "--")
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(embedded_path(), made)
        _change(made / "config.json", max_position_embeddings=length, _name_or_path=name)
        if "zephyr" in name:
            (made / "chat_template.jinja").write_text(_CHATML)
        elif "Qwen" in name:
            _as_qwen(made)
        elif "lama" in name:
            template = made / "chat_template.jinja"
            template.write_text("{{- bos_token -}}\n" + template.read_text())
        if any(part in name for part in _EMBEDDING_NAMES) and "rerank" not in name:
            _pool_by_mean(made)
        for part, count in _NUM_LABELS.items():
            if part in name:
                _give_labels(made, count)
    return str(made)


@cache
def adapter_folder(name: str) -> str:
    made = folder() / ("adapter--" + name.replace("/", "--"))
    if not made.exists():
        make_adapter(made, embedded_path(), seed=len(name))
    return str(made)


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _as_qwen(made: Path) -> None:
    """Letters first and special tokens last, two more for thoughts, and as many rows as tests name tokens."""
    path = made / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    size = len(vocab)

    def new_id(token_id: int) -> int:
        return token_id - _NUM_SPECIAL if token_id >= _NUM_SPECIAL else token_id + size - _NUM_SPECIAL

    def name_of(token: str) -> str:
        return _OF_QWEN.get(token, token)

    tokenizer["model"]["vocab"] = {name_of(token): new_id(token_id) for token, token_id in vocab.items()}
    added = [{**one, "id": new_id(one["id"]), "content": name_of(one["content"])} for one in tokenizer["added_tokens"]]
    for place, thought in enumerate(_THOUGHTS):
        added.append({**added[-1], "id": size + place, "content": thought})
    tokenizer["added_tokens"] = sorted(added, key=lambda one: int(one["id"]))
    path.write_text(json.dumps(tokenizer))
    for file in ("config.json", "generation_config.json"):
        _renumber(made / file, new_id)
    _change(made / "config.json", vocab_size=_ROWS)
    _change(made / "tokenizer_config.json", bos_token="<|endoftext|>", eos_token="<|im_end|>")
    template = (made / "chat_template.jinja").read_text()
    for ours, theirs in _IN_TEMPLATE_OF_QWEN.items():
        assert ours in template, ours
        template = template.replace(ours, theirs)
    (made / "chat_template.jinja").write_text(template)

    tensors = load_file(made / "model.safetensors")
    rows = tensors[_EMBEDDINGS]
    # what nobody chooses: the middle of all
    more = rows.float().mean(0).to(rows.dtype).expand(_ROWS - size, -1)
    tensors[_EMBEDDINGS] = torch.cat([rows[_NUM_SPECIAL:], rows[:_NUM_SPECIAL], more]).contiguous()
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})


def _renumber(path: Path, new_id: Callable[[int], int]) -> None:
    values = json.loads(path.read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values[name]
        values[name] = [new_id(one) for one in value] if isinstance(value, list) else new_id(value)
    path.write_text(json.dumps(values))


def _give_labels(made: Path, count: int) -> None:
    labels = {str(label): f"LABEL_{label}" for label in range(count)}
    _change(made / "config.json", architectures=["LlamaForSequenceClassification"], id2label=labels)
    tensors = load_file(made / "model.safetensors")
    width = tensors[_EMBEDDINGS].shape[1]
    tensors["score.weight"] = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})


def _pool_by_mean(made: Path) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (made / "modules.json").write_text(json.dumps(modules))
    (made / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 192, "pooling_mode_mean_tokens": True}
    (made / "1_Pooling" / "config.json").write_text(json.dumps(config))
