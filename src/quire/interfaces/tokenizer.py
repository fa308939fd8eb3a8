"""What `LLM.get_tokenizer` gives: the tokenizer of Transformers where it is installed, else ours by the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.renderer import Renderer


class OwnTokenizer:
    """The renderer, with the names that programs know from Transformers."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        special = renderer.named_special_tokens
        self.all_special_tokens = sorted(renderer.special_tokens)
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = special.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else renderer.token_id(token))

    @property
    def vocab_size(self) -> int:
        return self._renderer.vocab_size

    @property
    def chat_template(self) -> str | None:
        return self._renderer.chat_templates.get("default")

    def __len__(self) -> int:
        return self._renderer.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        is_one = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        many = [self.encode(one, add_special_tokens) for one in texts]
        masks = [[1] * len(ids) for ids in many]
        return {"input_ids": many[0] if is_one else many, "attention_mask": masks[0] if is_one else masks}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._renderer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._renderer.decode(ids, skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self._renderer.piece(token_id) for token_id in token_ids]

    def get_vocab(self) -> dict[str, int]:
        pieces = {self._renderer.piece(number): number for number in range(self._renderer.vocab_size)}
        pieces.pop("", None)
        return pieces

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str | list[int]:
        rendered = self._renderer.render_prompt(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        return rendered.token_ids if tokenize else rendered.text or ""


def tokenizer_of(config: EngineConfig, renderer: Renderer) -> Any:
    """A GGUF file has a tokenizer that Transformers cannot read without its weights: then it is ours."""
    folder = None if config.tokenizer_path is None else Path(config.tokenizer_path)
    if folder is not None and folder.is_dir():
        try:
            from transformers import AutoTokenizer
        except ImportError:
            return OwnTokenizer(renderer)
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=config.worker.trust_remote_code)
    return OwnTokenizer(renderer)
