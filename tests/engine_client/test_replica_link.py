"""Several engine cores behind one link, played by a test: who gets what, and what a death takes along."""

import asyncio
import dataclasses

import pytest

from quire import SamplingParams
from quire.chain_hashes import ChainHasher, public_name
from quire.engine_client import AsyncEngineClient
from quire.engine_client.replica_link import TOKENS_A_TURN, ReplicaLink
from quire.messages import (
    AbortRequests,
    CacheChanged,
    ControlCall,
    ControlReply,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    SequenceEnd,
    SequenceStart,
    int_array,
    sequence_id_of,
)
from quire.testing.fake_llm import fake_config

READY = EngineReady(max_model_len=256, max_num_seqs=8, num_blocks=64, block_size=16, report=["first"])


class PlayedLink:
    """Keeps what it is sent, and brings what the test puts in."""

    processes = ()

    def __init__(self, config):
        self.config = config
        self.sent = []
        self.coming = [READY]
        self.is_closed = False

    def send(self, *messages):
        self.sent += messages

    def receive(self, timeout=None):
        coming = self.coming
        self.coming = []
        return coming

    def descriptors(self):
        return ()

    def statistics(self):
        return {"garbage_frames_dropped": 1}

    def close(self):
        self.is_closed = True

    def of_kind(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def die(self):
        self.coming.append(EngineFailed(kind="EngineDeadError", error="signal SIGKILL"))


class Stage:
    def __init__(self, size=2, **options):
        self.links = []
        self.losses = []
        config = fake_config(data_parallel_size=size, **options)
        self.link = ReplicaLink(config, self._open)
        self.link.watch_losses(self.losses.append)
        [self.ready] = self.link.receive(0)
        self._last_id = 0

    def _open(self, config):
        self.links.append(PlayedLink(config))
        return self.links[-1]

    def ask(self, prompt=(1, 2, 3), **fields):
        """The number of a new request, and of the replica that got it."""
        self._last_id += 1
        sampling = SamplingParams(max_tokens=4, n=fields.pop("n", 1))
        self.link.send(
            EngineRequest(request_id=self._last_id, prompt_token_ids=list(prompt), sampling=sampling, **fields)
        )
        return self._last_id, self.holder_of(self._last_id)

    def holder_of(self, request_id):
        """The last one that it was sent to."""
        found = [
            number
            for number, link in enumerate(self.links)
            if any(one.request_id == request_id for one in link.of_kind(EngineRequest))
        ]
        return found[-1] if found else None

    def brings(self, number, *messages):
        self.links[number].coming += messages
        return self.link.receive(0)


def token(request_id, index=0):
    return EngineOutputs(step=1, sequence_ids=int_array([sequence_id_of(request_id, index)]), token_ids=int_array([7]))


def end(request_id, index=0):
    return EngineOutputs(step=1, ends=[SequenceEnd(sequence_id_of(request_id, index), "stop")])


def ends_in(messages):
    return {
        entry.sequence_id >> 10: (entry.finish_reason, entry.error) for message in messages for entry in message.ends
    }


def test_all_are_ready_before_the_client_hears_of_it():
    links = []
    link = ReplicaLink(fake_config(data_parallel_size=2), lambda config: links.append(PlayedLink(config)) or links[-1])
    links[1].coming = []
    assert link.receive(0) == []
    links[1].coming = [EngineReady(max_model_len=128, max_num_seqs=4, num_blocks=10, block_size=16)]
    [ready] = link.receive(0)
    assert (ready.max_model_len, ready.max_num_seqs, ready.num_blocks) == (128, 4, 74)


def test_copies_share_a_key_and_have_numbers_of_their_own():
    stage = Stage(3)
    assert len({link.config.prefix_hash_key for link in stage.links}) == 1
    assert stage.links[0].config.prefix_hash_key
    assert [link.config.replica for link in stage.links] == [0, 1, 2]


def test_a_copy_that_cannot_be_built_ends_the_start():
    links = []
    link = ReplicaLink(fake_config(data_parallel_size=2), lambda config: links.append(PlayedLink(config)) or links[-1])
    links[0].coming = [EngineFailed(kind="ModelError", error="broken")]
    assert [type(message) for message in link.receive(0)] == [EngineFailed]


def test_requests_are_spread_and_each_hears_of_its_own():
    stage = Stage()
    holders = [stage.ask(prompt=[number] * 40)[1] for number in range(8)]
    assert sorted(holders) == [0] * 4 + [1] * 4
    stage.link.send(ExtendRequest(request_id=3, token_ids=[9]), AbortRequests(request_ids=[1, 2, 99]))
    assert stage.links[holders[2]].of_kind(ExtendRequest)[0].request_id == 3
    assert not stage.links[1 - holders[2]].of_kind(ExtendRequest)
    aborted = {one: number for number, link in enumerate(stage.links) for a in link.of_kind(AbortRequests)
               for one in a.request_ids}  # fmt: skip
    assert aborted == {1: holders[0], 2: holders[1]}


def test_a_prompt_goes_where_its_beginning_is():
    stage = Stage()
    prompt = list(range(64))
    request_id, first = stage.ask(prompt)
    # named as the core names them, whose key is the same
    config = stage.links[first].config
    names = ChainHasher(config.block_size, config.prefix_hash_key).names_of(stage.links[first].sent[0])
    blocks = [public_name(name) for name in names]
    stage.brings(first, token(request_id), end(request_id), CacheChanged(stored=blocks))
    # it has had more requests than the other, but holds what this one begins with
    again, holder = stage.ask([*prompt, 1, 2, 3])
    assert holder == first
    stage.brings(first, token(again), end(again), CacheChanged(removed=blocks))
    assert stage.ask([*prompt, 1, 2, 3])[1] != first


def test_a_prompt_of_the_longest_length_does_not_hold_the_loop(monkeypatch):
    digest = ChainHasher.digest
    counted = [0]

    def counting(hasher, content):
        counted[0] += 1
        return digest(hasher, content)

    monkeypatch.setattr(ChainHasher, "digest", counting)
    links = []

    async def scenario():
        link = ReplicaLink(
            fake_config(data_parallel_size=2), lambda config: links.append(PlayedLink(config)) or links[-1]
        )
        client = AsyncEngineClient(link)
        await client.wait_ready()
        sampling = SamplingParams(max_tokens=4)
        prompt = [n % 1000 for n in range(1 << 20)]
        most = 0
        boxes = []
        for number, tokens in enumerate(([1] * 40, prompt, [2] * 40)):
            boxes.append(client.open(EngineRequest(request_id=number, prompt_token_ids=tokens, sampling=sampling)))
        client.abort(1)
        while len([one for link in links for one in link.of_kind(EngineRequest)]) < 3:
            before = counted[0]
            await asyncio.sleep(0)
            most = max(most, counted[0] - before)
        for box in boxes:
            await box.aclose()
        client.close()
        return most

    most = asyncio.run(scenario())
    # the client may look twice in a turn; a prompt's root is a digest as well
    assert most <= 2 * (TOKENS_A_TURN // 16) + 3
    assert counted[0] == (1 << 16) + 2 * 2 + 3
    # what was sent behind it has come behind it
    [holder] = [link for link in links if any(one.request_id == 1 for one in link.of_kind(EngineRequest))]
    kinds = [type(one) for one in holder.sent if getattr(one, "request_id", 1) == 1]
    assert kinds[:2] == [EngineRequest, AbortRequests]


def test_a_caller_that_waits_gets_a_long_prompt_sent_on():
    stage = Stage()
    long, holder = stage.ask(list(range(10 * TOKENS_A_TURN)))
    assert holder is None
    assert stage.link.receive(0.0) == []
    stage.link.send(ControlCall(call_id=1, name="replica.0.statistics"))
    assert not stage.links[0].of_kind(ControlCall)
    while stage.holder_of(long) is None:
        assert stage.link.receive(0) == []
    assert stage.links[0].of_kind(ControlCall)


def test_what_is_kept_is_gone_on_with_where_it_is():
    stage = Stage()
    first_id, first = stage.ask(keep="session")
    stage.brings(first, token(first_id), end(first_id))
    for _ in range(4):
        assert stage.ask(keep="session", continues="session")[1] == first
    stage.link.send(ControlCall(call_id=1, name="fork_kept", args={"handle": "session", "into": "other"}))
    assert [call.name for call in stage.links[first].of_kind(ControlCall)] == ["fork_kept"]
    assert stage.ask(continues="other")[1] == first
    assert not stage.links[1 - first].of_kind(ControlCall)


def ended(request_id, finish_reason, error=None):
    return EngineOutputs(step=1, ends=[SequenceEnd(sequence_id_of(request_id, 0), finish_reason, error=error)])


def num_handles(stage):
    return stage.link.statistics()["num_kept_handles"]


def test_where_nothing_is_kept_nothing_is_remembered():
    stage = Stage()
    for name, ends in (("refused", ("error", "too long")), ("aborted", ("abort",))):
        request_id, holder = stage.ask(keep=name)
        if name == "aborted":
            stage.link.send(AbortRequests(request_ids=[request_id]))
        stage.brings(holder, ended(request_id, *ends))
        assert num_handles(stage) == 0
    # its reader has met a stop string: the core keeps what there is
    request_id, holder = stage.ask(keep="session")
    stage.link.send(AbortRequests(sequence_ids=[sequence_id_of(request_id, 0)]))
    stage.brings(holder, ended(request_id, "abort"))
    assert num_handles(stage) == 1
    # what was kept before a turn that fails is kept after it
    turn, _ = stage.ask(keep="session", continues="session")
    stage.brings(holder, ended(turn, "error", "failed"))
    assert stage.ask(continues="session")[1] == holder


def test_a_fork_that_is_refused_is_not_remembered():
    stage = Stage()
    request_id, holder = stage.ask(keep="session")
    stage.brings(holder, end(request_id))

    def fork(into, error):
        stage.link.send(ControlCall(call_id=1, name="fork_kept", args={"handle": "session", "into": into}))
        call = stage.links[holder].of_kind(ControlCall)[-1]
        stage.brings(holder, ControlReply(call_id=call.call_id, error=error))

    fork("other", "no such handle")
    assert num_handles(stage) == 1
    fork("other", None)
    assert num_handles(stage) == 2
    # it is in use, and stays so
    fork("other", "in use")
    assert stage.ask(continues="other")[1] == holder


def test_answers_of_all_are_one():
    stage = Stage()

    def ask(operation, results, **args):
        stage.link.send(ControlCall(call_id=5, name=operation, args=args))
        for link, result in zip(stage.links, results, strict=True):
            link.coming.append(ControlReply(call_id=link.of_kind(ControlCall)[-1].call_id, result=result))
        [reply] = stage.link.receive(0)
        assert reply.call_id == 5
        return reply.result

    assert ask("statistics", [{"num_blocks": 3}, {"num_blocks": 4}]) == {"num_blocks": 7}
    slots = [{"block_size": 16, "slots": {"free": 1}}, {"block_size": 16, "slots": {"free": 2}}]
    assert ask("memory", slots) == {"block_size": 16, "slots": {"free": 3}}
    assert ask("list_kept", [[1], [2, 3]]) == [1, 2, 3]
    assert ask("adapter_state", ["ready", "loading"], number=1) == "loading"
    assert ask("worker.prepare_form", [True, False], form=b"") is False
    assert ask("load_adapter", [1, 1], name="a", path="b") == 1
    assert {call.args["number"] for link in stage.links for call in link.of_kind(ControlCall)[-1:]} == {1}


def test_an_error_of_one_is_the_answer():
    stage = Stage()
    stage.link.send(ControlCall(call_id=5, name="statistics"))
    for link, error in zip(stage.links, (None, "no"), strict=True):
        link.coming.append(ControlReply(call_id=link.of_kind(ControlCall)[-1].call_id, result={}, error=error))
    [reply] = stage.link.receive(0)
    assert reply.error == "no"


def test_one_that_dies_takes_along_only_what_had_begun():
    stage = Stage()
    asked = [stage.ask([number] * 40) for number in range(6)]
    dying = 0
    of_it = [request_id for request_id, holder in asked if holder == dying]
    stage.brings(dying, EngineOutputs(step=1, starts=[SequenceStart(sequence_id_of(one, 0), 0) for one in of_it]))
    stage.brings(dying, token(of_it[0]))
    stage.links[dying].die()
    messages = stage.link.receive(0)
    [(lost, (reason, error))] = ends_in(messages).items()
    assert (lost, reason) == (of_it[0], "error")
    assert "replica 0" in error
    assert "SIGKILL" in error
    assert all(entry.is_lost for message in messages for entry in message.ends)
    assert {stage.holder_of(one) for one in of_it[1:]} == {1}
    assert [loss.replica for loss in stage.losses] == [dying]
    # it has begun for the client already
    [again] = stage.brings(1, EngineOutputs(step=1, starts=[SequenceStart(sequence_id_of(of_it[1], 0), 32)]))
    assert again.starts == []
    assert stage.link.statistics()["num_requests_retried_total"] == len(of_it) - 1
    assert stage.ask()[1] == 1


def test_a_request_that_kills_cores_does_not_kill_all():
    stage = Stage(4)
    request_id, first = stage.ask()
    stage.links[first].die()
    assert ends_in(stage.link.receive(0)) == {}
    second = stage.holder_of(request_id)
    stage.links[second].die()
    [(lost, (reason, _))] = ends_in(stage.link.receive(0)).items()
    assert (lost, reason) == (request_id, "error")
    others = {0, 1, 2, 3} - {first, second}
    assert len(others) == 2
    assert not any(stage.links[number].of_kind(EngineRequest) for number in others)


def test_extensions_go_along_to_another_one():
    stage = Stage()
    request_id, first = stage.ask(is_final=False)
    stage.link.send(ExtendRequest(request_id=request_id, token_ids=[4], is_final=True))
    stage.links[first].die()
    stage.link.receive(0)
    assert [type(one) for one in stage.links[1 - first].sent] == [EngineRequest, ExtendRequest]


def test_what_was_kept_there_cannot_be_gone_on_with():
    stage = Stage()
    first_id, first = stage.ask(keep="session")
    stage.brings(first, token(first_id), end(first_id))
    turn, _ = stage.ask(continues="session")
    stage.links[first].die()
    messages = stage.link.receive(0)
    assert ends_in(messages)[turn][0] == "error"
    assert [start.sequence_id for message in messages for start in message.starts] == [sequence_id_of(turn, 0)]
    late, holder = stage.ask(continues="session")
    assert holder is None
    assert "lost with its replica" in ends_in(stage.link.receive(0))[late][1]


def test_what_was_aborted_is_not_begun_again():
    stage = Stage()
    request_id, first = stage.ask()
    stage.link.send(AbortRequests(request_ids=[request_id]))
    stage.links[first].die()
    assert ends_in(stage.link.receive(0)) == {request_id: ("abort", None)}


def test_who_waits_for_all_hears_from_those_that_are_left():
    stage = Stage()
    stage.link.send(ControlCall(call_id=5, name="statistics"))
    stage.brings(0, ControlReply(call_id=stage.links[0].sent[-1].call_id, result={"num_blocks": 3}))
    stage.links[1].die()
    [reply] = stage.link.receive(0)
    assert reply.result == {"num_blocks": 3}


def test_the_last_ones_death_is_the_engines():
    stage = Stage()
    stage.ask()
    stage.links[0].die()
    stage.link.receive(0)
    stage.links[1].die()
    assert [type(message) for message in stage.link.receive(0)] == [EngineFailed]
    assert stage.link.receive(0) == []


def test_another_one_takes_its_place_when_it_is_let():
    stage = Stage()
    stage.links[0].die()
    stage.link.receive(0)
    stage.link.send(ControlCall(call_id=7, name="replicas.start", args={"number": 0}))
    assert stage.links[0].is_closed
    [reply] = stage.link.receive(0)
    assert (reply.call_id, reply.result) == (7, True)
    assert {stage.ask([n] * 20)[1] for n in range(4)} == {1}
    stage.link.send(ControlCall(call_id=8, name="replica.0.load_adapter", args={"name": "a"}))
    [call] = stage.links[2].of_kind(ControlCall)
    assert (call.name, call.args) == ("load_adapter", {"name": "a"})
    stage.link.send(ControlCall(call_id=9, name="replicas.serve", args={"number": 0}))
    assert stage.ask([77] * 20)[1] == 2
    assert stage.links[2].config == dataclasses.replace(stage.links[0].config)


def test_one_that_cannot_be_started_again_is_an_error():
    stage = Stage()
    stage.links[0].die()
    stage.link.receive(0)
    stage.link.send(ControlCall(call_id=7, name="replicas.start", args={"number": 0}))
    stage.links[2].coming = [EngineFailed(kind="CapacityError", error="no memory")]
    [reply] = stage.link.receive(0)
    assert reply.error == "no memory"
    assert stage.ask()[1] == 1


def test_one_that_runs_already_is_not_started_again_and_the_others_hear_nothing():
    stage = Stage()
    stage.link.send(ControlCall(call_id=7, name="replicas.start", args={"number": 0}))
    [reply] = stage.link.receive(0)
    assert (reply.call_id, reply.error) == (7, "replica 0 runs already.")
    assert {stage.ask([n] * 20)[1] for n in range(6)} == {0, 1}


def test_a_message_that_raises_does_not_come_again():
    stage = Stage()
    with pytest.raises(KeyError):
        stage.link.send(ControlCall(call_id=7, name="replicas.serve", args={"number": 9}))
    assert {stage.ask([n] * 20)[1] for n in range(6)} == {0, 1}


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_the_policy_is_the_one_that_was_asked_for(policy):
    stage = Stage(routing_policy=policy)
    prompt = list(range(64))
    assert [stage.ask(prompt)[1] for _ in range(4)] == [0, 1, 0, 1]


def test_closing_closes_all():
    stage = Stage()
    stage.links[0].die()
    stage.link.receive(0)
    stage.link.close()
    stage.link.close()
    assert all(link.is_closed for link in stage.links)
    assert stage.link.descriptors() == ()


def attached(numbers, **ready):
    """A link of a process that has not started these cores, and the links to them."""
    links = {}

    def attach(config):
        link = links[config.replica] = PlayedLink(config)
        link.coming = [EngineReady(max_model_len=256, max_num_seqs=8, num_blocks=64, block_size=16, **ready)]
        return link

    config = dataclasses.replace(fake_config(data_parallel_size=3), prefix_hash_key=b"k" * 32)
    return ReplicaLink(config, attach, numbers), links


def test_a_further_process_shares_those_that_serve():
    link, links = attached([0, 2], first_request_id=5 << 44)
    [ready] = link.receive(0)
    # its requests have numbers of its own, and it names blocks as all others do
    assert ready.first_request_id == 5 << 44
    assert ready.report == []
    assert {one.config.prefix_hash_key for one in links.values()} == {b"k" * 32}
    numbers = [(5 << 44) + number for number in range(4)]
    for number in numbers:
        link.send(EngineRequest(request_id=number, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=4)))
    assert {number: len(one.of_kind(EngineRequest)) for number, one in links.items()} == {0: 2, 2: 2}
    # what only their owner counts is not counted twice
    assert not {"num_replicas", "num_replicas_serving", "num_replicas_lost_total"} & link.statistics().keys()
    assert link.statistics()["replica_2_sequences"] == 2


def test_a_further_process_is_told_of_a_loss_and_of_the_successor():
    link, links = attached([0, 1])
    link.receive(0)
    sampling = SamplingParams(max_tokens=4)
    for number in range(2):
        link.send(EngineRequest(request_id=number, prompt_token_ids=[1], sampling=sampling))
    [(lost, dead)] = [(number, one) for number, one in links.items() if one.of_kind(EngineRequest)[0].request_id == 0]
    dead.coming.append(token(0))
    link.receive(0)
    for call_id in range(2):
        link.send(ControlCall(call_id=call_id, name="replicas.lose", args={"number": lost, "reason": "signal SIGKILL"}))
    messages = link.receive(0)
    assert [one.call_id for one in messages if isinstance(one, ControlReply)] == [0, 1]
    ended = ends_in([one for one in messages if isinstance(one, EngineOutputs)])
    assert ended == {0: ("error", f"replica {lost} of the engine died: signal SIGKILL")}
    link.send(ControlCall(call_id=2, name="replicas.start", args={"number": lost}))
    assert [one.result for one in link.receive(0)] == [True]
    assert links[lost] is not dead
    link.send(ControlCall(call_id=3, name="replicas.serve", args={"number": lost}))
    link.receive(0)
    link.send(EngineRequest(request_id=2, prompt_token_ids=[1], sampling=sampling))
    assert links[lost].of_kind(EngineRequest)


def test_a_loss_and_its_successor_may_come_in_one_turn():
    link, links = attached([0, 1])
    link.receive(0)
    dead = links[1]
    link.send(
        ControlCall(call_id=0, name="replicas.lose", args={"number": 1, "reason": "signal SIGKILL"}),
        ControlCall(call_id=1, name="replicas.start", args={"number": 1}),
    )
    messages = [*link.receive(0), *link.receive(0)]
    assert [(one.call_id, one.result) for one in messages if isinstance(one, ControlReply)] == [(0, True), (1, True)]
    assert links[1] is not dead
    link.send(ControlCall(call_id=2, name="replicas.serve", args={"number": 1}))
    link.receive(0)
    assert link.statistics().keys() >= {"replica_0_sequences", "replica_1_sequences"}


def test_what_copies_hold_before_they_serve_counts():
    """One process of several has begun anew: the cores say at once what their caches hold."""
    link, links = attached([0, 1])
    prompt = list(range(5, 70))
    request = EngineRequest(request_id=9, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4))
    names = list(map(public_name, ChainHasher(link._config.block_size, b"k" * 32).names_of(request)))
    # whichever comes first, the other is not ready yet
    for number in links:
        links[number].coming.append(CacheChanged(stored=names if number == 1 else []))
    link.receive(0)
    for number in range(3):
        link.send(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4)))
    assert {number: len(one.of_kind(EngineRequest)) for number, one in links.items()} == {0: 0, 1: 3}


def test_a_further_process_that_has_none_left_hears_of_it():
    link, _ = attached([1])
    link.receive(0)
    link.send(ControlCall(call_id=0, name="replicas.lose", args={"number": 1, "reason": "signal SIGKILL"}))
    [*_, failure] = link.receive(0)
    assert (type(failure), failure.error) == (EngineFailed, "signal SIGKILL")
    assert link.receive(0) == []
