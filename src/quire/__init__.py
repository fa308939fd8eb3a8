"""Quire, an LLM inference engine with paged attention.

    from quire import LLM, SamplingParams
    llm = LLM()
    print(llm.generate("Hello", SamplingParams(max_tokens=20))[0].outputs[0].text)

A user's whole vocabulary is here. Each name is imported at its first use, so that `import quire` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.beam_search_params import BeamSearchParams
    from quire.errors import (
        CapacityError,
        ContextLengthError,
        EngineDeadError,
        EngineError,
        ModelError,
        OptionError,
        QuireError,
        RequestError,
        RequestFailedError,
        UserError,
    )
    from quire.interfaces.async_llm import AsyncLLM
    from quire.interfaces.llm import LLM
    from quire.lora_request import LoRARequest
    from quire.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        Segment,
        Transcript,
    )
    from quire.pooling_params import PoolingParams
    from quire.sampling_params import SamplingParams
    from quire.structured_outputs_params import StructuredOutputsParams

_MODULES = {
    "quire.interfaces.llm": ("LLM",),
    "quire.interfaces.async_llm": ("AsyncLLM",),
    "quire.sampling_params": ("SamplingParams",),
    "quire.beam_search_params": ("BeamSearchParams",),
    "quire.structured_outputs_params": ("StructuredOutputsParams",),
    "quire.lora_request": ("LoRARequest",),
    "quire.pooling_params": ("PoolingParams",),
    "quire.outputs": (
        "BeamSearchOutput",
        "BeamSearchSequence",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
        "Segment",
        "Transcript",
    ),
    "quire.errors": (
        "CapacityError",
        "ContextLengthError",
        "EngineDeadError",
        "EngineError",
        "ModelError",
        "OptionError",
        "QuireError",
        "RequestError",
        "RequestFailedError",
        "UserError",
    ),
}
_MODULE_BY_NAME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CapacityError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ContextLengthError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "EngineError",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "OptionError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RequestError",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Segment",
    "StructuredOutputsParams",
    "Transcript",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
