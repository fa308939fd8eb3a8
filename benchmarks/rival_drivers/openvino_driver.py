"""OpenVINO GenAI: its continuous batching pipeline, stepped by hand, so that tokens are seen as they come."""

from __future__ import annotations

from typing import Any

from protocol import Recorder, Request, serve

_CACHE_GB = 2


def load(settings: dict[str, Any]) -> Any:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = settings.get("cache_gb", _CACHE_GB)
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 2048
    # the type of the KV cache stays OpenVINO's own choice, 8 bits, unless it is asked for
    properties = {"INFERENCE_NUM_THREADS": settings["threads"], **settings.get("options", {})}
    pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
    number = 0

    def generate(request: Request) -> Recorder:
        nonlocal number
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request.prompts]
        configs = [_config(genai, request, length) for length in request.output_lengths]
        recorder = Recorder(len(ids))
        handles = []
        for tokens, config in zip(ids, configs, strict=True):
            handles.append(pipeline.add_request(number, tokens, config))
            number += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    recorder.add(index, sum(len(one.generated_ids) for one in handle.read().values()))
        return recorder

    return generate, {"version": f"OpenVINO GenAI {genai.__version__}", "settings": properties}


def _config(genai: Any, request: Request, length: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = length
    config.ignore_eos = True
    if request.num_answers > 1:
        config.do_sample, config.num_return_sequences = True, request.num_answers
        config.temperature, config.top_k, config.top_p = 1.0, 2**31 - 1, 1.0
        config.rng_seed = 0
    if request.beam_width:
        config.num_beams = config.num_return_sequences = request.beam_width
    return config


if __name__ == "__main__":
    serve(load)
