"""`quire bench steps`: what steps of all sizes take on this machine, as a device for `quire simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.config import EngineOptions, resolve
from quire.errors import OptionError
from quire.interfaces.cli.bench_flags import whole_number
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of

# a step after the other in this process, by workers that nobody shares
_FIXED = {"async_scheduling": False, "recorder_bytes": 0, "engine_process": False}


class Steps:
    """One of the workloads of `quire bench`."""

    description = "time steps of all sizes and write them to a file, for quire simulate --device FILE"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [MODEL] [options]"
        add_model_argument(parser)
        group = parser.add_argument_group("measuring")
        group.add_argument("--output", default="steps.json", metavar="FILE", help="(default: steps.json)")
        group.add_argument("--rounds", default="40", metavar="N", help="rounds of requests (default: 40)")
        group.add_argument("--seed", default="0", metavar="N", help="seed of the requests (default: 0)")
        add_engine_flags(parser, leave_out=("seed", *_FIXED))

    def run(self, arguments: argparse.Namespace) -> int:
        # imported here: a simulation is read for this workload alone
        from quire.simulation.measured import MeasuredSteps, load_to_measure
        from quire.simulation.recorded_run import record

        num_rounds = whole_number("--rounds", arguments.rounds, 1)
        seed = whole_number("--seed", arguments.seed, 0)
        options = {name: value for name, value in engine_options_of(arguments).items() if name != "seed"}
        config, _ = resolve(EngineOptions(**{**options, **_FIXED}))
        if config.worker.grid.size > 1 or config.data_parallel_size > 1:
            raise OptionError("bench steps: measures one worker. Leave out parallel sizes.")
        run = record(config, load_to_measure(config, num_rounds, seed))
        MeasuredSteps.of(run, config).write(Path(arguments.output))
        print(f"{len(run.seconds):,} steps in {sum(run.seconds):.1f} s, written to {arguments.output}")
        return 0


STEPS = Steps()
