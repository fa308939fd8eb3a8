"""Routers of others in front of two servers: what a client sees is what one server says, wherever the router lets it
through. Run where QUIRE_VLLM_ROUTER or QUIRE_SMG names the program."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from conformance.registry import all_checks
from conformance.run import FAILED, run_checks
from conformance.target import Target
from tests.support.server_process import ServerProcess

# What the routers answer themselves. They read bodies before they pass them on, so all that is wrong with one has their
# words; they have headers of their own; they keep responses in a store of their own; and a chunk that they read and
# write again has lost what they do not know.
OF_ROUTERS = {"errors"}
OF_VLLM_ROUTER = {
    "streams.headers_of_a_stream[chats]", "streams.headers_of_a_stream[completions]",
    "streams.obfuscation_hides_lengths", "tools.a_wrong_tool[a name with a space]", "responses.a_turn_after_another",
    "shapes.null_means_unsaid", "transport.pipelined_requests", "transport.an_unknown_method",
}  # fmt: skip
OF_SMG = {
    "tools.a_wrong_tool[parameters that are a list]", "tools.a_choice_of_a_missing_tool",
    "responses.a_turn_after_another", "shapes.a_prompt_of_tokens",
}  # fmt: skip


def free_ports(num):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def vllm_router(program, urls, events, replays, port, metrics_port):
    """It reads Quire's KV events, and makes tokens of prompts by /tokenize."""
    sources = [("--kv-event-source", f"{url}={one}") for url, one in zip(urls, events, strict=True)]
    sources += [("--kv-event-replay-source", f"{url}={one}") for url, one in zip(urls, replays, strict=True)]
    return [
        program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", "kv_aware",
        *(word for pair in sources for word in pair), "--kv-event-block-size", "16", "--kv-event-model",
        "quire-embedded", "--prometheus-port", str(metrics_port),
    ]  # fmt: skip


def smg(program, urls, events, replays, port, metrics_port):
    return [program, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy",
            "round_robin", "--prometheus-port", str(metrics_port)]  # fmt: skip


def wait_answers(url, process):
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, "the router has ended"
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("variable", "make_command", "own_answers"),
    [("QUIRE_VLLM_ROUTER", vllm_router, OF_VLLM_ROUTER), ("QUIRE_SMG", smg, OF_SMG)],
)
def test_what_a_router_lets_through_is_as_it_must_be(variable, make_command, own_answers, tmp_path):
    program = os.environ.get(variable)
    if not program:
        pytest.skip(f"{variable} names no program (docs/distributed.md)")
    ports = free_ports(6)
    events, replays = [[f"tcp://127.0.0.1:{one}" for one in some] for some in (ports[:2], ports[2:4])]
    with contextlib.ExitStack() as stack:
        servers = []
        for endpoint, replay in zip(events, replays, strict=True):
            config = f'{{"enable_kv_cache_events": true, "endpoint": "{endpoint}", "replay_endpoint": "{replay}"}}'
            command = ["-m", "quire", "serve", "--port", "0", "--storage-url", f"sqlite:///{tmp_path}/stored.db",
                       "--kv-events-config", config]  # fmt: skip
            servers.append(stack.enter_context(ServerProcess(command)))
        urls = [server.wait_ready(300) for server in servers]
        process = subprocess.Popen(make_command(program, urls, events, replays, *ports[4:]))
        stack.callback(process.wait)
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{ports[4]}"
        wait_answers(f"{url}/v1/models", process)
        target = Target(url, api_key="none")
        checks = [one for one in all_checks() if one.group not in OF_ROUTERS]
        results = list(run_checks(target, checks))
        target.close()
        failed = {f"{one.check.group}.{one.check.name}": one.reason for one in results if one.outcome == FAILED}
        assert {name: why for name, why in failed.items() if name not in own_answers} == {}
        if make_command is smg:
            # both had their part, in turn
            assert all("POST /v1/chat/completions 200" in server.output for server in servers)
        else:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[5]}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            # it has found prompts where our events say that they are
            assert 'kv_placement_lookups_total{result="hit"}' in text
