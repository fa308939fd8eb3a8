"""vLLM's names: `import quire.vllm as vllm`, or `from quire.vllm import LLM, SamplingParams`.

    python -m quire.vllm SCRIPT [ARGUMENTS]     runs a program that imports vllm as it is

docs/coming-from.md says what is different.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from quire.beam_search_params import BeamSearchParams as BeamSearchParams
from quire.errors import RequestError as VLLMValidationError
from quire.errors import UserError
from quire.interfaces.cli.engine_flags import add_engine_flags
from quire.interfaces.cli.parser import CommandParser
from quire.interfaces.compat import vllm_engine
from quire.interfaces.compat.vllm_engine import (
    LLM,
    AsyncLLM,
    Counter,
    EmbedsPrompt,
    Gauge,
    Histogram,
    LLMEngine,
    Metric,
    PromptType,
    TextPrompt,
    TokensPrompt,
    Vector,
    cleanup_dist_env_and_memory,
    print_embeddings,
)
from quire.interfaces.compat.vllm_logits import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
    VllmConfig,
    process_dict_updates,
)
from quire.interfaces.compat.vllm_outputs import FlatLogprobs
from quire.interfaces.compat.vllm_params import RequestOutputKind, SamplingParams
from quire.lora_request import LoRARequest
from quire.outputs import (
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
)
from quire.pooling_params import PoolingParams
from quire.structured_outputs_params import StructuredOutputsParams
from quire.version import __version__
from quire.watermark import WatermarkDetection
from quire.watermark import WatermarkDetector as GumbelWatermarkDetector

AsyncLLMEngine = AsyncLLM
TokensInput = TokensPrompt

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "FlatLogprobs",
    "FlexibleArgumentParser",
    "Gauge",
    "GumbelWatermarkDetector",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "Metric",
    "ModelRegistry",
    "MoveDirectionality",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProfilerConfig",
    "PromptType",
    "RequestLogitsProcessor",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensInput",
    "TokensPrompt",
    "VLLMValidationError",
    "Vector",
    "VllmConfig",
    "WatermarkDetection",
    "__version__",
    "cleanup_dist_env_and_memory",
    "init_logger",
    "print_embeddings",
    "process_dict_updates",
]


def init_logger(name: str) -> logging.Logger:
    """Of a program's own; what it says on top of the standard library's (info_once) is not here."""
    return logging.getLogger(name)


class FlexibleArgumentParser(CommandParser):
    """argparse, with dashes or underscores, that knows the engine's flags after EngineArgs.add_cli_args."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed = self.parse(sys.argv[1:] if args is None else args)
        # what the file says is in the others
        vars(parsed).pop("config", None)
        return parsed


class EngineArgs(vllm_engine.EngineArgs):
    """Options of an engine that is not made yet."""

    @staticmethod
    def add_cli_args(parser: CommandParser) -> CommandParser:
        """Only flags that were typed appear in what is parsed."""
        add_engine_flags(parser)
        return parser


AsyncEngineArgs = EngineArgs


class ProfilerConfig:
    """Where LLM.stop_profile writes its trace; what else it says has no meaning here."""

    def __init__(self, torch_profiler_dir: str = "", **_: Any) -> None:
        self.torch_profiler_dir = torch_profiler_dir


class ModelRegistry:
    """Models of others are installed, not registered."""

    @staticmethod
    def register_model(name: str, model: Any) -> None:
        raise VLLMValidationError(
            f"ModelRegistry.register_model: {name}: a package offers its models under the entry point quire.models "
            "(docs/adding-a-model.md)."
        )


def _main() -> None:
    usage = "usage: python -m quire.vllm SCRIPT [ARGUMENTS]"
    if len(sys.argv) < 2:
        raise SystemExit(usage)
    if not os.path.exists(sys.argv[1]):
        raise SystemExit(f"{sys.argv[1]}: there is no such file. {usage}")
    import runpy

    # the module by its own name: this one is called __main__
    import quire.vllm
    from quire.interfaces.compat.vllm_modules import stand_in

    stand_in(quire.vllm)
    del sys.argv[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except UserError as error:
        raise SystemExit(f"{sys.argv[0]}: {error}") from None
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        raise SystemExit(f"{sys.argv[0]}: {error.msg}: quire.vllm has nothing of this name.") from None


if __name__ == "__main__":
    _main()
