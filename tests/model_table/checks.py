"""What is run for each cell of docs/models.md. A check returns nothing, or why it cannot work; what is wrong fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.support.beam_requests import assert_same_beams, beam_request
from transformers import AutoModelForCausalLM

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ModelError, OptionError, UserError
from quire.testing.beam_reference import BeamSettings, beam_search, logits_of_transformers
from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.model_harness import worker_config
from quire.testing.run_requests import run_requests
from quire.testing.tiny_adapters import make_adapter, merged_checkpoint
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint
from quire.worker.model_loader import load_model
from quire.worker.models.transformers_fallback import TransformersModel

NUM_TOKENS = 16
_LENGTHS = (5, 33, 33)
# So small that somebody must give way; a family whose layers share blocks in several groups needs more.
_SCARCE = (8, 9, 10, 11, 12, 14, 16, 20, 24, 28, 32, 36, 42, 50, 60, 96, 128)
# by what a checkpoint calls its projections
_TARGETS = (("q_proj", "v_proj"), ("in_proj", "out_proj"), ("query_key_value", "dense"), ("qkv_proj", "o_proj"),
            ("Wqkv", "out_proj"), ("c_attn", "c_proj"), ("qkv_proj", "out_proj"))  # fmt: skip


@dataclass
class Subject:
    """A tiny checkpoint, made once for all checks of a row."""

    name: str
    folder: Path

    @functools.cached_property
    def path(self) -> Path:
        return make_checkpoint(self.folder / "model", self.name)

    @functools.cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(11)
        made = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in _LENGTHS]
        made[2][:24] = made[1][:24]  # a prefix that is found
        return made

    @functools.cached_property
    def references(self) -> list[Any]:
        return [reference_generate(self.model, prompt, NUM_TOKENS) for prompt in self.prompts]

    def check(self, tokens: list[list[int]], what: str) -> None:
        for ours, reference in zip(tokens, self.references, strict=True):
            assert_same_tokens(ours, reference, f"{self.name}, {what}")


def how(subject: Subject) -> str:
    """native, Transformers, or why not."""
    try:
        model = load_model(worker_config(subject.path))
    except ModelError as error:
        return str(error)
    return "Transformers" if isinstance(model, TransformersModel) else "native"


def _core(subject: Subject, **options: Any) -> Any:
    defaults = {"max_model_len": 96, "block_size": 8, "kv_cache_memory_bytes": 2**24, "packed_weights_cache": 0}
    return real_core(subject.path, **{**defaults, **options})


def chunks(subject: Subject) -> None:
    core = _core(subject, max_num_batched_tokens=12)
    subject.check(generate_greedy(core, subject.prompts, NUM_TOKENS), "chunks")
    core.shutdown()


def prefix_cache(subject: Subject) -> None:
    core = _core(subject)
    for _ in range(2):
        subject.check(generate_greedy(core, subject.prompts, NUM_TOKENS), "prefix cache")
    assert core.statistics()["num_prefix_hit_tokens_total"] > 30
    core.shutdown()


def preemption(subject: Subject) -> str | None:
    for num_blocks in _SCARCE:
        try:
            core = _core(subject, num_gpu_blocks_override=num_blocks, max_model_len=64, kv_cache_memory_bytes=None)
        except UserError:
            continue
        subject.check(generate_greedy(core, subject.prompts, NUM_TOKENS), "preemption")
        num_preempted = core.statistics()["num_preemptions_total"]
        core.shutdown()
        if num_preempted:
            return None
    return "nobody has to give way: states do not grow"


def beams(subject: Subject) -> None:
    settings = BeamSettings(3, 6, (7,))
    prompt = subject.prompts[0]
    core = _core(subject)
    results = run_requests(core, [beam_request(0, prompt, settings)])
    assert_same_beams(
        results[0], beam_search(logits_of_transformers(subject.model), prompt, settings), settings, "beams"
    )
    core.shutdown()


def drafts(subject: Subject) -> None:
    core = _core(subject, speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    subject.check(generate_greedy(core, subject.prompts, NUM_TOKENS), "drafts")
    core.shutdown()


def lora(subject: Subject) -> None:
    names = {
        name.split(".")[-2]
        for name, tensor in load_file(subject.path / "model.safetensors").items()
        if tensor.ndim == 2 and name.endswith(".weight")
    }
    targets = next(
        (one for one in _TARGETS if names.issuperset(one)), tuple(names & {"dense", "fc_in", "c_fc", "o_proj"})
    )
    turned = {"fan_in_fan_out": True} if "c_attn" in targets and subject.name == "gpt2" else {}
    adapter = make_adapter(subject.folder / "adapter", subject.path, seed=3, targets=targets, **turned)
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 96, "packed_weights_cache": 0}
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(subject.path), enable_lora=True, **options) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in subject.prompts]
        found = llm.generate(inputs, greedy, lora_request=LoRARequest("a", 1, str(adapter)), use_tqdm=False)
    merged = merged_checkpoint(subject.folder / "merged", subject.path, adapter)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    for output, prompt in zip(found, subject.prompts, strict=True):
        reference = reference_generate(model, prompt, NUM_TOKENS)
        assert_same_tokens(output.outputs[0].token_ids, reference, f"{subject.name}, adapter")


def tensor_parallel(subject: Subject) -> None:
    core = _core(subject, tensor_parallel_size=2)
    try:
        subject.check(generate_greedy(core, subject.prompts, NUM_TOKENS), "two workers")
    finally:
        core.shutdown()


def quantisation(subject: Subject) -> None:
    """Tokens are others; that they come is what is checked, and that layers were quantised is a check of the loader."""
    core = _core(subject, quantization="int8")
    assert all(len(tokens) == NUM_TOKENS for tokens in generate_greedy(core, subject.prompts, NUM_TOKENS))
    core.shutdown()


CHECKS: dict[str, Callable[[Subject], str | None]] = {
    "chunks": chunks,
    "prefix cache": prefix_cache,
    "preemption": preemption,
    "beams": beams,
    "drafts": drafts,
    "LoRA": lora,
    "two workers": tensor_parallel,
    "int8": quantisation,
}


def run(subject: Subject, column: str) -> str:
    """`yes`, or why it cannot work."""
    try:
        return CHECKS[column](subject) or "yes"
    except (ModelError, OptionError, UserError) as error:
        return str(error)
