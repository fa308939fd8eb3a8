"""LLM over a core without a model: shapes, order, stopping, errors."""

import asyncio
import gc
import os
import signal
import threading

import numpy as np
import pytest

from quire import LLM, BeamSearchParams, OptionError, RequestError, SamplingParams
from quire.errors import ContextLengthError, EngineDeadError
from quire.renderer.tokenizer import Tokenizer
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_llm, fake_renderer

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
LINKS = pytest.mark.parametrize("own_process", [False, True], ids=["in process", "socket"])


@pytest.fixture
def llm():
    with fake_llm() as one:
        yield one


def greedy(**changes) -> SamplingParams:
    return GREEDY.replace(**changes)


def ids(text: str) -> list[int]:
    return fake_renderer().render_prompt(text).token_ids


# ---------------------------------------------------------------------------------------------- shapes and order


@LINKS
def test_outputs_come_in_the_order_of_the_prompts(own_process: bool):
    prompts = ["one two three", "four", "five six"]
    with fake_llm(own_process=own_process) as llm:
        outputs = llm.generate(prompts, [greedy(max_tokens=9), greedy(max_tokens=1), greedy()], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 4]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert outputs[0].outputs[0].token_ids == (ids("one two three") * 9)[:9]
    assert outputs[0].outputs[0].text == fake_renderer().decode(outputs[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    ("prompts", "count", "text"),
    [
        ("Hello", 1, "Hello"),
        (["Hello"], 1, "Hello"),
        ({"prompt": "Hello"}, 1, "Hello"),
        ([{"prompt": "Hello"}, "Hello"], 2, "Hello"),
        ({"prompt_token_ids": ids("Hello")}, 1, None),
        (np.array(ids("Hello")), 1, None),
        ([np.array(ids("Hello"))] * 2, 2, None),
        (np.array([ids("Hello")] * 2), 2, None),
        ({"prompt_token_ids": np.array(ids("Hello"))}, 1, None),
        ([np.int64(token) for token in ids("Hello")], 1, None),
        ([{"prompt_token_ids": ids("Hello")}] * 3, 3, None),
        (ids("Hello"), 1, None),
        ([ids("Hello"), ids("Hello")], 2, None),
        ([], 0, None),
    ],
)
def test_every_form_of_a_prompt(llm: LLM, prompts, count, text):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(outputs) == count
    for output in outputs:
        assert (output.prompt, output.prompt_token_ids) == (text, ids("Hello"))


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        {"prompt_token_ids": "abc"},
        {"prompts": "abc"},
        {"prompt": 5},
        {},
        {"prompt": "a", "image": 1},
        {"prompt": "a", "prompt_token_ids": [1]},
        np.array([1.5]),
        np.array(3),
        [np.array([[1, 2]])],
        [None],
        [[]],
    ],
)
def test_other_forms_are_refused(llm: LLM, prompt):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompt, GREEDY)


def test_messages_are_no_prompt(llm: LLM):
    with pytest.raises(RequestError, match=r"'role' is not supported.*render_prompt\(messages\).*LLM\.chat"):
        llm.beam_search([{"role": "user", "content": "Hi"}], BeamSearchParams(beam_width=2))


def test_a_bad_prompt_raises_before_anything_starts(llm: LLM):
    with pytest.raises(ContextLengthError) as caught:
        llm.generate(["good", [1] * 5000], GREEDY)
    assert "prompt number 1 " in caught.value.__notes__[0]
    assert llm.statistics()["steps"] == 0
    assert llm.statistics()["requests_open"] == 0


def test_sampling_parameters_for_each_prompt_must_be_as_many(llm: LLM):
    with pytest.raises(RequestError, match="2 given for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


@pytest.mark.parametrize("params", [[], {}, 0, "", False])
def test_what_is_empty_is_no_request_for_the_defaults(llm: LLM, params):
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a", "b"], params)
    with pytest.raises(RequestError, match=r"pooling_params|PoolingParams"):
        llm.embed(["a", "b"], params)


@pytest.mark.parametrize(
    ("given", "received"),
    [
        ({}, [0, 0]),
        ({"priority": 3}, [3, 3]),
        ({"priority": [2, -1]}, [2, -1]),
        ({"priority": np.int64(3)}, [3, 3]),
        ({"priority": np.array([2, -1])}, [2, -1]),
        ({"priority": range(2)}, [0, 1]),
    ],
)
def test_priorities_are_for_all_prompts_or_for_each(llm: LLM, monkeypatch, given, received):
    client = llm._engine._client
    priorities = []
    open_all = client.open_all
    monkeypatch.setattr(
        client,
        "open_all",
        lambda requests, at_end: priorities.extend(one.priority for one in requests) or open_all(requests, at_end),
    )
    llm.generate(["a b", "c d"], GREEDY, **given)
    llm.chat([[{"role": "user", "content": text}] for text in "ab"], GREEDY, **given)
    llm.beam_search(["a b", "c d"], BeamSearchParams(beam_width=2, max_tokens=2), **given)
    assert priorities == received * 3


@pytest.mark.parametrize("priority", [[1], [0, 1, 2], [0, "high"], 1.5, "12", True, np.array([1.0, 2.0])])
def test_other_priorities_are_refused(llm: LLM, priority):
    with pytest.raises(RequestError, match="priority"):
        llm.generate(["a b", "c d"], GREEDY, priority=priority)
    assert llm.statistics()["steps"] == 0


def test_several_sequences_of_one_prompt(llm: LLM):
    [output] = llm.generate("one two three", SamplingParams(n=3, seed=5, max_tokens=6), use_tqdm=False)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert [len(one.token_ids) for one in output.outputs] == [6, 5, 4]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


def test_the_same_program_gives_the_same_outputs():
    def run(seed: int):
        with fake_llm(seed=seed) as llm:
            outputs = llm.generate(["a b", "c d"], SamplingParams(max_tokens=5), use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    assert run(1) == run(1) != run(2)


def test_chat_takes_one_conversation_or_several(llm: LLM):
    one = [{"role": "user", "content": "Hello"}]
    rendered = fake_renderer().render_prompt(one)
    [output] = llm.chat(one, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == (rendered.text, rendered.token_ids)
    assert len(llm.chat([one, one], GREEDY, use_tqdm=False)) == 2
    for wrong in ("Hello", [], ["Hello"], {"role": "user"}):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(wrong)


# ---------------------------------------------------------------------------------------------- log-probabilities


def test_logprobs_have_vllms_shape(llm: LLM):
    [output] = llm.generate("one two", greedy(logprobs=2, prompt_logprobs=1), use_tqdm=False)
    [one] = output.outputs
    assert one.logprobs is not None
    assert [next(iter(position)) for position in one.logprobs] == one.token_ids  # the chosen token first
    assert [len(position) for position in one.logprobs] == [2] * 4  # and once, if it is among the best
    first = one.logprobs[0][one.token_ids[0]]
    assert (first.logprob, first.rank) == (-0.5, 1)
    assert first.decoded_token == fake_renderer().token_text(one.token_ids[0])
    assert one.cumulative_logprob == pytest.approx(-2.0)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert [next(iter(position)) for position in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]


def test_nothing_of_the_kind_is_there_unless_asked_for(llm: LLM):
    [output] = llm.generate("one two", GREEDY, use_tqdm=False)
    assert (output.prompt_logprobs, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None,) * 3


def test_logprobs_zero_is_the_chosen_token_alone(llm: LLM):
    [output] = llm.generate("one two", greedy(logprobs=0), use_tqdm=False)
    assert [list(position) for position in output.outputs[0].logprobs] == [[t] for t in output.outputs[0].token_ids]


# ---------------------------------------------------------------------------------------------- stopping


@LINKS
def test_a_stop_string_across_tokens_ends_its_sequence(own_process: bool):
    prompt = "The quick brown fox jumps over the lazy dog"
    with fake_llm(own_process=own_process) as llm:
        [output] = llm.generate(prompt, greedy(max_tokens=60, stop=["own fox ju"], logprobs=0), use_tqdm=False)
        [one] = output.outputs
        assert (one.text, one.finish_reason, one.stop_reason) == ("The quick br", "stop", "own fox ju")
        assert len(one.token_ids) == len(one.logprobs) < 60
        assert "own fox ju" in fake_renderer().decode(one.token_ids)
        assert "own fox ju" not in fake_renderer().decode(one.token_ids[:-1])
        assert llm.statistics()["sequences_running"] == 0


def test_a_stop_string_ends_one_of_several_sequences(llm: LLM):
    prompt = "The quick brown fox"
    # Sequence 1 gets one token less, and that is the one with the stop string.
    num_tokens = len(ids(prompt))
    [output] = llm.generate(prompt, greedy(n=2, max_tokens=num_tokens, stop=["fox"]), use_tqdm=False)
    assert [(one.finish_reason, one.stop_reason) for one in output.outputs] == [("stop", "fox"), ("length", None)]


def test_a_stop_string_may_be_kept(llm: LLM):
    sampling = greedy(max_tokens=60, stop="own fox", include_stop_str_in_output=True)
    [output] = llm.generate("The quick brown fox jumps", sampling, use_tqdm=False)
    assert output.outputs[0].text == "The quick brown fox"


def test_a_stop_token_is_named_and_leaves_no_text(llm: LLM):
    tokens = ids("The quick brown fox")
    [output] = llm.generate("The quick brown fox", greedy(max_tokens=60, stop_token_ids=[tokens[-1]]), use_tqdm=False)
    [one] = output.outputs
    assert (one.finish_reason, one.stop_reason) == ("stop", tokens[-1])
    assert one.token_ids == tokens
    assert one.text == fake_renderer().decode(tokens[:-1])


def test_without_detokenising_there_is_no_text(llm: LLM):
    [output] = llm.generate("one two", greedy(detokenize=False, logprobs=1), use_tqdm=False)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 4
    assert {one.decoded_token for position in output.outputs[0].logprobs for one in position.values()} == {None}


# ---------------------------------------------------------------------------------------------- trouble


class InterruptingBar:
    """A progress bar whose user presses Ctrl-C after the first prompt."""

    def __init__(self, **options) -> None:
        self.options = options
        self.is_closed = False
        bars.append(self)

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        assert "tokens/s" in text

    def update(self, count: int) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        self.is_closed = True


bars: list[InterruptingBar] = []


@LINKS
def test_ctrl_c_aborts_what_runs_and_the_engine_goes_on(own_process: bool):
    with fake_llm(own_process=own_process) as llm:
        llm.control("hold", {"at": 3})
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a b", "c d", "e f"], [greedy(max_tokens=2), GREEDY, GREEDY], use_tqdm=InterruptingBar)
        assert bars[-1].is_closed
        assert bars[-1].options["total"] == 3
        statistics = llm.statistics()
        assert (statistics["requests_open"], statistics["sequences_running"]) == (0, 0)
        llm.control("hold")
        assert len(llm.generate("a b", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_ctrl_c_in_a_step_waits_for_its_end(llm: LLM):
    llm.control("interrupt_next_step")
    llm.control("hold", {"at": 2})
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a b", "c d"], GREEDY, use_tqdm=False)
    llm.control("hold")
    statistics = llm.statistics()
    # aborted after the step, not lost in it
    assert (statistics["sequences_running"], statistics["sequences_aborted"]) == (0, 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(llm.generate("a b", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_request_that_fails_while_it_runs_fails_alone(llm: LLM):
    class FailTheRest(InterruptingBar):
        def update(self, count: int) -> None:
            llm.control("fail_requests", {"error": "its numbers were not finite"})

    llm.control("hold", {"at": 3})
    good, bad = llm.generate(["a b", "c d"], [greedy(max_tokens=2), GREEDY], use_tqdm=FailTheRest)
    assert good.outputs[0].finish_reason == "length"
    assert bad.finished
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "its numbers were not finite")


def test_a_dead_engine_raises(llm: LLM):
    llm.control("fail_next_step")
    with pytest.raises(EngineDeadError, match="the step was told to fail"):
        llm.generate("a b", GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate("a b", GREEDY, use_tqdm=False)


def test_after_shutdown_it_says_so():
    llm = fake_llm()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a b", GREEDY)


def test_a_shutdown_by_another_thread_ends_the_call(llm: LLM):
    llm.control("hold", {"at": 2})
    other = threading.Timer(0.1, llm.shutdown)
    other.start()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a b", GREEDY, use_tqdm=False)
    other.join()


def test_several_threads_generate_at_once(llm: LLM):
    """No thread waits for another one's batch."""
    llm.control("hold", {"at": 2})
    outputs = []
    other = threading.Thread(target=lambda: outputs.extend(llm.generate("a b", GREEDY, use_tqdm=False)))
    other.start()
    assert len(llm.generate("c d", greedy(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids) == 2
    assert not outputs
    llm.control("hold")
    other.join()
    assert len(outputs[0].outputs[0].token_ids) == 4


def test_it_works_where_the_caller_has_an_event_loop(llm: LLM):
    """As in a notebook."""

    async def cell():
        return llm.generate("a b", GREEDY, use_tqdm=False)

    assert len(asyncio.run(cell())[0].outputs[0].token_ids) == 4


def test_a_session_keeps_its_engine():
    with fake_llm(core=KEEPING_CORE).open_session() as session:
        gc.collect()
        assert len(session.generate("one two", GREEDY).outputs[0].token_ids) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.parametrize("own_process", [False, True])
def test_a_fork_takes_nothing_away(own_process: bool):
    with fake_llm(own_process=own_process) as llm:
        before = llm.generate("a b", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        child = os.fork()
        if child == 0:
            status = 1
            try:
                llm.shutdown()
                llm._engine.shutdown()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert llm.generate("a b", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before


def test_an_engine_that_nobody_holds_is_shut_down():
    before = threading.active_count()
    llm = fake_llm()
    llm.generate("a b", GREEDY, use_tqdm=False)
    assert threading.active_count() > before
    del llm
    gc.collect()
    assert threading.active_count() == before


def test_threads_take_turns(llm: LLM):
    answers: dict[int, list[int]] = {}

    def work(count: int) -> None:
        answers[count] = llm.generate("a b c", greedy(max_tokens=count), use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(count,)) for count in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {count: len(tokens) for count, tokens in answers.items()} == {count: count for count in range(1, 9)}


def test_options_are_checked_before_anything_is_loaded():
    with pytest.raises(OptionError, match='Did you mean "max_model_len"'):
        LLM(max_modellen=5)
    with pytest.raises(OptionError, match="at least 2"):
        LLM(max_model_len=0)
    gc.collect()  # the half-made objects go without a word


def test_the_models_own_defaults(llm: LLM):
    from quire.interfaces.setup import default_sampling_params
    from quire.testing.fake_llm import fake_config

    config = fake_config()
    config.facts.generation_config.clear()
    config.facts.generation_config.update(temperature=0.3, max_new_tokens=7, top_k=5, do_sample=True, pad_token_id=0)
    assert default_sampling_params(config) == SamplingParams(temperature=0.3, max_tokens=7, top_k=5)
    assert default_sampling_params(fake_config(generation_config="none")) == SamplingParams()
    mine = llm.get_default_sampling_params()
    mine.temperature = 99.0
    assert llm.get_default_sampling_params().temperature != 99.0


def test_more_sequences_than_the_engine_has_rows_are_refused():
    with fake_llm(max_num_seqs=8) as llm, pytest.raises(RequestError, match="n=9") as caught:
        llm.generate("a", SamplingParams(n=9))
    assert caught.value.param == "n"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(llm: LLM, monkeypatch):
    encoded = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: encoded.append(text) or [1])
    text = "a " * 4000
    for call, prompt in ((llm.generate, text), (llm.chat, [{"role": "user", "content": text}])):
        with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens"):
            call(prompt, GREEDY)
    assert encoded == []
