"""Transformers' own `generate`: one request, or several answers and beams of one.

Batches of unequal lengths are left to engines that are made for them.
"""

from __future__ import annotations

from typing import Any

from protocol import NotSupportedError, Recorder, Request, serve


def load(settings: dict[str, Any]) -> Any:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    if settings["precision"] not in ("bf16", "float32"):
        raise NotSupportedError("Transformers has no quantised CPU kernels of its own")
    torch.set_num_threads(settings["threads"])
    dtype = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()

    class Watcher:
        """What `generate` takes for a streamer: it is given the prompt first, and then each token."""

        def __init__(self, recorder: Recorder) -> None:
            self.recorder, self.has_seen_prompt = recorder, False

        def put(self, _: Any) -> None:
            if self.has_seen_prompt:
                self.recorder.add(0)
            self.has_seen_prompt = True

        def end(self) -> None:
            return

    @torch.inference_mode()
    def generate(request: Request) -> Recorder:
        if len(request.prompts) > 1:
            raise NotSupportedError("several prompts at once")
        [length] = request.output_lengths
        how: dict[str, Any] = {"do_sample": request.num_answers > 1, "pad_token_id": 0}
        if request.num_answers > 1:
            how.update(num_return_sequences=request.num_answers, top_k=0, top_p=1.0, temperature=1.0)
        if request.beam_width:
            how.update(num_beams=request.beam_width, num_return_sequences=request.beam_width)
        ids = torch.tensor(request.prompts)
        recorder = Recorder(1)
        if request.num_answers == 1 and not request.beam_width:
            how["streamer"] = Watcher(recorder)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, **how
        )
        if "streamer" not in how:
            recorder.add(0, int(output.shape[0] * (output.shape[1] - ids.shape[1])))
        return recorder

    return generate, {"version": f"Transformers {transformers.__version__}", "settings": {"dtype": str(dtype)}}


if __name__ == "__main__":
    serve(load)
