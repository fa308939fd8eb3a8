"""What clients of other servers send: at every endpoint each of their fields has an effect, is refused by its name, or
is listed as ignored. Through the real application.

The lists are of the servers' own request types and parameters, so a field is missed here only if it is missing there.
"""

import pytest

from quire.interfaces.gateway.sessions.requests import CHAT_RULES as TURN_RULES
from quire.interfaces.server.anthropic_messages.fields import COUNT_RULES
from quire.interfaces.server.anthropic_messages.fields import RULES as MESSAGES_RULES
from quire.interfaces.server.openai.chat import RULES as CHAT_RULES
from quire.interfaces.server.openai.completions import RULES as COMPLETION_RULES
from quire.interfaces.server.openai.embeddings import RULES as EMBEDDING_RULES
from quire.interfaces.server.openai.known_fields import REFUSED_BY_ALL
from quire.interfaces.server.openai.tokenization import DETOKENIZE_RULES, TOKENIZE_RULES
from quire.interfaces.server.openai_responses.fields import RULES as RESPONSES_RULES

MESSAGES = [{"role": "user", "content": "Hi"}]
ENDPOINTS = {
    "/v1/chat/completions": (CHAT_RULES, {"messages": MESSAGES, "max_tokens": 1}),
    "/v1/completions": (COMPLETION_RULES, {"prompt": "Hi", "max_tokens": 1}),
    "/v1/responses": (RESPONSES_RULES, {"input": "Hi", "store": False, "max_output_tokens": 16}),
    "/v1/messages": (MESSAGES_RULES, {"messages": MESSAGES, "max_tokens": 1}),
    "/v1/messages/count_tokens": (COUNT_RULES, {"messages": MESSAGES}),
    "/v1/embeddings": (EMBEDDING_RULES, {"input": "Hi"}),
    "/tokenize": (TOKENIZE_RULES, {"prompt": "Hi"}),
    "/detokenize": (DETOKENIZE_RULES, {"tokens": [97]}),
}
VLLM = """
    messages prompt model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
    reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens
    documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_prompt_text return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval suffix best_of prompt_embeds guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag logits_processors encoding_format
    dimensions normalize use_activation embed_dtype endianness return_token_strs lora_request lora_name
    speculative_config
"""
SGLANG = """
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details json_schema regex
    ebnf stop_regex no_stop_trim lora_path session_params custom_params custom_logit_processor images_config
    bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid
    extra_key ngram_corpus_id custom_labels separate_reasoning stream_reasoning input_ids image_data return_logprob
    logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs max_new_tokens min_new_tokens
"""
LLAMA_CPP = """
    dynatemp_range dynatemp_exponent repeat_penalty repeat_last_n typical_p top_n_sigma mirostat mirostat_tau
    mirostat_eta dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability
    xtc_threshold adaptive_target adaptive_decay grammar n_predict n_indent n_keep n_discard n_probs min_keep
    t_max_predict_ms id_slot cache_prompt n_cache_reuse return_tokens samplers backend_sampling timings_per_token
    return_progress post_sampling_probs response_fields lora reasoning_format reasoning_in_content
    thinking_forced_open parse_tool_calls reasoning_budget_tokens thinking_budget_tokens input_prefix input_suffix
    input_extra speculative.n_max speculative.n_min speculative.p_min
"""
OLLAMA = "options keep_alive format think raw template system context images truncate num_ctx num_predict tfs_z"
TGI = """
    inputs parameters details decoder_input_details do_sample return_full_text typical_p watermark top_n_tokens
    adapter_id tool_prompt guideline
"""
TABBY = """
    max_length min_length generate_window stop_sequence banned_strings banned_tokens custom_token_bans allowed_tokens
    token_healing temperature_last smoothing_factor top_a tfs typical skew rep_pen penalty_range repetition_range
    repetition_penalty_range rep_pen_range repetition_decay dry_range mirostat_mode add_bos_token ban_eos_token
    negative_prompt regex_pattern grammar_string speculative_ngram cfg_scale guidance_scale max_temp min_temp
    temp_exponent dynatemp_low dynatemp_high xtc_threshold
"""
OPENROUTER = "transforms models route provider plugins usage reasoning top_a verbosity prediction cache_control"
# and what one endpoint here takes under a name that others might be given
DIALECTS = (
    "thinking max_output_tokens stop_sequences instructions previous_response_id background include truncation input"
)
NAMES = sorted(
    {*" ".join([VLLM, SGLANG, LLAMA_CPP, OLLAMA, TGI, TABBY, OPENROUTER, DIALECTS]).split(), *REFUSED_BY_ALL}
)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_field_passes_in_silence(path):
    rules, _ = ENDPOINTS[path]
    assert set(NAMES) - {*rules.implemented, *rules.refused, *rules.ignored} == set()
    assert {*rules.implemented, *rules.refused} & set(rules.ignored) == set()
    assert set(rules.implemented) & set(rules.refused) == set()


def test_a_turn_of_a_session_knows_what_a_chat_knows():
    known = {*CHAT_RULES.implemented, *CHAT_RULES.refused, *CHAT_RULES.ignored}
    assert {*TURN_RULES.implemented, *TURN_RULES.refused, *TURN_RULES.ignored} == known


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_application_does_what_the_tables_say(run, served, path):
    rules, least = ENDPOINTS[path]

    async def main():
        async with served() as server:
            plain = (await server.post(path, least)).status_code
            for name in sorted(rules.refused):
                answer = await server.post(path, {**least, name: "x"})
                assert answer.status_code == 400, name
                if not path.startswith("/v1/messages"):
                    assert answer.json()["error"]["param"] == name
                assert name in answer.text
            neutral = {name: (None, *rule.neutral) for name, rule in rules.refused.items()}
            for i in range(max(map(len, neutral.values()))):
                fields = {name: values[i % len(values)] for name, values in neutral.items()}
                answer = await server.post(path, {**least, **fields})
                assert answer.status_code == plain, answer.text
            answer = await server.post(path, {**least, **dict.fromkeys(rules.ignored, "low")})
            assert answer.status_code == plain, answer.text

    run(main())


@pytest.mark.parametrize("name", ["client_metadata_of_mine", "thread_id", "trace_id", "tag", "version"])
def test_names_of_other_servers_are_no_suggestions(run, served, name):
    """An unknown name is refused where it resembles a field, not because it resembles what is refused anyway."""

    async def main():
        async with served() as server:
            assert (await server.chat(**{name: "x"})).status_code == 200
            assert "temperature" in (await server.chat(temperatur=1)).json()["error"]["message"]

    run(main())


def seen_kwargs(server):
    """What each prompt was rendered with."""
    seen = []
    render = server.engine.renderer.render_prompt

    def render_prompt(chat, **options):
        seen.append(options)
        return render(chat, **options)

    server.engine.renderer.render_prompt = render_prompt
    return seen


EFFORTS = {
    "/v1/chat/completions": lambda effort: {"reasoning_effort": effort},
    "/tokenize": lambda effort: {"reasoning_effort": effort, "prompt": None, "messages": MESSAGES},
    "/v1/responses": lambda effort: {"reasoning": {"effort": effort}},
    "/v1/messages": lambda effort: {"output_config": {"effort": effort}, "thinking": {"type": "adaptive"}},
}


@pytest.mark.parametrize("path", EFFORTS)
def test_the_template_sees_the_effort(run, served, path):
    _, least = ENDPOINTS[path]

    async def main():
        async with served() as server:
            seen = seen_kwargs(server)
            for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
                answer = await server.post(path, {**least, **EFFORTS[path](effort)})
                assert answer.status_code == 200, answer.text
                kwargs = seen.pop()["template_kwargs"]
                assert kwargs["reasoning_effort"] == effort
                # the request of a message says itself whether there is any
                is_on = effort != "none" or path == "/v1/messages"
                assert (kwargs["enable_thinking"], kwargs["thinking"]) == (is_on, is_on)
            wrong = await server.post(path, {**least, **EFFORTS[path]("extreme")})
            assert wrong.status_code == 400
            assert "effort='extreme': must be one of none, minimal, low" in wrong.json()["error"]["message"]

    run(main())


def test_values_for_the_template_win(run, served):
    async def main():
        async with served() as server:
            seen = seen_kwargs(server)
            await server.chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "mood": "calm"})
            assert seen[0]["template_kwargs"] == {
                "reasoning_effort": "none", "enable_thinking": True, "thinking": False, "mood": "calm",
            }  # fmt: skip

    run(main())


def test_no_effort_is_no_thought_where_thoughts_are_counted(run, served):
    async def main():
        from quire.renderer.output_formats import OutputFormats
        from quire.renderer.reasoning_parsers.tags import between_tags

        async with served() as server:
            await server.chat(reasoning_effort="none")
            # special tokens of the fake tokenizer stand in for marks
            server.engine.renderer.output_formats = OutputFormats(
                reasoning=between_tags("marks", "<|user|>", "<|end|>")
            )
            server.engine.renderer.__dict__.pop("thought_marks", None)
            await server.chat(reasoning_effort="none")
            await server.chat(reasoning_effort="none", thinking_token_budget=7)
            await server.chat(reasoning_effort="low")
            budgets = [request.sampling.thinking_token_budget for request in server.requests()]
            assert budgets == [None, 0, 7, None]

    run(main())


@pytest.mark.parametrize("reasoning", [{"effort": 1}, {"effort": ["low"]}, {"summary": True}, {"depth": "deep"}])
def test_reasoning_of_a_response_is_checked(run, served, reasoning):
    async def main():
        async with served() as server:
            answer = await server.post("/v1/responses", {"input": "Hi", "store": False, "reasoning": reasoning})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == f"reasoning.{next(iter(reasoning))}"

    run(main())


def test_tokens_of_a_chat_that_is_continued(run, served):
    """As many as the chat itself has."""
    chat = [*MESSAGES, {"role": "assistant", "content": "The"}]

    async def main():
        async with served() as server:
            fields = {"messages": chat, "continue_final_message": True}
            tokens = (await server.post("/tokenize", fields)).json()["tokens"]
            await server.post("/v1/chat/completions", fields)
            assert tokens == server.requests()[0].prompt_token_ids
            both = await server.post("/tokenize", {**fields, "add_generation_prompt": True})
            assert both.json()["error"]["param"] == "continue_final_message"

    run(main())
