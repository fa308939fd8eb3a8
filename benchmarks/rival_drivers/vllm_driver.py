"""vLLM on CPUs: its engine stepped by hand, so that tokens are seen as they come; beam search by its own function."""

from __future__ import annotations

import time
from typing import Any

from protocol import Recorder, Request, serve


def load(settings: dict[str, Any]) -> Any:
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import BeamSearchParams, RequestOutputKind

    engine = LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=settings["max_length"],
        max_num_batched_tokens=max(2048, settings["max_length"]),
        max_num_seqs=64,
        enable_prefix_caching=True,
        **settings.get("options", {}),
    )
    stepped: Any = engine.llm_engine
    number = 0

    def generate(request: Request) -> Recorder:
        nonlocal number
        if request.beam_width:
            return _beams(request)
        recorder = Recorder(len(request.prompts))
        places = {}
        for index, (prompt, length) in enumerate(zip(request.prompts, request.output_lengths, strict=True)):
            is_drawn = request.num_answers > 1
            params = SamplingParams(
                n=request.num_answers,
                temperature=1.0 if is_drawn else 0.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            number += 1
            places[str(number)] = index
            stepped.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while stepped.has_unfinished_requests():
            for output in stepped.step():
                count = sum(len(answer.token_ids) for answer in output.outputs)
                recorder.add(places[output.request_id], count)
        return recorder

    def _beams(request: Request) -> Recorder:
        [prompt], [length] = request.prompts, request.output_lengths
        params = BeamSearchParams(beam_width=request.beam_width, max_tokens=length, ignore_eos=True)
        recorder = Recorder(1)
        engine.beam_search([{"prompt_token_ids": prompt}], params)
        recorder.add(0, length * request.beam_width)
        return recorder

    start = time.perf_counter()
    _warm(generate)
    facts = {
        "version": f"vLLM {vllm.__version__}",
        "settings": {"platform": type(current_platform).__name__, "warm_up_seconds": time.perf_counter() - start},
    }
    return generate, facts


def _warm(generate: Any) -> None:
    for prompt_length in (8, 128):
        generate(Request({"prompts": [[1] * prompt_length], "output_lengths": [4]}))


if __name__ == "__main__":
    # its engine runs in a process that imports this file again
    serve(load)
