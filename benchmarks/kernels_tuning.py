"""What each choice of the CPU kernels' tunable numbers is worth on this processor, against the default.

    python benchmarks/kernels_tuning.py --isas amx,avx2 --seconds 12
    python benchmarks/kernels_tuning.py --only fetch_bytes,panels --threads 2

The measurement of the first start (`worker/kernels/cpu/tuning.py`) with more time. Choices take turns in one process; a
number is measured with what was chosen for those before it. With one thread it is processor time, which other work on
the machine changes less.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["QUIRE_CPU_TUNING"] = "off"

import torch

from quire.worker.kernels import cpu
from quire.worker.kernels.cpu import library, tuning


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each instruction set")
    parser.add_argument("--isas", default="", help="with commas between them; none: the best")
    parser.add_argument("--only", default="", help="beginnings of names, with commas between them; none: all")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    knobs = tuning.LibraryKnobs(library.loaded())
    for isa in (arguments.isas or cpu.statistics()["isa"]).split(","):
        if not cpu.select_isa(isa):
            print(f"{isa}: not on this processor")
            continue
        tuning.set_defaults(knobs)
        only = tuple(arguments.only.split(","))
        probes = {name: make for name, make in tuning.Probes().by_name().items() if name.startswith(only)}
        clock = time.process_time if arguments.threads == 1 else time.perf_counter
        with torch.inference_mode():
            chosen = tuning.tune(knobs, probes, clock, arguments.seconds)
        for name, choice in chosen.items():
            ratios = "  ".join(f"{value}: {a:.3f} ({b:.3f} to {c:.3f})" for value, (a, b, c) in choice.ratios.items())
            print(f"{isa:>12} {name:<20} {choice.value:>8}  {ratios or 'not measured'}", flush=True)


if __name__ == "__main__":
    main()
