"""What a user says about adapters (LoRA) at start."""

from __future__ import annotations

import json
from typing import Any

from quire.config.engine_options import EngineOptions
from quire.errors import OptionError

# adapters in memory for each slot, and at least, where nobody says how many
_IN_MEMORY = 4
_LEAST_IN_MEMORY = 32
_SLOTS = 8
MOST_NAME_CHARACTERS = 128
# adapters that are read at a time: each takes a thread and a disk that others need as well, and memory of its own
MOST_LOADING = 2


def num_slots(options: EngineOptions) -> int:
    """How many adapters a step may have; 0 without adapters."""
    if not options.enable_lora:
        return 0
    return options.max_loras or min(_SLOTS, options.max_cpu_loras or _SLOTS)


def resolve_max_cpu_loras(options: EngineOptions) -> tuple[int, tuple[object, str]]:
    """How many adapters memory may hold; 0 without adapters."""
    if not options.enable_lora:
        return 0, (0, "enable_lora is off")
    if options.max_cpu_loras is None:
        number = max(_LEAST_IN_MEMORY, _IN_MEMORY * num_slots(options))
        return number, (number, "four times max_loras, at least 32")
    if options.max_loras is not None and options.max_cpu_loras < options.max_loras:
        raise OptionError(
            f"max_cpu_loras={options.max_cpu_loras}: must be at least max_loras={options.max_loras}, because what is "
            "in a slot is in memory too. Raise max_cpu_loras or lower max_loras."
        )
    return options.max_cpu_loras, (options.max_cpu_loras, "as asked")


def resolve_lora_modules(options: EngineOptions) -> tuple[tuple[str, str], ...]:
    """(name, path) of each; read when the engine has started."""
    modules = tuple(_parsed(text) for text in options.lora_modules)
    if modules and not options.enable_lora:
        raise OptionError(f"lora_modules={options.lora_modules[0]}: needs enable_lora=True (--enable-lora).")
    names = [name for name, _ in modules]
    for name in names:
        if (fault := fault_of_name(name)) is not None:
            raise OptionError(f"lora_modules: {fault}")
        if names.count(name) > 1:
            raise OptionError(f"lora_modules: {name} is given {names.count(name)} times. Give each its own name.")
    return modules


def fault_of_name(name: str) -> str | None:
    """Why an adapter cannot be called so: the name stands in requests, answers and logs."""
    if 0 < len(name) <= MOST_NAME_CHARACTERS and name.isprintable() and name.strip() == name:
        return None
    return f"name={name[:40]!r}: must have 1 to {MOST_NAME_CHARACTERS} printable characters, no blanks around them."


def _parsed(text: str) -> tuple[str, str]:
    if text.lstrip().startswith("{"):
        try:
            entry: Any = json.loads(text)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and not entry.keys() - {"name", "path", "base_model_name"}:
            name, path = entry.get("name"), entry.get("path")
            if isinstance(name, str) and isinstance(path, str):
                return name, path
    elif all(parts := text.partition("=")):
        return parts[0], parts[2]
    raise OptionError(f'lora_modules={text}: must be name=path, or a JSON object {{"name": ..., "path": ...}}.')
