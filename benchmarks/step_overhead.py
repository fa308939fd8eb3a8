"""Microseconds per step of a worker for everything but the model: differences, inputs, sampler, rows.

    python benchmarks/step_overhead.py [--rows 1 64 256 1024] [--steps 500]

The model is a table look-up over a small vocabulary, so its share is subtracted by measuring it alone. Decode steps:
every row computes one token and needs a new block once in 16 steps, as in a long run. Time is the processor's, so that
a busy machine disturbs it less. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from quire.messages import AdmittedSequence, SchedulerOutput, int_array
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel
from quire.testing.model_harness import worker_config
from quire.worker.worker import Worker

BLOCK_SIZE = 16
PROMPT = 64
VOCAB_SIZE = 128
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "top_k, top_p": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "logprobs=5": SamplingParams(temperature=0.0, logprobs=5),
}


def started_worker(model, num_rows, max_model_len):
    config = worker_config(
        "none", max_num_seqs=num_rows, max_model_len=max_model_len, block_size=BLOCK_SIZE, max_num_batched_tokens=2048
    )
    worker = Worker(config, model_loader=lambda config: model)
    worker.load()
    # One group of block tables without layers: tables and slots are gathered as for a real model.
    worker.initialize_cache([[]], 1 << 20)
    return worker


def decode_steps(num_rows, num_steps, sampling):
    """Median time of a decode step with all rows, and of the model's share of it, in microseconds."""
    model = FakeModel.random(VOCAB_SIZE)
    worker = started_worker(model, num_rows, PROMPT + num_steps + 8)
    rows = np.arange(num_rows)
    prompt = int_array(np.arange(PROMPT) % VOCAB_SIZE)
    admitted = [
        AdmittedSequence(
            row=row,
            sequence_id=row,
            token_ids=prompt,
            num_prompt_tokens=PROMPT,
            # as after a prefix hit: all but the last token is computed. Rows need their blocks at different steps.
            num_computed_tokens=PROMPT - 1,
            sampling=sampling,
            seed=row,
        )
        for row in range(num_rows)
    ]
    worker.execute(SchedulerOutput(step=0, admitted=admitted))
    ones = np.ones(num_rows, dtype=np.int64)
    times = []
    for step in range(1, num_steps + 1):
        writers = rows[(rows + step) % BLOCK_SIZE == 0]
        writes = np.stack([0 * writers, writers, 0 * writers + 4, writers])
        scheduled = SchedulerOutput(step=step, block_writes=writes, rows=rows, num_tokens=ones)
        start = time.process_time()
        worker.execute(scheduled)
        times.append(time.process_time() - start)
    return 1e6 * statistics.median(times), 1e6 * model_alone(model, num_rows, num_steps)


def model_alone(model, num_rows, num_steps):
    tokens, positions = torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows)
    times = []
    with torch.inference_mode():
        for _ in range(num_steps):
            start = time.process_time()
            model.compute_logits(model(tokens, positions))
            times.append(time.process_time() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    results = {}
    print(f"{'':14}" + "".join(f"{count:>8} rows" for count in arguments.rows) + "   microseconds per step")
    for kind, sampling in KINDS.items():
        figures = {}
        for count in arguments.rows:
            whole, model = decode_steps(count, arguments.steps, sampling)
            figures[count] = round(whole - model, 1)
        results[kind] = figures
        print(f"{kind:14}" + "".join(f"{figure:13.0f}" for figure in figures.values()))
    print(json.dumps({"step_overhead_us": results, "vocab_size": VOCAB_SIZE, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
