"""/metrics of a server that has answered: names, numbers, and what was generated for nobody."""

import asyncio
import re

from quire.interfaces.gateway import create_app
from quire.testing.fake_engine import fake_engine


def value_of(text: str, name: str) -> float:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found)


def test_the_times_and_sizes_of_a_request(run, served):
    async def main():
        async with served() as server:
            await server.complete("abcd", max_tokens=3)
            text = (await server.http.get("/metrics")).text
        of = '{model_name="byte-model"}'
        assert value_of(text, f"quire:prompt_tokens_total{of}") == 4
        # the fake says that it found half of the prompt
        assert value_of(text, f"quire:prompt_tokens_cached_total{of}") == 2
        assert value_of(text, f"quire:generation_tokens_total{of}") == 3
        for stage in ("queue", "prefill", "decode", "inference"):
            assert value_of(text, f"quire:request_{stage}_time_seconds_count{of}") == 1
        assert value_of(text, f"quire:request_params_max_tokens_sum{of}") == 3
        assert value_of(text, f"quire:grammar_compilations_total{of}") == 0

    run(main())


def test_tokens_that_nobody_reads_are_counted(run, served):
    async def main():
        async with served() as server:
            server.fake.hold(3)
            asking = asyncio.ensure_future(server.complete("b", max_tokens=40))
            while not server.fake.running:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            # as if the engine had gone on
            server.engine._client._mailboxes.num_wasted_tokens = 5
            text = (await server.http.get("/metrics")).text
            assert value_of(text, 'quire:wasted_tokens_total{model_name="byte-model"}') == 5
            assert value_of(text, 'quire:request_success_total{finished_reason="abort",model_name="byte-model"}') == 1

    run(main())


def test_grammars_are_those_of_the_worker(run, served):
    async def main():
        async with served() as server:
            assert (await server.complete(structured_outputs={"choice": ["a", "b"]})).status_code == 200
            text = (await server.http.get("/metrics")).text
            assert value_of(text, 'quire:compiled_grammars{model_name="byte-model"}') == 1

    run(main())


def test_the_names_of_vllm(run, tmp_path):
    async def main():
        engine = await fake_engine(tmp_path / "model")
        app = create_app(engine, metrics_prefix="vllm:")
        text = app.state.metrics.exposition(await engine.statistics()).decode()
        assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
        assert "# TYPE quire:http_responses counter" in text or "# TYPE quire:http_responses_total counter" in text
        assert "quire:prompt_tokens" not in text
        engine.shutdown()

    run(main())
