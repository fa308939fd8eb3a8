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

from quire.messages import EngineRequest, SchedulerOutput, StepOutput, decode_to_client, encode
from quire.sampling_params import SamplingParams
from quire.testing.checking_executor import CheckingExecutor
from quire.testing.core import CoreUnderTest


class InstantExecutor(CheckingExecutor):
    """Every row samples token 7, at once."""

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        tokens = np.full(len(output.rows), 7, dtype=np.int64)
        future.set_result(StepOutput(step=output.step, rows=output.rows, token_ids=tokens))
        return future


def microseconds_per_step(num_sequences: int, num_steps: int) -> float:
    """Steady decode: everybody runs, nobody comes or goes."""
    length = num_steps + 40
    core = CoreUnderTest(
        num_blocks=num_sequences * (length // 16 + 2),
        block_size=16,
        budget=num_sequences * 16,
        max_num_seqs=num_sequences,
        max_model_len=length,
    ).core
    core.executor = InstantExecutor([], 1, 16)
    core._check_invariants = False
    sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
    for number in range(num_sequences):
        # Prompts of different lengths, so that blocks fill up in different steps, as they do in life.
        prompt = [number % 50] * (number % 16 + 1)
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    for _ in range(3):
        core.step()
    start = time.process_time()
    for _ in range(num_steps):
        decode_to_client(encode(core.step()))
    return (time.process_time() - start) / num_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    results = {}
    for count in (1, 64, 256, 1024):
        results[count] = sorted(microseconds_per_step(count, steps) for _ in range(3))[1]
        print(f"{count:>5} sequences  {results[count]:8.0f} us a step  {results[count] / count:6.2f} us a token")
    print(json.dumps({"steady_decode_us_per_step": results}))


if __name__ == "__main__":
    main()
