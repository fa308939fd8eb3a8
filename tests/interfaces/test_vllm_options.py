"""What was written for vLLM is understood, or refused with the reason."""

import re
import shlex
from pathlib import Path

import pytest

from quire.config.engine_options import EngineOptions
from quire.config.option import options_of
from quire.errors import OptionError
from quire.interfaces.cli.program import main
from quire.interfaces.compat.vllm_names import arguments_from_vllm, options_from_vllm
from quire.interfaces.compat.vllm_options import OPTIONS, VALUES
from quire.interfaces.server.event_stream import KEEP_ALIVE_SECONDS
from quire.interfaces.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
OURS = options_of(EngineOptions) | options_of(ServerOptions)


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.name)
def test_a_row_leads_to_an_option_or_says_why_there_is_none(row):
    if row.ours:
        assert row.ours in OURS
    else:
        assert row.name not in OURS
        assert row.note


def test_no_name_has_two_rows():
    names = [row.name for row in OPTIONS]
    assert len(names) == len(set(names))


def test_pages_that_are_named_are_there():
    named = {page for row in OPTIONS for page in re.findall(r"docs/[\w-]+\.md", row.note)}
    assert len(named) > 3
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("option", VALUES)
def test_values_mean_values_of_ours(option):
    for theirs, value in VALUES[option].items():
        assert theirs not in OURS[option].choices
        OURS[option].check(value)


@pytest.mark.parametrize(
    "args", [["--structured-outputs-config.disable_any_whitespace=true"],
             ["--structured-outputs-config.disable_any_whitespace", "True"],
             ["--structured-outputs-config", '{"disable_any_whitespace": true}']],
)  # fmt: skip
def test_a_key_that_cannot_be_had(args):
    with pytest.raises(OptionError, match=r"disable_any_whitespace: .*a request says it"):
        arguments_from_vllm(["m", *args])
    taken = [arg.replace("true", "false").replace("True", "False") for arg in args]
    assert "structured_outputs_config" in arguments_from_vllm(["m", *taken])[1].options


def test_a_command_line_in_our_words():
    args, unused = arguments_from_vllm(
        ["m", "--dtype", "half", "-tp", "2", "--reasoning-parser=qwen3", "--enable-chunked-prefill",
         "--structured-outputs-config.backend", "auto", "--allowed-origins", '["http://a", "http://b"]',
         "--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3",
         "--cudagraph-capture-sizes", "1", "2", "--no-enable-log-requests", "--", "--dtype"],
    )  # fmt: skip
    assert args == [
        "m", "--dtype", "float16", "--tensor-parallel-size=2", "--reasoning-parser", "think",
        "--allowed-origin=http://a", "--allowed-origin=http://b",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}', "--", "--dtype",
    ]  # fmt: skip
    assert set(unused.options) == {
        "enable_chunked_prefill", "structured_outputs_config", "cudagraph_capture_sizes", "enable_log_requests",
    }  # fmt: skip
    assert "\n" not in unused.line()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill: an option of vLLM that cannot be had here"),
        (["--hf-config-path", "elsewhere"], "hf_overrides lays other values over it"),
        (["--runner", "draft"], "runner=draft"),
        (["--kv-transfer-config.kv_role", "kv_both"], "kv_store moves and keeps blocks"),
        (["--tokenizer-revision", "v2"], "revision is that of all files"),
        (["--sse-keep-alive-interval", "5"], f"every {KEEP_ALIVE_SECONDS:.0f} seconds"),
        (["--runner"], "--runner: expects a value"),
    ],
)
def test_what_cannot_be_had_says_why(args, words):
    with pytest.raises(OptionError, match=words):
        arguments_from_vllm(args)


def test_keywords_in_our_words():
    ours, unused = options_from_vllm(
        {"model": "m", "dtype": "half", "enable_chunked_prefill": True, "hf_overrides": {}, "tokenizer": None,
         "max_num_queued_reqs": 3, "tool_call_parser": "qwen3_xml", "max_model_len": -1},
    )  # fmt: skip
    assert ours == {
        "model": "m", "dtype": "float16", "max_num_queued_requests": 3, "tool_call_parser": "qwen3_coder",
        "max_model_len": "auto", "hf_overrides": {},
    }  # fmt: skip
    assert list(unused.options) == ["enable_chunked_prefill"]
    over = options_from_vllm({"override_generation_config": {"top_p": 0.5}, "spec_method": "ngram", "spec_tokens": 3})
    assert over[0] == {
        "generation_config": '{"top_p": 0.5}', "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }  # fmt: skip
    assert options_from_vllm({"skip_tokenizer_init": True, "language_model_only": False})[0] == {"tokenizer": "none"}
    with pytest.raises(OptionError, match="HF_TOKEN") as caught:
        options_from_vllm({"hf_token": "hf_of-somebody"})
    assert "somebody" not in str(caught.value)
    assert options_from_vllm({"cpu_offload_gb": 0.0})[0] == {}


# as they stand in vLLM's documents and in what people have written down, older versions' too
PASTED = {
    """--hf-overrides '{"architectures": ["A"]}'""": ["--hf-overrides", '{"architectures": ["A"]}'],
    "--hf-overrides.text_config.rope_theta 7": ['--hf-overrides={"text_config": {"rope_theta": 7}}'],
    "--rope-theta 5000000": ['--hf-overrides={"rope_theta": 5000000}'],
    "-tp 2 -O3 --max-model-len 32k": ["--tensor-parallel-size=2", "--max-model-len", "32k"],
    "-O.level=2 -cc.mode=3": [],
    "--limit-mm-per-prompt image=2,video=0": ["--limit-mm-per-prompt", '{"image": 2, "video": 0}'],
    """--limit-mm-per-prompt '{"image": 2}'""": ["--limit-mm-per-prompt", '{"image": 2}'],
    """--override-generation-config '{"top_p": 0.5}'""": ['--generation-config={"top_p": 0.5}'],
    "--spec-method ngram --spec-tokens 4": ['--speculative-config={"method": "ngram", "num_speculative_tokens": 4}'],
    "--speculative-model m --num-speculative-tokens 2": [
        '--speculative-config={"model": "m", "num_speculative_tokens": 2}'
    ],
    """--speculative-config '{"method": "mtp", "draft_tensor_parallel_size": 1}'""": [
        "--speculative-config",
        '{"method": "mtp"}',
    ],
    """--speculative-config '{"method": "mtp", "draft_tensor_parallel_size": 2}'""": [
        "--speculative-config",
        '{"method": "mtp", "draft_tensor_parallel_size": 2}',
    ],
    "--lora-module a=/x --lora-modules b=/y c=/z": [
        "--lora-modules=a=/x",
        "--lora-modules=b=/y",
        "--lora-modules=c=/z",
    ],
    "--language-model-only --skip-tokenizer-init": [
        '--limit-mm-per-prompt={"image": 0, "video": 0}',
        "--tokenizer=none",
    ],
    "--no-skip-tokenizer-init": [],
    "--enable-reasoning --reasoning-parser deepseek_r1": ["--reasoning-parser", "deepseek_r1"],
    "--num-scheduler-steps 8 --use-v2-block-manager --disable-frontend-multiprocessing": [],
    "--load-format runai_streamer --model-loader-extra-config '{}'": ["--load-format", "safetensors"],
    "--async-scheduling --no-enable-prefix-caching": ["--async-scheduling", "--no-enable-prefix-caching"],
}


@pytest.mark.parametrize("line", PASTED)
def test_a_line_that_is_pasted(line):
    assert arguments_from_vllm(shlex.split(line))[0] == PASTED[line]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", "--enable-lora"], "no such option. quire plan --help lists all"),
        (["serve", "--enforce-eagre"], 'Did you mean "--enforce-eager"?'),
        (["serve", "--served-model-name", "a", "b"], "Give the model first"),
    ],
)
def test_a_suggestion_does_not_mislead(args, words, capsys):
    assert main(args) == 2
    assert words in capsys.readouterr().err
