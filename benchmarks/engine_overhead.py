"""What the engine costs beside the model: microseconds a step with an executor that answers at once.

    python benchmarks/engine_overhead.py [--steps 300]

Real scheduler, KV cache manager and messages: schedule, update, encoding of the step's outputs and decoding in the
client. CPU time of the process, so that other work on the machine matters less. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import Future

import numpy as np

from quire.engine_core.executor.simulated import SimulatedExecutor
from quire.messages import EngineRequest, SchedulerOutput, StepOutput, decode_to_client, encode
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest


class InstantExecutor(SimulatedExecutor):
    """Every row samples token 7, at once."""

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        tokens = np.full(len(output.rows), 7, dtype=np.int64)
        future.set_result(StepOutput(step=output.step, rows=output.rows, token_ids=tokens))
        return future


PHASES = ("schedule", "update", "encode", "decode")


def microseconds_per_step(num_sequences: int, num_steps: int) -> dict[str, float]:
    """Steady decode: everybody runs, nobody comes or goes. CPU time by phase."""
    length = num_steps + 40
    core = CoreUnderTest(
        num_blocks=num_sequences * (length // 16 + 2),
        block_size=16,
        budget=num_sequences * 16,
        max_num_seqs=num_sequences,
        max_model_len=length,
    ).core
    scheduler, executor = core.scheduler, InstantExecutor([], 1, 16)
    sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
    for number in range(num_sequences):
        # Prompts of different lengths, so that blocks fill up in different steps, as they do in life.
        prompt = [number % 50] * (number % 16 + 1)
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    spent = dict.fromkeys(PHASES, 0.0)
    for step in range(num_steps + 3):
        if step == 3:  # the first steps compute prompts
            spent = dict.fromkeys(PHASES, 0.0)
        start = time.process_time()
        decision = scheduler.schedule()
        assert decision is not None
        scheduled = time.process_time()
        result = executor.execute(decision).result()
        executed = time.process_time()
        outputs = scheduler.update_from_output(result)
        updated = time.process_time()
        message = encode(outputs)
        encoded = time.process_time()
        decode_to_client(message)
        times = (scheduled - start, updated - executed, encoded - updated, time.process_time() - encoded)
        for phase, seconds in zip(PHASES, times, strict=True):
            spent[phase] += seconds
    return {phase: seconds / num_steps * 1e6 for phase, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    results = {}
    print("sequences   " + "".join(f"{phase:>10}" for phase in PHASES) + "       sum   a token   (us)")
    for count in (1, 64, 256, 1024):
        runs = [microseconds_per_step(count, steps) for _ in range(3)]
        results[count] = sorted(runs, key=lambda run: sum(run.values()))[1]
        total = sum(results[count].values())
        phases = "".join(f"{value:>10.0f}" for value in results[count].values())
        print(f"{count:>9}   {phases}{total:>10.0f}{total / count:>10.2f}")
    print(json.dumps({"steady_decode_us_per_step": results}))


if __name__ == "__main__":
    main()
