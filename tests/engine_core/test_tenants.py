"""Tenants in the engine: whose turn it is, and what of each other they find in the cache."""

from collections import Counter, OrderedDict
from types import SimpleNamespace

import pytest

from quire.engine_core.scheduler.tenant_shares import TenantShares
from quire.messages import AbortRequests, Tenancy
from quire.testing.core import CoreUnderTest

A, B, C = (Tenancy(name=name, cache_scope=f"secret of {name}") for name in "abc")
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def first_token_of(core: CoreUnderTest, number: int) -> int:
    """The step in which a request has its first token."""
    for step in range(5_000):
        if number << 10 in core.tokens:
            return step
        core.step()
    raise AssertionError("it never began")


# ---------------------------------------------------------------------------------------------- shares


def flooded(num_waiting: int, **limits: object) -> CoreUnderTest:
    core = CoreUnderTest(policy="two_level", budget=32, max_num_seqs=4, num_blocks=256, **limits)
    for number in range(num_waiting):
        core.add(number, [number % 50, number // 50, 3, 4], max_tokens=4, request={"tenant": A})
    return core


@pytest.mark.parametrize("is_async", [False, True])
def test_a_long_line_does_not_delay_the_first_request_of_another_tenant(is_async):
    waits = {}
    for num_waiting in (40, 1_000):
        core = flooded(num_waiting, is_async=is_async)
        for _ in range(10):
            core.step()
        core.add(10_000, PROMPT, max_tokens=2, request={"tenant": B})
        started = len(core.ends)
        waits[num_waiting] = first_token_of(core, 10_000)
        # at most the rest of one batch and most of the next one
        assert len(core.ends) - started <= 2 * 8 + 4
    assert waits[40] == waits[1_000]


def test_without_tenants_it_would_wait_for_all_of_them():
    core = flooded(200)
    core.add(10_000, PROMPT, max_tokens=2, request={"tenant": A})
    assert first_token_of(core, 10_000) > 100


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tokens_are_shared_by_weight(weight):
    core = CoreUnderTest(policy="two_level", budget=32, max_num_seqs=4, num_blocks=512)
    heavy = Tenancy(name="b", weight=weight)
    for number in range(400):
        core.add(number, [number % 50, number // 50, 3, 4], max_tokens=6, request={"tenant": A})
        core.add(1_000 + number, [number % 50, 20 + number // 50, 3], max_tokens=6, request={"tenant": heavy})
    counts: Counter[str] = Counter()
    core.executor.observers.append(
        lambda output: counts.update(
            {
                name: sum(
                    int(count)
                    for row, count in zip(output.rows, output.num_tokens, strict=True)
                    if core.rows.tenant[row] == number
                )
                for number, name in ((1, "a"), (2, "b"))
            }
        )
    )
    for _ in range(200):
        core.step()
    assert counts["b"] / counts["a"] == pytest.approx(weight, rel=0.15)


def test_one_tenant_is_scheduled_as_if_there_were_none():
    def schedule(tenant: Tenancy | None) -> list[tuple[list[int], list[int]]]:
        core = CoreUnderTest(policy="two_level", budget=16, max_num_seqs=4, num_blocks=20)
        grants: list[tuple[list[int], list[int]]] = []
        core.executor.observers.append(lambda out: grants.append((out.rows.tolist(), out.num_tokens.tolist())))
        for number in range(60):
            prompt = [number % 50, *range(number * 7 % 13)]
            core.add(number, prompt, max_tokens=1 + number % 5, request={"tenant": tenant, "priority": number % 2})
            if number % 3 == 0:
                core.step()
        core.run()
        return grants

    assert schedule(None) == schedule(Tenancy(name="only"))


def line_of(*lengths: int, arrival: int = 0) -> OrderedDict:
    requests = (SimpleNamespace(num_prompt_tokens=length, arrival=arrival + k) for k, length in enumerate(lengths))
    return OrderedDict(enumerate(requests))


def time_of(shares, name):
    """Of a tenant, at priority 0."""
    return shares._time(shares._clocks[0], shares._number_by_name[name])


def test_who_is_taken_first():
    shares = TenantShares()
    one, two = shares.enter(A), shares.enter(Tenancy(name="b", weight=2.0))
    lines = {one: line_of(10, 10, 10, 10), two: line_of(10, 10, 10, 10, arrival=100)}
    for number in lines:
        shares.begin_to_wait(number, 0)
    taken = shares.first(lines, 6, 0)
    assert [request.arrival for request in taken] == [0, 100, 101, 1, 102, 103]
    assert [request.arrival for request in shares.first({two: lines[two]}, 2, 0)] == [100, 101]


def test_time_that_was_not_used_is_not_saved_up():
    shares = TenantShares()
    one, two = shares.enter(A), shares.enter(B)
    shares.leave(two)
    shares.charge([one, one], [500, 500])
    assert shares.enter(B) == two
    shares.begin_to_wait(two, 0)
    assert time_of(shares, "b") == time_of(shares, "a") == 1000
    shares.charge([two], [7])
    # nobody waits; who comes begins where the one is who had most
    shares.nobody_waits(0)
    shares.leave(two)
    shares.begin_to_wait(shares.enter(C), 0)
    assert time_of(shares, "c") == 1000
    shares.check_invariants(2)


def test_who_comes_while_others_wait_begins_where_the_one_is_whose_turn_it_is():
    shares = TenantShares()
    one, two, three = map(shares.enter, (A, B, C))
    lines = {one: line_of(10, 10, 10), two: line_of(10, 10, 10, arrival=100)}
    for number in lines:
        shares.begin_to_wait(number, 0)
    shares.charge([one, two], [500, 1000])
    assert [request.arrival for request in shares.first(lines, 2, 0)] == [0, 1]
    shares.begin_to_wait(three, 0)
    assert time_of(shares, "c") == 500
    # all of its requests are taken, and others': it does not come back before those with whom it waited
    assert [request.arrival for request in shares.first(lines, 4, 0)] == [0, 1, 2, 100]
    assert time_of(shares, "a") == 1000
    # also where it waits alone the one whose turn it is moves the clock
    shares.charge([two], [100])
    shares.first({two: lines[two]}, 1, 0)
    shares.begin_to_wait(three, 0)
    assert time_of(shares, "c") == 1100


@pytest.mark.parametrize("holder", ["nobody", "idle", "silent", "slow"])
def test_who_only_lives_holds_nobodys_clock(holder):
    """One comes late: it has no claim to what another was granted before, whatever a third one keeps open."""
    core = CoreUnderTest(policy="two_level", budget=64, max_num_seqs=3, num_blocks=512, max_model_len=1_500)
    request = {"tenant": Tenancy(name="a")}
    if holder == "slow":
        core.add(1, PROMPT, max_tokens=1_400, request=request)
    elif holder != "nobody":
        core.add(1, PROMPT if holder == "idle" else [], max_tokens=2, is_final=False, request=request)

    def add(number: int, name: str) -> None:
        prompt = [number % 40, number // 40, *([3] * 28)]
        core.add(number, prompt, max_tokens=2, request={"tenant": Tenancy(name=name)})

    for number in range(100, 200):
        add(number, "b")
        core.step()
        core.step()
    for _ in range(60):
        core.step()
    late = range(300, 400)
    for number in late:
        add(number, "c")
    mine = range(200, 205)
    for number in mine:
        add(number, "b")
    while not all(number << 10 in core.ends for number in mine):
        core.step()
    # as many of the other's as of its own, and what one batch more has
    assert sum(number << 10 in core.ends for number in late) <= len(mine) + 8
    core.scheduler.check_invariants()


@pytest.mark.parametrize("late", ["x", "z"])
def test_each_priority_has_a_clock_of_its_own(late):
    """What is granted to more important requests puts nobody behind where they do not wait."""
    core = CoreUnderTest(policy="two_level", budget=64, max_num_seqs=3, num_blocks=512, max_model_len=600)
    numbers = iter(range(1_000, 2_000))

    def add(name: str, priority: int) -> int:
        number = next(numbers)
        prompt = [number % 40, number // 40 % 50, *([3] * 28)]
        core.add(number, prompt, max_tokens=2, request={"tenant": Tenancy(name=name), "priority": priority})
        return number << 10

    early = [add("z", 9) for _ in range(20)]
    for _ in range(60):
        for _ in range(3):
            add("a", 0)
        core.step()
    others = [add("x", 9)]
    if late == "z":  # it asks for something more important, and has waited for the rest already
        add("z", 0)
        others = [*others, *(add("x", 9) for _ in range(19))]
        early, others = others, early
    assert not any(one in core.ends for one in (*early, *others))
    while not any(one in core.ends for one in others):
        core.step()
    assert sum(one in core.ends for one in early) <= 8 + 3


@pytest.mark.parametrize("is_busy", [False, True])
def test_tenants_that_are_gone_are_forgotten(is_busy):
    shares = TenantShares()
    if is_busy:
        shares.begin_to_wait(shares.enter(A), 0)
    for number in range(2_000):
        tenant = shares.enter(Tenancy(name=str(number)))
        shares.begin_to_wait(tenant, 0)
        shares.charge([tenant], [10 + number % 7])
        shares.leave(tenant)
    assert shares.num_remembered <= 1024
    shares.check_invariants(int(is_busy))


def test_shares_are_given_back_by_whatever_ends():
    core = CoreUnderTest(policy="two_level", num_blocks=8)
    core.add(1, PROMPT, max_tokens=2, request={"tenant": A})
    core.add(2, PROMPT, max_tokens=100, request={"tenant": B})  # more than there is memory: refused
    core.add(3, PROMPT, max_tokens=4, request={"tenant": B})
    core.core.abort(AbortRequests(request_ids=[3]))
    core.run()
    core.scheduler.check_invariants()
    core.assert_empty()


# ---------------------------------------------------------------------------------------------- the prefix cache


def cached_of(core: CoreUnderTest, number: int, prompt: list[int], tenant: Tenancy | None, **request: object) -> int:
    core.add(number, prompt, max_tokens=1, request={"tenant": tenant, **request})
    core.run()
    return core.cached[number << 10]


@pytest.mark.parametrize("is_async", [False, True])
def test_no_tenant_finds_what_another_computed(is_async):
    core = CoreUnderTest(block_size=4, is_async=is_async)
    assert cached_of(core, 1, PROMPT, A) == 0
    assert cached_of(core, 2, PROMPT, B) == 0
    assert cached_of(core, 3, PROMPT, None) == 0
    assert cached_of(core, 4, PROMPT, A) == 8
    assert cached_of(core, 5, PROMPT, A, cache_salt="x") == 0
    assert cached_of(core, 6, PROMPT, None) == 8
    core.assert_empty()


def test_what_a_tenant_generated_is_found_by_its_next_turn_alone():
    core = CoreUnderTest(block_size=4)
    core.add(1, PROMPT, max_tokens=10, request={"tenant": A})
    core.run()
    conversation = [*PROMPT, *core.tokens[1 << 10], 3, 4]
    assert cached_of(core, 2, conversation, B) == 0
    assert cached_of(core, 3, conversation, A) == 16


def test_tenants_that_share_find_everything():
    core = CoreUnderTest(block_size=4)
    assert cached_of(core, 1, PROMPT, Tenancy(name="a")) == 0
    assert cached_of(core, 2, PROMPT, Tenancy(name="b")) == 8


def pinned(core: CoreUnderTest, prefix: list[int]) -> None:
    core.add(900, prefix, max_tokens=1, request={"keep": "p"})
    core.run()
    core.scheduler.pin("p", len(prefix))


@pytest.mark.parametrize("length", [8, 10])
def test_pinned_prefixes_are_everybodys_and_what_follows_is_not(length):
    core = CoreUnderTest(block_size=4, num_blocks=32)
    prefix = list(range(20, 20 + length))
    pinned(core, prefix)
    prompt = [*prefix, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert cached_of(core, 1, prompt, A) == length
    # the whole prompt, pinned and own blocks as one prefix
    assert cached_of(core, 2, prompt, A) == (len(prompt) - 1) // 4 * 4
    assert cached_of(core, 3, prompt, B) == length
    core.scheduler.manager.kept.release("p")
    assert cached_of(core, 4, prompt, C) == 0
    core.assert_empty()


def test_a_part_of_a_pinned_prefix_is_everybodys_too():
    core = CoreUnderTest(block_size=4)
    pinned(core, PROMPT)
    assert cached_of(core, 1, [*PROMPT[:5], 40, 41, 42], A) == 4
    # no whole block in common
    assert cached_of(core, 2, [*PROMPT[:3], 40, 41, 42], A) == 0


def test_a_prompt_in_pieces_finds_them_too():
    core = CoreUnderTest(block_size=4)
    pinned(core, PROMPT)
    for tenant, number in ((A, 1), (B, 2)):
        core.add(number, [], max_tokens=1, is_final=False, request={"tenant": tenant})
        core.scheduler.extend(number, [*PROMPT, 40, 41, 42, 43], True)
        core.run()
        assert core.cached[number << 10] == 10


def test_what_a_tenant_keeps_only_it_continues():
    core = CoreUnderTest(block_size=4)
    core.add(1, PROMPT, max_tokens=1, request={"tenant": A, "keep": "chat"})
    core.run()
    assert cached_of(core, 2, [1], B, continues="chat") == 0
    assert cached_of(core, 3, [1], A, continues="chat") >= len(PROMPT)


@pytest.mark.parametrize("num_public", [0, 4, 6])
@pytest.mark.parametrize("how", ["reset", "failure"])
def test_what_a_tenant_pins_stays_its_own_whatever_is_forgotten(how, num_public):
    """The names that are given anew are those that it had, also behind a prefix of everybody's."""
    core = CoreUnderTest(block_size=4)
    if num_public:
        pinned(core, PROMPT[:num_public])
    core.add(1, PROMPT, max_tokens=1, request={"tenant": A, "keep": "own"})
    core.run()
    core.scheduler.pin("own", 8)
    if how == "reset":
        core.core.control("reset_prefix_cache", {})
    else:
        core.add(2, PROMPT, max_tokens=3, request={"tenant": A})
        core.executor.failing_rows[0] = "a failure that was asked for"
        core.run()
        assert core.ends[2 << 10].finish_reason == "error"
    for number, tenant in ((3, None), (4, B)):
        assert cached_of(core, number, PROMPT, tenant) == num_public
    assert cached_of(core, 5, PROMPT, A) == 8
