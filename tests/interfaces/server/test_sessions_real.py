"""Sessions over HTTP with the embedded model and the real core, in float32: what is kept changes no answer."""

import asyncio

import httpx2 as httpx

from quire import AsyncLLM
from quire.interfaces.gateway import create_app

OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "block_size": 8, "check_invariants": True, "engine_process": False}
GREEDY = {"temperature": 0, "max_tokens": 24}
QUESTIONS = ["What is seven plus five?", "What is a block?", "Who shares blocks?"]


async def ask(http, method, path, **body):
    answer = await http.request(method, path, **({"json": body} if method == "POST" else {}))
    assert answer.is_success, answer.text
    return answer.json()


async def whole(http, messages):
    """The answer to a chat that is sent whole, with nothing in the cache."""
    body = {"messages": messages, **GREEDY, "cache_salt": f"never met before {len(messages)}"}
    return await ask(http, "POST", "/v1/chat/completions", **body)


async def converse(http, engine):
    session = (await ask(http, "POST", "/v1/sessions"))["id"]
    here, messages, fork = f"/v1/sessions/{session}", [], None
    num_said = 0
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        turn = await ask(http, "POST", f"{here}/messages", messages=messages[-1:], **GREEDY)
        expected = await whole(http, messages)
        assert turn["choices"] == expected["choices"]
        assert turn["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        # all that was said before, but for the last token, which the next turn computes
        cached = turn["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == max(0, num_said - 1), "the template writes answers back as they were"
        num_said = turn["usage"]["total_tokens"]
        assert (await ask(http, "GET", here))["num_tokens"] == num_said
        messages.append(turn["choices"][0]["message"])
        if number == 0:
            fork = f"/v1/sessions/{(await ask(http, 'POST', f'{here}/fork'))['id']}"
    await share_and_give_back(http, engine, here, fork)


async def choose(http):
    """Turns of several choices: the session goes on with the first one."""
    here = f"/v1/sessions/{(await ask(http, 'POST', '/v1/sessions'))['id']}"
    messages = []
    several = {"n": 2, "use_beam_search": True}
    for question, more in zip(QUESTIONS, (several, {"n": 2, "temperature": 1.0, "seed": 3}, {}), strict=True):
        messages.append({"role": "user", "content": question})
        fields = {**GREEDY, **more}
        turn = await ask(http, "POST", f"{here}/messages", messages=messages[-1:], **fields)
        alone = {**fields, "messages": messages, "cache_salt": f"never met {len(messages)}"}
        assert turn["choices"] == (await ask(http, "POST", "/v1/chat/completions", **alone))["choices"]
        assert len(turn["choices"]) == more.get("n", 1)
        messages.append(turn["choices"][0]["message"])
    assert len((await ask(http, "GET", here))["turns"]) == 3
    await ask(http, "DELETE", here)


async def share_and_give_back(http, engine, here, fork):
    shown = await ask(http, "GET", here)
    held = (await engine.statistics())["num_blocks_held"]
    in_fork = (await ask(http, "GET", fork))["num_blocks"]
    # they differ from the block on in which the first turn ended
    assert shown["num_blocks"] <= held <= shown["num_blocks"] + 1
    assert in_fork > 1
    rewound = await ask(http, "POST", f"{here}/rewind", num_turns=1)
    assert rewound["turns"] == shown["turns"][:1]
    assert rewound["num_blocks"] == in_fork < shown["num_blocks"]
    # both hold the same blocks, but for the one that the session has written to since
    assert (await engine.statistics())["num_blocks_held"] == in_fork + 1 < held
    for address in (here, fork):
        await ask(http, "DELETE", address)
    assert (await engine.statistics())["num_blocks_held"] == 0


def test_a_session_is_the_chat_sent_whole():
    async def main():
        async with AsyncLLM(**OPTIONS) as engine:
            app = create_app(engine)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://quire.test", timeout=60) as http:
                await converse(http, engine)
                await choose(http)
            await app.state.services.stop()

    asyncio.run(asyncio.wait_for(main(), 120))
