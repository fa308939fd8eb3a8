"""Random workloads for a core on the simulated executor. A seed decides everything: sizes, options, what arrives when.

    python -m quire.testing.soak --seed 17        runs one of them

Pools are so small that requests are in each other's way all the time, and few different tokens begin the prompts, so
that they share.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.messages import DecodingSpec, EngineRequest, KVTransfer, Media, Tenancy
from quire.sampling_params import SamplingParams
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import FULL
from quire.testing.simulator.checked_core import CheckedCore
from quire.testing.simulator.checking_model import END_TOKEN, expected_tokens
from quire.testing.simulator.engine_settings import EngineSettings, random_engine
from quire.testing.simulator.mishaps import Mishaps

VOCAB = 50
_MOST_REQUESTS = 8
_HANDLES = ["a", "b", "c", "d"]
_KEYS = ["k", "l", "m"]
_SALTS = ["", "", "", "blue"]
_TENANTS = [None, Tenancy(name="red"), Tenancy(name="red"), Tenancy(name="green", weight=2.0)]


@dataclass(frozen=True)
class Sizes:
    """Of one workload. Lengths follow from how many tokens the pool holds."""

    block_size: int
    num_tokens: int
    windows: tuple[int, ...]
    budget: int
    max_num_seqs: int
    prefix_caching: bool
    preemption_mode: str
    host_share: float
    # windows do not slide
    is_chunked: bool = False
    # blocks of a state, and how many of them there is room for beside the tokens
    num_state_blocks: int = 0
    num_states: int = 0
    checkpoint_interval: int = 8
    checkpoint_share: float = 0.5

    @property
    def num_blocks_a_group(self) -> int:
        return max(2, self.num_tokens // self.block_size)

    @property
    def num_blocks(self) -> int:
        return self.num_blocks_a_group * len(self.windows) + self.num_state_blocks * self.num_states

    @property
    def max_model_len(self) -> int:
        return min(48, self.num_tokens)

    @property
    def groups(self) -> list[KVGroup]:
        if self.windows == (0,) and not self.num_state_blocks:
            return [FULL]
        groups = [
            KVGroup((f"layer{i}",), window, self.is_chunked and window > 0) for i, window in enumerate(self.windows)
        ]
        if self.num_state_blocks:
            groups.append(KVGroup(("states",), num_state_blocks=self.num_state_blocks))
        return groups


def random_sizes(pick: random.Random) -> Sizes:
    block_size = pick.choice([1, 2, 4, 4, 16])
    return Sizes(
        block_size=block_size,
        num_tokens=pick.choice([12, 24, 36, 48, 64]) * (2 if block_size == 16 else 1),
        windows=pick.choice([(0,), (0,), (0,), (5,), (0, 7), (9, 0, 9)]),
        budget=pick.choice([1, 3, 8, 17, 64]),
        max_num_seqs=pick.choice([2, 4, 9]),
        prefix_caching=pick.random() < 0.7,
        preemption_mode=pick.choice(["recompute", "swap", "swap", "auto"]),
        host_share=pick.choice([0.0, 0.3, 1.0, 1.0]),
    )


def with_states(sizes: Sizes, pick: random.Random) -> Sizes:
    """A hybrid, mostly; some have no attention at all. Draws of its own: what was found before is found again."""
    if pick.random() < 0.5:
        return sizes
    return replace(
        sizes,
        windows=() if pick.random() < 0.2 else sizes.windows,
        num_state_blocks=pick.choice([1, 2, 3]),
        num_states=pick.choice([1, 2, 4, 8]),
        checkpoint_interval=pick.choice([1, 4, 12, 1000]),
        checkpoint_share=pick.choice([0.0, 0.3, 0.3, 1.0]),
    )


class Workload:
    """Adds, extends, gives up, keeps, pins and fails at random, a step at a time."""

    def __init__(
        self,
        seed: int,
        policy: SchedulingPolicy | None = None,
        engine: EngineSettings | None = None,
        *,
        has_mishaps: bool = False,
        has_late_rows: bool = False,
        is_chunked: bool = False,
        has_states: bool = False,
        has_ranges: bool = False,
        has_bursts: bool = False,
    ) -> None:
        """The engine's settings are drawn as well, unless some are given; a policy that is given is tried with them.

        `is_chunked`: what would be windows are chunks.
        """
        self.seed = seed
        self.random = random.Random(seed)
        self.sizes = sizes = replace(random_sizes(self.random), is_chunked=is_chunked)
        if has_states:
            self.sizes = sizes = with_states(sizes, random.Random(f"states of {seed}"))
        self.engine = engine or random_engine(seed)
        pick = self.random
        self.core = self.engine.core(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            budget=sizes.budget,
            max_num_seqs=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            groups=sizes.groups,
            prefix_caching=sizes.prefix_caching,
            num_host_blocks=int(sizes.num_blocks * sizes.host_share),
            preemption_mode=sizes.preemption_mode,
            # sometimes swapping is cheap, sometimes dear: `auto` has something to choose
            costs=LinearCosts(per_swapped_block=pick.choice([1e-6, 1e-4])),
            vocab_size=VOCAB,
            policy=policy,
            checkpoint_interval=sizes.checkpoint_interval,
            checkpoint_share=sizes.checkpoint_share,
        )
        self.checked = CheckedCore(self.core)
        self._num_requests = 0
        self._stored: dict[str, list[int]] = {}
        self._stems = [[pick.randrange(VOCAB) for _ in range(48)] for _ in range(2)]
        # how busy it is, what is asked for most, and which events there are besides
        self._arrival_rate = pick.choice([0.1, 0.3, 0.6])
        self._kinds = pick.choice([["one"], ["one", "several"], ["one", "beams"], ["one", "one", "several", "beams"]])
        self._handle_rate = pick.choice([0.0, 0.15, 0.15, 0.6])
        self._pin_rate = pick.choice([0.0, 0.0, 0.1]) if sizes.prefix_caching and self._handle_rate else 0.0
        if sizes.num_state_blocks and sizes.prefix_caching and self._handle_rate:
            self._pin_rate = max(self._pin_rate, random.Random(f"pins of {seed}").choice([0.0, 0.2]))
        # whose a request is changes nothing of what is drawn; tenants evict each other's
        self._tenants = random.Random(f"tenants of {seed}") if self.engine.tenant_cache_share is not None else None
        # tokens that are computed in one step
        self._ranges = random.Random(f"ranges of {seed}") if has_ranges else None
        unlucky = random.Random(f"mishaps of {seed}")
        by_chance = random.Random(f"late rows of {seed}")
        if has_late_rows and by_chance.random() < 0.3:
            self.core.executor.lateness.share = by_chance.choice([0.05, 0.3, 0.8])
        by_chance = random.Random(f"bursts of {seed}")
        if has_bursts and not sizes.num_state_blocks and not self.engine.most_drafts and by_chance.random() < 0.5:
            self.core.scheduler.most_tokens = 32
            # in a workload somebody waits nearly always; that they wait a little longer is no mistake
            setattr(self.core.scheduler, "has_others", lambda rows: False)  # noqa: B010
            self.core.executor.bursts.share = by_chance.choice([0.05, 0.5, 1.0])
        self._mishaps = Mishaps(self.checked, unlucky) if has_mishaps and unlucky.random() < 0.25 else None
        events = [self._abort, self._abort_and_reuse, self._handle_kept, self._fail]
        self._events: list[Callable[[], None]] = pick.sample(events, pick.randrange(len(events) + 1))

    # ------------------------------------------------------------------------------------------ running

    def step(self) -> list[int]:
        """Perhaps something happens, then one step of the core. Returns whose tokens it brought."""
        self._act()
        return (self._mishaps or self.checked).step().sequence_ids.tolist()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def finish(self) -> None:
        """Everything that was begun is brought to its end, and nothing is held afterwards."""
        self.checked.drain()

    def _act(self) -> None:
        plans = self.checked.plans
        while len(plans) < _MOST_REQUESTS and self.random.random() < self._arrival_rate:
            self._add()
        if self._events and self.random.random() < 0.06:
            self.random.choice(self._events)()
        if self.random.random() < self._pin_rate:
            self._pin()
        open_plans = [number for number, plan in plans.items() if plan.is_open]
        if open_plans and self.random.random() < 0.3:
            self._extend(self.random.choice(open_plans))

    # ------------------------------------------------------------------------------------------ arrivals

    def _add(self, number: int | None = None) -> None:
        pick = self.random
        if number is None:
            number = self._num_requests
            self._num_requests += 1
        continues = self._handle_to_continue() if pick.random() < self._handle_rate else None
        kind = pick.choice(self._kinds)
        count = 1 if kind == "one" else pick.randrange(2, 7 if kind == "beams" else 5)
        # Mostly it fits, even if nothing is shared; some must be refused.
        if pick.random() < 0.95:
            count = min(count, self.core.rows.num_rows, self.sizes.num_blocks_a_group)
            if self.sizes.num_state_blocks:
                count = min(count, self.sizes.num_states)
        share = self.sizes.num_blocks_a_group // count * self.sizes.block_size
        if self._pin_rate:
            share = max(2, share // 2)  # room for what is pinned
        room = min(self.sizes.max_model_len, share + pick.choice([-4, -2, 0, 0, 0, 2]))
        room = max(2, room - len(self.checked.kept.tokens_of(continues) or []))
        max_tokens = pick.randrange(1, max(2, room // 2))
        prompt = self._prompt(pick.randrange(1, max(2, room - max_tokens)))
        if self.sizes.num_state_blocks and pick.random() < 0.4:
            prompt = self._turn(room - 1) or prompt
            max_tokens = max(1, min(max_tokens, room - len(prompt)))
        num_sent = pick.randrange(len(prompt) + 1) if pick.random() < 0.15 else len(prompt)
        request = EngineRequest(
            request_id=number,
            prompt_token_ids=prompt[:num_sent],
            seed=pick.randrange(1000),
            eos_token_ids=pick.choice([[], [END_TOKEN], [END_TOKEN, 2]]),
            priority=pick.choice(self.engine.priorities),
            cache_salt=pick.choice(_SALTS),
            is_final=num_sent == len(prompt) and pick.random() < 0.95,
            continues=continues,
            tenant=self._tenants.choice(_TENANTS) if self._tenants is not None else None,
            **self._asked(kind, count, max_tokens),
        )
        if self.core.store is not None and continues is None and pick.random() < 0.6:
            self._transfer(request, room)
        if (
            self._ranges is not None
            and request.is_final
            and not (request.continues or request.keep or request.transfer)
        ):
            request.media = self._some_ranges(self._ranges, len(request.prompt_token_ids))
        self.checked.add(request, prompt[num_sent:])

    def _some_ranges(self, pick: random.Random, num_tokens: int) -> list[Media]:
        """None, one or several, of two contents. They fit into a step."""
        media: list[Media] = []
        most = min(12, self.sizes.budget, self.engine.long_prefill_threshold or self.sizes.budget)
        start = pick.choice([0, 1, 3, 6])
        while start < num_tokens and pick.random() < 0.7:
            length = min(pick.randrange(1, most + 1), num_tokens - start)
            media.append(_whole_range(start, length, bytes([pick.randrange(2)])))
            start += length + pick.choice([0, 1, 4])
        return media

    def _transfer(self, request: EngineRequest, room: int) -> None:
        """The prompt is stored for others, or is one that was, with tokens of its output or without."""
        pick = self.random
        if not self._stored or pick.random() < 0.4:
            key = pick.choice(_KEYS)
            request.transfer = KVTransfer(store=key)
            self._stored[key] = request.prompt_token_ids
            return
        key = pick.choice(sorted(self._stored))
        sampling = request.sampling
        if pick.random() < 0.8:  # else others' tokens lie there, or have been replaced
            most = max(1, room - (sampling.max_tokens or 1))
            request.prompt_token_ids = self._stored[key][:most] or request.prompt_token_ids
        tokens = request.prompt_token_ids
        request.transfer = KVTransfer(fetch=key, num_fetch_tokens=max(1, len(tokens) - pick.choice([0, 0, 0, 1, 3])))
        may_go_on = request.is_final and request.decoding is None and sampling.n == 1
        num_given = pick.randrange(3) if may_go_on else 0
        if tokens and num_given < (sampling.max_tokens or 1):
            given = expected_tokens(
                tokens, num_given, vocab_size=VOCAB, seed=request.seed, is_greedy=sampling.is_greedy
            )
            if not {END_TOKEN, *request.eos_token_ids, *sampling.stop_token_ids} & set(given):
                request.prompt_token_ids = [*tokens, *given]
                request.transfer.num_output_tokens = num_given

    def _handle_to_continue(self) -> str | None:
        """One that leaves room for more; now and then one that may not be there."""
        half = self.sizes.max_model_len // 2
        kept = self.checked.kept.by_handle
        if self.random.random() < 0.05:
            return self.random.choice(_HANDLES)
        fitting = [one for one in kept if len(kept[one].tokens) <= half]
        return self.random.choice(fitting) if fitting else None

    def _prompt(self, length: int) -> list[int]:
        """One of few beginnings (also what another request has asked and got), and mostly an end of its own."""
        pinned = [plan.tokens for plan in self.checked.kept.by_handle.values() if plan.is_pinned]
        stem = self.random.choice([*self._stems, *self.checked.recent, *pinned])[:length]
        length = min(length, len(stem) + 8)
        own = max(length - len(stem), min(length, self.random.choice([0, 1, 3, 8])))
        return stem[: length - own] + [self.random.randrange(VOCAB) for _ in range(own)]

    def _turn(self, most: int) -> list[int]:
        """All that another request has asked and got, or a pinned prefix, and a token more; nothing if that is too
        long."""
        pinned = [plan.tokens for plan in self.checked.kept.by_handle.values() if plan.is_pinned]
        said = [tokens for tokens in [*self.checked.recent, *pinned] if len(tokens) < most]
        if not said:
            return []
        tokens = self.random.choice(said)
        # now and then it parts from what was said at the last token
        num_same = len(tokens) - self.random.choice([0, 0, 1])
        return [*tokens[:num_same], self.random.randrange(VOCAB)]

    def _asked(self, kind: str, count: int, max_tokens: int) -> dict[str, Any]:
        """One sequence, several, or beams; and whether it is kept."""
        pick = self.random
        sampling: dict[str, Any] = {
            "n": count if kind != "beams" else pick.randrange(1, count + 1),
            "max_tokens": max_tokens,
            "temperature": pick.choice([0.0, 1.0]),
            "ignore_eos": pick.random() < 0.3,
            "stop_token_ids": pick.choice([[], [3], [3, 4]]),
        }
        if kind == "beams":
            sampling["temperature"] = pick.choice([0.0, 1.0, 0.5])
            return {"sampling": SamplingParams(**sampling), "decoding": self._decoding(count)}
        if pick.random() < 0.2:
            sampling["min_tokens"] = pick.randrange(max_tokens + 1)
        keep = pick.choice(_HANDLES) if kind == "one" and pick.random() < 2 * self._handle_rate else None
        return {"sampling": SamplingParams(**sampling), "keep": keep}

    def _decoding(self, width: int) -> DecodingSpec:
        pick = self.random
        args: dict[str, Any] = {
            "width": width,
            "length_penalty": pick.choice([0.0, 1.0, 1.0, 2.0, -1.0]),
            "early_stopping": pick.choice([True, False, "never"]),
        }
        if width % 2 or pick.random() < 0.7:
            return DecodingSpec(method="beam_search", args=args)
        args |= {"num_groups": pick.choice([2, width]), "diversity_penalty": pick.choice([0.1, 1.0])}
        return DecodingSpec(method="diverse_beam_search", args=args)

    def _extend(self, number: int) -> None:
        left = len(self.checked.plans[number].unsent)
        count = self.random.randrange(left + 1)
        self.checked.extend(number, None if count == left and self.random.random() < 0.8 else count)

    # ------------------------------------------------------------------------------------------ events

    def _abort(self) -> None:
        """The whole request, or one of its outputs; sometimes twice, sometimes one that is long gone."""
        if not self._num_requests:
            return
        living = sorted(self.checked.plans)
        number = self.random.choice(living) if living else self.random.randrange(self._num_requests)
        index = self.random.choice([None, None, 0, 1])
        for _ in range(self.random.choice([1, 1, 2])):
            self.checked.abort(number, index)

    def _abort_and_reuse(self) -> None:
        """The same id again, before the core has said that the first one ended."""
        if self.checked.plans:
            number = self.random.choice(sorted(self.checked.plans))
            self.checked.abort(number)
            self._add(number)

    def _handle_kept(self) -> None:
        pick, kept = self.random, self.checked.kept
        handle = pick.choice(_HANDLES)
        operation = pick.choice(["fork", "rewind", "release"])
        if operation == "fork":
            kept.fork(handle, pick.choice(_HANDLES))
        elif operation == "rewind":
            kept.rewind(handle, pick.randrange(self.sizes.max_model_len))
        else:
            kept.release(handle)

    def _pin(self) -> None:
        """Something that has its blocks, or the end of one that is pinned."""
        by_handle = self.checked.kept.by_handle
        pinned = [handle for handle, plan in by_handle.items() if plan.is_pinned]
        computed = [handle for handle, plan in by_handle.items() if plan.num_computed and not plan.is_pinned]
        if self.sizes.num_state_blocks:  # which stand at their ends alone
            computed = [one for one in computed if by_handle[one].num_computed <= self.sizes.max_model_len // 2]
        if pinned and (not computed or self.random.random() < 0.5):
            self.checked.kept.release(self.random.choice(pinned))
        elif computed:
            handle = self.random.choice(computed)
            num_computed = by_handle[handle].num_computed
            most = min(num_computed + 1, self.sizes.max_model_len // 3)
            num_tokens = self.random.randrange(1, most + 1)
            is_end = self.sizes.num_state_blocks > 0 and num_tokens > 1
            self.checked.kept.pin(handle, num_computed if is_end else num_tokens)

    def _fail(self) -> None:
        self.checked.fail_row(self.random.randrange(16))


def _whole_range(start: int, length: int, name: bytes) -> Media:
    return Media(
        start=start,
        length=length,
        pixels=b"",
        shape=[0],
        mean=[],
        std=[],
        grid=[1, 1, length],
        merge_size=1,
        content_hash=name,
        is_whole=True,
    )


def check_policy(policy: SchedulingPolicy, *, num_seeds: int = 6, num_steps: int = 150) -> None:
    """The contract of a policy: nobody is lost, nothing leaks, tokens do not depend on the order, runs repeat.

    The core checks after every step that the budget is kept and that blocks, rows and queues are consistent.
    """
    for seed in range(num_seeds):
        logs = []
        for _ in range(2):
            # it may keep something of its own
            workload = Workload(seed, deepcopy(policy))
            logs.append([workload.step() for _ in range(num_steps)])
            workload.finish()
        assert logs[0] == logs[1], f"seed {seed}: the same calls gave another schedule"  # I16
