"""include_obfuscation: the sizes of events say nothing about the lengths of tokens."""

import pytest

from quire.interfaces.server.openai.chunks import PADDED_BYTES, obfuscation

WORDS = "a 😀 \n\t longer ß"


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 10_000])
def test_what_is_filled_up_has_a_multiple(size):
    field = obfuscation(size)
    assert (size + len(field) - len(b',"obfuscation":""')) % PADDED_BYTES == 0
    assert len(field) < PADDED_BYTES + 20


@pytest.mark.parametrize("ask", ["chat", "complete"])
def test_all_tokens_have_one_length(run, served, events_of, ask):
    async def main():
        async with served() as server:
            server.fake.reply_to = lambda request, index: WORDS
            fields = {"stream": True, "n": 2, "logprobs": None}
            padded = await getattr(server, ask)(**fields, stream_options={"include_obfuscation": True})
            plain = await getattr(server, ask)(**fields)
            sizes = {len(line) for line in padded.content.split(b"\n\n")[:-2]}
            assert len(sizes) == 1
            assert len({len(line) for line in plain.content.split(b"\n\n")[:-2]}) > 3
            letters = [event.pop("obfuscation") for event in events_of(padded.text)]
            assert len(set(letters)) == len(letters)
            assert "obfuscation" not in plain.text

    run(main())


def test_longer_events_go_up_in_steps(run, served):
    async def main():
        async with served() as server:
            fields = {"stream": True, "logprobs": True, "top_logprobs": 5, "max_tokens": 12}
            options = {"include_obfuscation": True, "include_usage": True}
            reply = await server.chat(**fields, stream_options=options)
            sizes = {len(line) for line in reply.content.split(b"\n\n")[:-3]}
            assert len({size % PADDED_BYTES for size in sizes}) == 1

    run(main())
