"""`quire deploy`: the official client in front of two copies, one of which is killed."""

import asyncio
import os
import signal
import socket

import openai
import psutil
import pytest
from tests.support.server_process import ServerProcess
from tests.support.streams import until

MESSAGES = [{"role": "user", "content": "What is seven plus five?"}]


def servers():
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("deploy.server_process" in word for word in process.info["cmdline"] or [])
    ]


@pytest.fixture
def port():
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def test_two_copies_and_one_of_them_killed(cluster, port):
    command = ["-m", "quire", "deploy", "--replicas", "2", "--port", str(port), "--num-threads", "1", "--device", "cpu"]
    with ServerProcess(command) as server:
        server.wait_for("Quire serves", 180.0)
        assert len(servers()) == 2
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

        def ask(number=0):
            answer = client.chat.completions.create(
                model="quire-embedded",
                messages=[*MESSAGES, {"role": "user", "content": str(number)}],
                max_tokens=8,
                temperature=0,
            )
            return answer.choices[0].message.content

        def stream():
            chunks = client.chat.completions.create(
                model="quire-embedded", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        assert [model.id for model in client.models.list()] == ["quire-embedded"]
        expected = ask()
        assert expected
        assert (
            stream()
            == client.chat.completions.create(model="quire-embedded", messages=MESSAGES, max_tokens=8, temperature=0)
            .choices[0]
            .message.content
        )
        with pytest.raises(openai.NotFoundError, match="quire serve"):
            client.files.list()
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="quire-embedded", messages=MESSAGES, max_tokens=-1)
        before = {process.pid for process in servers()}
        os.kill(min(before), signal.SIGKILL)
        # nobody without a first token hears of it
        assert [ask() for _ in range(8)] == [expected] * 8
        until(lambda: len({process.pid for process in servers()} - before) == 1, 60.0, "Serve started no other copy")
        assert ask() == expected
    until(lambda: not servers(), 20.0, "a copy outlived the deployment")


def test_copies_come_and_go_as_requests_do(cluster, port):
    command = ["-m", "quire", "deploy", "--max-replicas", "2", "--target-ongoing-requests", "1", "--upscale-delay",
               "1", "--downscale-delay", "3", "--port", str(port), "--num-threads", "1", "--device", "cpu"]  # fmt: skip
    with ServerProcess(command) as server:
        server.wait_for("Quire serves 1 to 2 copies", 180.0)
        assert len(servers()) == 1
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

        async def stream(number):
            chunks = await client.completions.create(
                model="quire-embedded", prompt=[3 + number, 4], max_tokens=200, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices][-1]

        async def load():
            while len(servers()) < 2:
                assert await asyncio.gather(*(stream(number) for number in range(6))) == ["length"] * 6
            # the second copy has its part
            assert await asyncio.gather(*(stream(number) for number in range(6))) == ["length"] * 6

        asyncio.run(asyncio.wait_for(load(), 240.0))
        until(lambda: len(servers()) == 1, 120.0, "the copy that nobody needs goes on")
    until(lambda: not servers(), 20.0, "a copy outlived the deployment")
