"""The example runs, and its answer is that of the whole prompt."""

import asyncio

from examples.streamed_prompt import listen

from quire import AsyncLLM, SamplingParams


def test_the_answer_is_that_of_the_whole_prompt(capsys):
    async def main():
        async with AsyncLLM(engine_process=False, max_num_seqs=4) as engine:
            answer = await listen(engine, "Once upon a time", 1000.0, 8)
            async for output in engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8)):
                whole = output.outputs[0].text
            assert answer == whole

    asyncio.run(main())
    assert "ms after the last word" in capsys.readouterr().out
