"""Anonymous memory that loading a model takes, at its peak and afterwards, beyond what the imports took (Linux).

    python benchmarks/load_memory.py DIR --dtype bfloat16 [--model-impl transformers] [--load-format dummy]
                                         [--quantization int8]

Pages of mapped files are left out: the kernel takes them back when memory is short. The peak is sampled every 3 ms.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path

from quire.testing.model_harness import worker_config
from quire.worker.model_loader import load_model

_INTERVAL_S = 0.003


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Peak(threading.Thread):
    """Watches until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_bytes = 0
        self.is_done = threading.Event()

    def run(self) -> None:
        while not self.is_done.wait(_INTERVAL_S):
            self.num_bytes = max(self.num_bytes, anonymous_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model-impl", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default=None)
    arguments = parser.parse_args()
    if arguments.model_impl == "transformers":
        import quire.worker.models.transformers_fallback  # noqa: F401 - its imports are not the model's memory
    names = ("dtype", "model_impl", "load_format", "quantization")
    options = {name: getattr(arguments, name) for name in names}
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    model = load_model(worker_config(arguments.path, max_model_len=64, **options))
    after = anonymous_bytes()
    peak.is_done.set()
    peak.join()
    figures = {"peak_mb": max(peak.num_bytes, after) - before, "after_mb": after - before}
    print(json.dumps({"model": type(model).__name__, **{key: round(value / 1e6) for key, value in figures.items()}}))


if __name__ == "__main__":
    main()
