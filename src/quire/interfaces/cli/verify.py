"""`quire verify`: whether a model answers as it should. Without a flag, whether greedy tokens are those of the
Transformers library in float32; with --bitwise, whether the served engine gives the log-probabilities of the training
forward, to the last bit, in every way in which it can compute them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.config import EMBEDDED, EngineOptions, checked, resolve
from quire.config.arithmetic import has_experts
from quire.errors import CapacityError, EngineError, OptionError
from quire.interfaces.cli.bench_flags import whole_number
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.interfaces.llm import LLM
    from quire.modeling import TrainedModel
    from quire.outputs import RequestOutput

DIFFERS = 1
_REFUSED = "refused with "
# A choice between two tokens whose logits lie closer together than this is left to rounding.
_CLOSE_CALL = 1e-3
# long enough for whole blocks, so that there is something to find in the prefix cache
_BEGINNING = (
    "Quire serves language models on ordinary machines and on large ones, and what it says does not depend on it. "
)
# tokens by which answers outgrow a cache that is too small
_GROWTH = 64
_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a printer who",
    "Q: How many pages has a quire?\nA:",
    "def add(first, second):\n    return",
    "Paper is folded, cut and sewn. The oldest books were",
    "1, 2, 3, 4, 5, 6,",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument("--bitwise", action="store_true", help="with the training forward, to the last bit")
    group.add_argument("--prompts", default=str(len(_PROMPTS)), metavar="N", help="how many (default: %(default)s)")
    group.add_argument("--max-tokens", default="32", metavar="N", help="of each answer (default: %(default)s)")
    group.add_argument("--adapter", metavar="FOLDER", help="with this adapter (LoRA); --bitwise alone")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    options = {"model": EMBEDDED, **engine_options_of(arguments)}
    num_prompts = whole_number("--prompts", arguments.prompts, 1)
    max_tokens = whole_number("--max-tokens", arguments.max_tokens, 1)
    prompts = [f"{_BEGINNING}{number}. {_PROMPTS[number % len(_PROMPTS)]}" for number in range(num_prompts)]
    if arguments.bitwise:
        rows = _bitwise(options, prompts, max_tokens, arguments.adapter)
        print(_table(("way", "tokens", "max difference"), rows))
        return DIFFERS if any(row[2] != "0.0" and not row[2].startswith(_REFUSED) for row in rows) else 0
    if arguments.adapter is not None:
        raise OptionError("--adapter: is compared bit by bit alone. Add --bitwise, or leave it out.")
    rows = _greedy({**options, "dtype": "float32"}, prompts, max_tokens)
    print(_table(("prompt", "tokens", "equal", "verdict"), rows))
    return DIFFERS if any(row[3] == "differs" for row in rows) else 0


# ---- greedy tokens ---------------------------------------------------------------------------------------------------


def _greedy(options: dict[str, Any], prompts: Sequence[str], max_tokens: int) -> list[tuple[str, ...]]:
    from quire.interfaces.llm import LLM

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with _stage("the engine answers"), LLM(**options) as llm:
        path = str(llm.config.facts.path)
        outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    with _stage("Transformers loads the model"):
        reference = _Reference(path)
    rows: list[tuple[str, ...]] = []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        with _stage(f"Transformers answers {number} of {len(prompts)}"):
            tokens = output.outputs[0].token_ids
            num_equal, margin = reference.num_equal(output.prompt_token_ids, tokens)
        verdict = "same"
        if num_equal < len(tokens):
            verdict = f"close call ({margin:.1e})" if margin < _CLOSE_CALL else "differs"
        shown = prompt.removeprefix(_BEGINNING).replace("\n", " ")[:40]
        rows.append((shown, str(len(tokens)), str(num_equal), verdict))
    return rows


class _Reference:
    """The same model in the Transformers library, in float32 and with the plainest attention."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self._model = loaded.eval()

    def num_equal(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, float]:
        """How many tokens it would choose as well, and how far its own choice lies ahead of the first other one."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        for number, (row, token) in enumerate(zip(logits[len(prompt) - 1 : -1].float(), tokens, strict=True)):
            best = int(row.argmax())
            if best != token:
                return number, float(row[best] - row[token])
        return len(tokens), 0.0


# ---- to the last bit -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """One way for the engine to compute the same: other options, or another order of requests. `proof`: the counter
    that says whether it was taken."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    one_by_one: bool = False
    repeats: int = 1
    is_prompt: bool = False
    has_few_blocks: bool = False
    proof: str | None = None


_WAYS = (
    _Way("whole", is_prompt=True),
    _Way("chunked", {"max_num_batched_tokens": 8, "max_num_seqs": 8}, is_prompt=True),
    _Way("decoded", one_by_one=True),
    _Way("batched"),
    _Way("cached", one_by_one=True, repeats=2, proof="num_prefix_hit_tokens_total"),
    _Way("preempted", {"max_num_seqs": 8}, has_few_blocks=True, proof="num_preemptions_total"),
    _Way("two ranks", {"tensor_parallel_size": 2}),
)


def _bitwise(
    options: dict[str, Any], prompts: Sequence[str], max_tokens: int, adapter: str | None
) -> list[tuple[str, ...]]:
    lora = None if adapter is None else LoRARequest("verified", 1, adapter)
    obstacle = _obstacle_to_equal_ranks(options, adapter)
    if obstacle is None:
        # sums are formed in one order, whatever the number of ranks
        options = {**options, "rank_invariant": True}
    with _stage("the training forward is loaded"):
        trained = _trained(options, adapter)
        if adapter is not None:
            options = {**options, "enable_lora": True, "max_lora_rank": trained.adapter.lora.rank}
    rows: list[tuple[str, ...]] = []
    longest = 0
    for way in _WAYS:
        own = {**options, **way.options}
        if obstacle is not None and "tensor_parallel_size" in way.options:
            rows.append((way.name, "0", _REFUSED + obstacle))
            continue
        if way.has_few_blocks:
            # too few for all answers at once, enough for one
            length = longest + _GROWTH
            num_blocks = -(-length // trained.config.block_size) + 2
            own |= {"num_gpu_blocks_override": num_blocks, "max_model_len": length}
        with _stage(way.name):
            told = _told(own, way, prompts, max_tokens + _GROWTH * way.has_few_blocks, lora)
            longest = max(longest, *(len(tokens) for tokens, _ in told))
            rows.append((way.name, *_compared(trained, told)))
    return rows


def _obstacle_to_equal_ranks(options: dict[str, Any], adapter: str | None) -> str | None:
    """What rank_invariant is refused with."""
    if adapter is not None:
        return "adapters"
    config, _ = resolve(EngineOptions(**checked(EngineOptions, options)))
    return "experts" if has_experts(config.facts.hf_config) else None


def _trained(options: dict[str, Any], adapter: str | None) -> TrainedModel:
    from quire.modeling import LoRA, load_for_training

    return load_for_training(**options, lora=None if adapter is None else LoRA.of(adapter))


def _told(
    options: dict[str, Any], way: _Way, prompts: Sequence[str], max_tokens: int, lora: LoRARequest | None
) -> list[tuple[list[int], list[float]]]:
    """What the engine says: all tokens, and the log-probabilities of the last of them."""
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    if way.is_prompt:
        sampling = sampling.replace(prompt_logprobs=0)
    batches = [[prompt] for prompt in prompts] if way.one_by_one else [list(prompts) * (1 + way.has_few_blocks)]
    with _opened(options, is_tight=way.has_few_blocks) as llm:
        answers = [
            answer
            for batch in batches * way.repeats
            for answer in llm.generate(batch, sampling, use_tqdm=False, lora_request=lora)
        ]
        if way.proof is not None and not llm.statistics()[way.proof]:
            raise EngineError(
                f"verify: no request was {way.name}, so nothing is known of it. Give longer --max-tokens."
            )
    return [_with_logprobs(answer) for answer in answers]


def _opened(options: dict[str, Any], *, is_tight: bool) -> LLM:
    """`is_tight`: with as few blocks as one request needs, which nobody knows of a model with states."""
    from quire.interfaces.llm import LLM

    while True:
        try:
            return LLM(**options)
        except CapacityError:
            if not is_tight:
                raise
            options = {**options, "num_gpu_blocks_override": options["num_gpu_blocks_override"] * 5 // 4 + 1}


def _with_logprobs(answer: RequestOutput) -> tuple[list[int], list[float]]:
    output = answer.outputs[0]
    if output.finish_reason == "error":
        raise EngineError(f"verify: a request failed: {output.stop_reason}")
    tokens = [*answer.prompt_token_ids, *output.token_ids]
    entries = [*(answer.prompt_logprobs or [])[1:], *(output.logprobs or [])]
    known = tokens[len(tokens) - len(entries) :]
    return tokens, [entry[token].logprob for entry, token in zip(entries, known, strict=True) if entry is not None]


def _compared(trained: TrainedModel, told: Sequence[tuple[list[int], list[float]]]) -> tuple[str, str]:
    """(log-probabilities, greatest difference)."""
    import torch

    num_tokens, greatest = 0, 0.0
    for tokens, logprobs in told:
        with torch.no_grad():
            (whole,) = trained.logprobs([tokens])
        expected = whole[len(whole) - len(logprobs) :].tolist()
        num_tokens += len(logprobs)
        greatest = max(greatest, *map(_difference, expected, logprobs))
    return str(num_tokens), repr(greatest)


def _difference(one: float, other: float) -> float:
    """Infinite where one of them is no number, which the greatest of several would not show."""
    if one == other:
        return 0.0
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


# ---- what is seen ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stage(what: str) -> Iterator[None]:
    """A line that the next one replaces."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"\r\033[K{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def pad(row: Sequence[str]) -> str:
        return "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()

    return "\n".join([pad(heads), *map(pad, rows)])
