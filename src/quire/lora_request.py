"""Which adapter (LoRA) a request is computed with, in the words of vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name; it is loaded from its directory by the first request that names it.

    `lora_int_id` is kept for programs that were written for vLLM; adapters are told apart by their names.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
