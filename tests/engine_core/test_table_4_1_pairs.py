"""Every pair of behaviours of table 4.1 that can occur together, and that nothing in the scheduler knows their names.

A pair's workload is made of what each of the two needs (a small pool, a small budget, prompts that begin alike, ...).
CheckedCore holds every token against the model, and `Behaviours` counts the requests that have shown both.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.table_4_1 import (
    BEHAVIOURS,
    CHUNKED,
    DISAGGREGATION,
    PREEMPTION,
    PREFIX,
    SPECULATION,
    STREAMING,
    Behaviours,
)

from quire.engine_core.scheduler import scheduler
from quire.kv_connectors.memory.store import PrefixStore
from quire.messages import EngineRequest, KVTransfer
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checked_core import CheckedCore
from quire.testing.simulator.executor import SimulatedDrafts

PAIRS = list(itertools.combinations(BEHAVIOURS, 2))
NUM_REQUESTS = 12
STEM = list(range(10, 18))


def options_for(pair: tuple[str, str]) -> dict[str, Any]:
    """What the engine must be like for both to happen."""
    options: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_model_len": 40, "max_num_seqs": 8}
    if PREEMPTION in pair:
        options["num_blocks"] = 20
    if CHUNKED in pair:
        options["budget"] = 10
    if SPECULATION in pair:
        options |= {"num_drafts": 3, "drafts": SimulatedDrafts(acceptance=0.7, shortfall=0.1)}
    options["prefix_caching"] = PREFIX in pair
    return options


def requests_for(pair: tuple[str, str]) -> Iterator[tuple[EngineRequest, list[int]]]:
    """Requests, and what of their prompts comes later."""
    for number in range(NUM_REQUESTS):
        own = [number + 20, *range(30, 30 + number * 5 % 9)]
        begins_alike = PREFIX in pair and number % 4 > 0
        prompt = [*STEM, *own] if begins_alike else own if number % 4 == 0 else [*own, *STEM]
        num_sent = 1 + 3 * begins_alike if STREAMING in pair and number % 3 < 2 else len(prompt)
        yield (
            EngineRequest(
                request_id=number,
                prompt_token_ids=prompt[:num_sent],
                sampling=SamplingParams(temperature=1.0, max_tokens=16),
                seed=number,
                is_final=num_sent == len(prompt),
            ),
            prompt[num_sent:],
        )


def cases() -> Iterator[Any]:
    """Who gives way may do so in two ways."""
    for pair in PAIRS:
        for mode in ["recompute", "swap"] if PREEMPTION in pair else ["recompute"]:
            yield pytest.param(pair, mode, id=f"{' and '.join(pair)} ({mode})")


def handed_over(
    pair: tuple[str, str], requests: Iterator[tuple[EngineRequest, list[int]]], store: PrefixStore
) -> Iterator[tuple[EngineRequest, list[int]]]:
    """Another core computes some of the prompts and samples their first tokens."""
    for request, rest in requests:
        if not rest and (request.request_id % 2 == 0 or STREAMING in pair):
            prompt, key = request.prompt_token_ids, str(request.request_id)
            other = CoreUnderTest(store=store, block_size=4)
            fields = {"transfer": KVTransfer(store=key)}
            other.add(1, prompt, seed=request.seed, temperature=1.0, max_tokens=1, request=fields)
            other.run()
            request.prompt_token_ids = [*prompt, *other.tokens[1 << 10]]
            # of a prompt that was not computed whole the rest is left for this core
            length = len(prompt) if CHUNKED not in pair else max(1, len(prompt) // 3)
            request.transfer = KVTransfer(fetch=key, num_fetch_tokens=length, num_output_tokens=1)
        yield request, rest


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("pair", "mode"), list(cases()))
def test_a_pair_occurs_together(pair: tuple[str, str], mode: str, is_async: bool) -> None:
    store = PrefixStore()
    core = CoreUnderTest(is_async=is_async, preemption_mode=mode, num_host_blocks=60, store=store, **options_for(pair))
    shown = Behaviours(core)
    checked = CheckedCore(core)
    requests = requests_for(pair)
    if DISAGGREGATION in pair:
        requests = handed_over(pair, requests, store)
    for step in itertools.count():
        for arrival in itertools.islice(requests, 2 if step % 4 == 1 else 0):
            checked.add(*arrival)
        for number in [number for number, plan in checked.plans.items() if plan.is_open]:
            if step % 6 == 5:
                left = len(checked.plans[number].unsent)
                checked.extend(number, left // 2 if left > 4 else None)
        checked.step()
        if step > 4 * NUM_REQUESTS and not checked.plans:
            break
    checked.drain()
    assert shown.count(*pair) >= 2, shown.by_request


# ---- no names


WORDS = re.compile(r"prefill|decode|chunk|stream|prefix|disagg|specul|draft|eagle|ngram")
DECIDING = ["scheduler.py", "admission_control.py"]


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """What branches: if, while, conditional expressions and comprehensions, and what is matched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject


@pytest.mark.parametrize("name", DECIDING)
def test_no_branch_of_the_scheduler_names_a_behaviour(name: str) -> None:
    path = Path(inspect.getfile(scheduler)).parent / name
    named = [
        f"{name}:{condition.lineno}: {text}"
        for condition in conditions(ast.parse(path.read_text(encoding="utf-8")))
        if WORDS.search(text := ast.unparse(condition).lower())
    ]
    assert named == []


def test_the_search_for_names_finds_them() -> None:
    tree = ast.parse("if self.is_prefill:\n    pass\nx = [1 for row in rows if row.num_drafts]")
    assert sum(bool(WORDS.search(ast.unparse(one))) for one in conditions(tree)) == 2
