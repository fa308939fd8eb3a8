"""A pytest plugin under which vLLM's tests meet Quire: its server class, its runner and its package are ours.

What the tests import of `vllm` is looked up in `quire.vllm`; what is not there is an internal of vLLM, and a test that
uses it fails with InternalOfVllmError.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import quire.vllm
from conformance.vllm_models import adapter_folder, model_folder

SOURCES = Path.cwd()
# also where others use the machine
_START_SECONDS = 240.0


class InternalOfVllmError(NotImplementedError):
    """A test looks into vLLM itself."""


# ---- its package ------------------------------------------------------------------------------------------------


class _Internal:
    """Anything that only vLLM has: it may be imported and named, not used."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **values: Any) -> Any:
        raise InternalOfVllmError(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Internal(f"{self.__name__}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    def __ror__(self, other: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False


class _Answer:
    """An answer of the server as an object, in place of the classes of vLLM's protocol."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update({key: _as_object(value) for key, value in values.items()})

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        return cls(**values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _as_object(value: Any) -> Any:
    if isinstance(value, dict):
        return _Answer(**value)
    return [_as_object(one) for one in value] if isinstance(value, list) else value


class _Hub:
    def snapshot_download(self, repo_id: str, **values: Any) -> str:
        return adapter_folder(repo_id) if "lora" in repo_id.lower() or "self_cog" in repo_id else model_folder(repo_id)


class _Platform:
    device_name = "cpu"
    device_type = "cpu"

    def is_cpu(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args: False


def _open_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _get_tokenizer(name: str = "", *args: Any, **values: Any) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(model_folder(name or values["tokenizer_name"]))


class _LLM(quire.vllm.LLM):
    """By the names of models that the tests know."""

    def __init__(self, model: str, **options: Any) -> None:
        # how many beams run at once is another thing there
        if options.get("max_num_seqs") == 1:
            del options["max_num_seqs"]
        super().__init__(model_folder(model), **{"num_threads": 1, "packed_weights_cache": 0, **options})


# what tests ask of vLLM beside its public names
_HELPERS: dict[str, Any] = {
    "LLM": _LLM,
    "current_platform": _Platform(),
    "get_tokenizer": _get_tokenizer,
    "hf_api": _Hub,
    "get_open_port": _open_port,
    "EmbeddingResponse": _Answer,
    "PoolingResponse": _Answer,
    "ChatCompletionMessageParam": dict,
    "VLLM_VERSION": quire.vllm.__version__,
    "download_weights_from_hf": lambda name, *args, **values: model_folder(name),
}
# modules of its sources that need nothing of the rest
_AS_THEY_ARE = ("vllm.utils.serial_utils",)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _HELPERS:
            return _HELPERS[name]
        if hasattr(quire.vllm, name):
            return getattr(quire.vllm, name)
        return _Internal(f"{self.__name__}.{name}")


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        if name in _AS_THEY_ARE:
            return importlib.util.spec_from_file_location(name, SOURCES / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        module.__version__ = quire.vllm.__version__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Its names are looked up when they are asked for."""


# ---- its server -------------------------------------------------------------------------------------------------


class RemoteOpenAIServer:
    """`quire serve` with the arguments of vLLM's, which it has to understand itself."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        arguments: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        self.host = "127.0.0.1"
        self.uds = None
        typed = [*arguments]
        if auto_port:
            typed += ["--port", str(_open_port())]
        self.port = int(typed[typed.index("--port") + 1])
        if not any(arg in ("--served-model-name", "--served_model_name") for arg in typed):
            typed += ["--served-model-name", model]
        if "--dtype" in typed:
            typed[typed.index("--dtype") + 1] = "float32"
        _without(typed, "--gpu-memory-utilization")
        _without(typed, "--kv-cache-memory-bytes")
        if seed is not None:
            typed += ["--seed", str(seed)]
        command = [sys.executable, "-m", "quire.interfaces.cli", "serve", model_folder(model), *typed]
        command += ["--packed-weights-cache", "0", "--num-threads", "1", "--kv-cache-memory-bytes", "512MiB"]
        command += ["--storage-url", "sqlite:///:memory:"]
        command += ["--adapter-root", "/"] if "--enable-lora" in typed else []
        environment = {**os.environ, **(env_dict or {})}
        self.process = subprocess.Popen(command, env=environment)
        try:
            self._wait(max_wait_seconds or _START_SECONDS)
        except BaseException:
            self._end()
            raise

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"quire serve ended with status {self.process.returncode}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url_for("health", "ready"), timeout=5)
                return
            time.sleep(0.1)
        raise RuntimeError("quire serve is not ready")

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts if part)

    def get_client(self, **values: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._client(values))

    def get_async_client(self, **values: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._client(values))

    def get_client_anthropic(self, **values: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **self._client(values))

    def get_async_client_anthropic(self, **values: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._client(values))

    def _client(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 180, **values}


def _without(typed: list[str], flag: str) -> None:
    """Shares of a GPU say nothing about a machine that others use as well."""
    if flag in typed:
        place = typed.index(flag)
        del typed[place : place + 2]


def _unchanged(*args: Any, **values: Any) -> Any:
    """A decorator that decorates nothing, with and without brackets."""
    if len(args) == 1 and callable(args[0]) and not values:
        return args[0]
    return _unchanged


def _utils() -> types.ModuleType:
    module = types.ModuleType("tests.utils")
    module.RemoteOpenAIServer = RemoteOpenAIServer
    module.VLLM_PATH = SOURCES
    module.ROCM_EXTRA_ARGS = []
    module.create_new_process_for_each_test = _unchanged
    skipped = pytest.mark.skip(reason="needs GPUs")
    module.multi_gpu_only = lambda *args, **values: skipped
    module.requires_fp8 = skipped
    module.large_gpu_mark = lambda *args, **values: skipped
    module.multi_gpu_test = lambda *args, **values: skipped
    return module


# ---- its runner -------------------------------------------------------------------------------------------------


class VllmRunner:
    """An LLM of ours with the few methods that the tests use."""

    def __init__(self, model_name: str, tokenizer_name: str | None = None, **options: Any) -> None:
        # its own defaults, and what only its tests set
        for name in ("kernel_config", "compilation_config", "default_torch_num_threads", "gpu_memory_utilization"):
            options.pop(name, None)
        if "dtype" in options:
            options["dtype"] = "float32"
        # how many beams run at once is another thing there
        if options.get("max_num_seqs") == 1:
            del options["max_num_seqs"]
        own = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**28, "packed_weights_cache": 0, "num_threads": 1}
        self.llm = quire.vllm.LLM(model=model_folder(model_name), **{**own, **options})

    def generate(self, prompts: Any, sampling_params: Any, **values: Any) -> Any:
        answers = self.llm.generate(prompts, sampling_params, use_tqdm=False)
        return [
            (
                [[*answer.prompt_token_ids, *one.token_ids] for one in answer.outputs],
                [(answer.prompt or "") + one.text for one in answer.outputs],
            )
            for answer in answers
        ]

    def generate_w_logprobs(self, prompts: Any, sampling_params: Any, **values: Any) -> Any:
        answers = self.llm.generate(prompts, sampling_params, use_tqdm=False)
        return [
            (answer.outputs[0].token_ids, answer.outputs[0].text, answer.outputs[0].logprobs, answer.prompt_logprobs)
            for answer in answers
        ]

    def generate_greedy(self, prompts: Any, max_tokens: int, **values: Any) -> Any:
        params = quire.vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return [(ids[0], texts[0]) for ids, texts in self.generate(prompts, params)]

    def generate_beam_search(self, prompts: Any, beam_width: int, max_tokens: int, **values: Any) -> Any:
        params = quire.vllm.BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        if values.get("concurrency_limit"):
            params.ignore_eos = False
        found = self.llm.beam_search(prompts, params)
        return [([one.tokens for one in each.sequences], [one.text for one in each.sequences]) for each in found]

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.llm.shutdown()


def _up_to_the_end(tokens: list[int], start: int, ends: list[int]) -> list[int]:
    """Without the token that ends it and what fills it up."""
    last = next((place for place in range(start, len(tokens)) if tokens[place] in ends), len(tokens))
    return tokens[:last]


class HfRunner:
    """Transformers on the same folder."""

    def __init__(self, model_name: str, **options: Any) -> None:
        import torch
        import transformers

        path = model_folder(model_name)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def get_prompt_embeddings(self, prompts: list[str]) -> list[Any]:
        embed = self.model.get_input_embeddings()
        return [embed(self.tokenizer(one, return_tensors="pt").input_ids).squeeze(0).detach() for one in prompts]

    def wrap_device(self, values: Any) -> Any:
        return values

    def encode(self, prompts: list[str], *args: Any, **values: Any) -> Any:
        """Vectors of texts: the mean of what the last layer says of their tokens."""
        import torch

        found = []
        for prompt in prompts:
            ids = self.tokenizer(prompt, return_tensors="pt").input_ids
            with torch.no_grad():
                hidden = self.model.model(ids).last_hidden_state[0].mean(0)
            found.append(torch.nn.functional.normalize(hidden, dim=-1).numpy())
        return found

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def generate_beam_search(self, prompts: list[str], beam_width: int, max_tokens: int, **values: Any) -> Any:
        answers = []
        for prompt in prompts:
            ids = self.tokenizer(prompt, return_tensors="pt").input_ids
            found = self.model.generate(
                ids, num_beams=beam_width, num_return_sequences=beam_width, max_new_tokens=max_tokens, do_sample=False
            ).tolist()
            found = [_up_to_the_end(one, ids.shape[1], self.model.generation_config.eos_token_id) for one in found]
            answers.append((found, self.tokenizer.batch_decode(found, skip_special_tokens=True)))
        return answers


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    return VllmRunner


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


@pytest.fixture(scope="session")
def example_prompts() -> list[str]:
    return (SOURCES / "tests" / "prompts" / "example.txt").read_text().splitlines()


@pytest.fixture
def cleanup_fixture() -> None:
    """Nothing stays."""


def _conftest() -> types.ModuleType:
    module = types.ModuleType("tests.conftest")
    module.VllmRunner = VllmRunner
    module.HfRunner = HfRunner
    module.cleanup_dist_env_and_memory = lambda *args, **values: None
    module.LocalAssetServer = _Internal("LocalAssetServer")
    return module


sys.meta_path.insert(0, _Loader())
sys.modules["tests.utils"] = _utils()
sys.modules["tests.conftest"] = _conftest()
sys.path.insert(0, str(SOURCES))
_HELPERS["cleanup_dist_env_and_memory"] = lambda *args, **values: None


def pytest_configure(config: pytest.Config) -> None:
    import transformers

    load = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = lambda name, *args, **values: load(model_folder(str(name)))
    config_of = transformers.AutoConfig.from_pretrained
    transformers.AutoConfig.from_pretrained = lambda name, *args, **values: config_of(
        model_folder(str(name)), *args, **values
    )
    # fixtures of theirs that know nothing of vLLM
    config.pluginmanager.import_plugin("tests.entrypoints.conftest")
    config.pluginmanager.import_plugin("tests.samplers.conftest")
    config.pluginmanager.import_plugin("tests.entrypoints.openai.responses.conftest")
