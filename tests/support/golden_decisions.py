"""What the core decides in random workloads, as one digest a workload.

    python -m tests.support.golden_decisions --record      writes tests/seeds/decisions.txt anew

A change of the core that is not meant to decide anything else leaves all of them as they are. One that is meant to says
in docs/log.md which workloads changed and why that is better.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire.messages import SchedulerOutput
from quire.testing.simulator.workload import Workload

RECORDED = Path(__file__).parents[1] / "seeds" / "decisions.txt"
SEEDS = range(7_000_000, 7_000_200)
NUM_STEPS = 150


def digest_of(seed: int) -> str:
    """Of every decision, in order: who was granted what, and all that the workers were told."""
    decisions = hashlib.sha256()
    workload = Workload(seed, has_mishaps=True, has_late_rows=True)
    workload.core.executor.observers.append(lambda decided: decisions.update(_bytes_of(decided)))
    workload.run(NUM_STEPS)
    workload.finish()
    return decisions.hexdigest()[:16]


def _bytes_of(decided: SchedulerOutput) -> bytes:
    parts: list[Any] = [
        decided.step,
        [(fork.parent_row, fork.row, fork.sequence_id, fork.num_computed_tokens) for fork in decided.forked],
        decided.released,
        [(one.row, one.sequence_id, len(one.token_ids), one.num_computed_tokens) for one in decided.admitted],
        sorted(decided.progress),
        [(one.row, list(one.token_ids), one.is_final) for one in decided.appended],
        *(
            np.asarray(array).tolist()
            for array in (
                decided.block_writes,
                decided.swapped_out,
                decided.swapped_in,
                decided.block_copies,
                decided.rows,
                decided.num_tokens,
            )
        ),
    ]
    return repr(parts).encode()


def recorded() -> dict[int, str]:
    pairs = (line.split() for line in RECORDED.read_text(encoding="utf-8").splitlines())
    return {int(seed): digest for seed, digest in pairs}


def _record() -> Iterator[str]:
    for seed in SEEDS:
        yield f"{seed} {digest_of(seed)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="what is decided now becomes what is expected")
    options = parser.parse_args()
    logging.getLogger("quire").addHandler(logging.NullHandler())
    if options.record:
        RECORDED.write_text("".join(_record()), encoding="utf-8")
        return
    differ = [seed for seed, digest in recorded().items() if digest_of(seed) != digest]
    print(f"{len(differ)} of {len(SEEDS)} workloads are decided differently: {differ}")


if __name__ == "__main__":
    main()
