"""Models as Ollama's clients list them: /api/tags, /api/ps, /api/show."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.ollama.answer import now, text_of_time
from quire.interfaces.server.served_model import Models, ServedModel, generation_defaults
from quire.renderer import Renderer
from quire.renderer.fill_in_middle import middle_marks

_BYTES_OF_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2}
# a model that stays: clients read a date
_NEVER = "2318-12-31T00:00:00Z"
_LONGEST_SECONDS = 100 * 365 * 86400
_LATEST = ":latest"


class Details(msgspec.Struct, kw_only=True):
    """Of a model's file."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    # empty: not known
    parameter_size: str
    quantization_level: str


class ListedModel(msgspec.Struct, kw_only=True):
    """One of /api/tags."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(msgspec.Struct):
    """GET /api/tags."""

    models: list[ListedModel]


class RunningModel(msgspec.Struct, kw_only=True):
    """One of /api/ps."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Running(msgspec.Struct):
    """GET /api/ps."""

    models: list[RunningModel]


class ShownModel(msgspec.Struct, kw_only=True):
    """POST /api/show."""

    modelfile: str = ""
    parameters: str = ""
    # how a text and its suffix become a prompt, where the model fills in the middle
    template: str = ""
    license: str = ""
    modified_at: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]


async def model_named(models: Models, name: str) -> ServedModel:
    """Ollama's names may have a tag, which says nothing here when it is `latest`."""
    return await models.named(name.removesuffix(_LATEST) or None)


def tags(models: Models) -> Tags:
    own = models.own.engine.config
    listed = [_listed(models, name, own) for name in own.served_model_names]
    return Tags([*listed, *(_listed(models, name, models.further.config(name)) for name in models.further.names)])


def running(models: Models) -> Running:
    own = models.own
    listed = [_running(models, name, own.engine, _NEVER) for name in own.engine.config.served_model_names]
    for name, engine in models.further.loaded.items():
        seconds = models.further.seconds_left(name)
        expires = _NEVER if seconds > _LONGEST_SECONDS else text_of_time(now() + seconds)
        listed.append(_running(models, name, engine, expires))
    return Running(listed)


def _running(models: Models, name: str, engine: AsyncLLM, expires: str) -> RunningModel:
    config = engine.config
    one = _listed(models, name, config)
    return RunningModel(
        name=one.name,
        model=one.model,
        size=one.size,
        digest=one.digest,
        details=one.details,
        expires_at=expires,
        size_vram=one.size if config.worker.device.startswith("cuda") else 0,
        context_length=engine.ready.max_model_len,
    )


async def shown(models: Models, name: str) -> ShownModel:
    """Also of one that is not in memory, and stays out of it."""
    further = models.further.find(name.removesuffix(_LATEST))
    if further is not None:
        config = models.further.config(further)
        return _shown(models, name, config, await models.further.renderer(further), config.max_model_len)
    model = await model_named(models, name)
    return _shown(models, model.name, model.engine.config, model.renderer, model.max_model_len)


def _shown(models: Models, name: str, config: EngineConfig, renderer: Renderer, max_model_len: int) -> ShownModel:
    family = config.facts.model_type
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": name,
        f"{family}.context_length": max_model_len,
        f"{family}.vocab_size": config.facts.vocab_size,
    }
    text_config = _text_config(config)
    for key, written in _SIZES.items():
        value = text_config.get(written)
        if isinstance(value, int):
            info[f"{family}.{key}"] = value
    if (count := _num_parameters(config)) is not None:
        info["general.parameter_count"] = count
    marks = middle_marks(renderer)
    return ShownModel(
        modified_at=text_of_time(models.created),
        details=_details(config),
        model_info=info,
        parameters=_parameters(config, max_model_len),
        template="" if marks is None else marks.around("{{ .Prompt }}", "{{ .Suffix }}"),
        capabilities=_capabilities(config, renderer),
    )


def _parameters(config: EngineConfig, max_model_len: int) -> str:
    """Two words a line, as clients take them apart."""
    defaults = {key: value for key, value in generation_defaults(config).items() if isinstance(value, int | float)}
    return "\n".join(f"{key} {value}" for key, value in sorted({**defaults, "num_ctx": max_model_len}.items()))


_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def _capabilities(config: EngineConfig, renderer: Renderer) -> list[str]:
    formats = renderer.output_formats
    if not config.facts.has_head:
        return ["embedding"]
    has = {
        "completion": True,
        "tools": formats.tool is not None,
        "insert": middle_marks(renderer) is not None,
        "vision": renderer.sees_images,
        "thinking": formats.reasoning is not None,
    }
    return [name for name, it_has in has.items() if it_has]


def _listed(models: Models, name: str, config: EngineConfig) -> ListedModel:
    return ListedModel(
        name=name,
        model=name,
        modified_at=text_of_time(models.created),
        size=config.facts.num_weight_bytes,
        digest=_digest(config),
        details=_details(config),
    )


def _details(config: EngineConfig) -> Details:
    facts = config.facts
    count = _num_parameters(config)
    return Details(
        format="gguf" if facts.path.is_file() else "safetensors",
        family=facts.model_type,
        families=[facts.model_type],
        parameter_size="" if count is None else _in_words(count),
        quantization_level=config.worker.quantization or config.worker.dtype,
    )


def _digest(config: EngineConfig) -> str:
    """Tells models apart: of what config.json says and the size of the weights, which are not read for it."""
    facts = config.facts
    encoder = msgspec.json.Encoder(order="deterministic", enc_hook=str)
    return hashlib.sha256(encoder.encode([facts.hf_config, facts.num_weight_bytes])).hexdigest()


def _num_parameters(config: EngineConfig) -> int | None:
    """None where it does not follow from the size of the files."""
    facts = config.facts
    size = _BYTES_OF_NUMBER.get(facts.dtype or "")
    if size is None or not facts.num_weight_bytes or facts.path.is_file() or "quantization_config" in facts.hf_config:
        return None
    return facts.num_weight_bytes // size


def _text_config(config: EngineConfig) -> dict[str, Any]:
    written = config.facts.hf_config
    inner = written.get("text_config")
    return {**written, **(inner if isinstance(inner, dict) else {})}


def _in_words(count: int) -> str:
    for letter, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
