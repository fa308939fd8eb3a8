"""Quantised models as users run them: LLM, the command line and the server."""

import json

import httpx2
import pytest
from tests.support import quantized_checkpoints as writers
from tests.support.gguf_checkpoints import write_gguf
from tests.support.server_process import ServerProcess

from quire import LLM, SamplingParams
from quire.config.model_source import embedded_path
from quire.interfaces.cli.program import main

QUESTIONS = ["What is 3 + 4?", "Spell the word house.", "Count from 3 to 9."]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """The embedded model as a GGUF file, its tokenizer and chat template inside."""
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "embedded.gguf"
    write_gguf(path, embedded_path(), "Q8_0", whole_tokenizer=True, changes={"tokenizer.ggml.eot_token_id": 0})
    return path


def answers(**options):
    with LLM(**options, device="cpu") as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [output.outputs[0].text for output in llm.chat(chats, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected():
    found = answers()
    assert found[0] == "3 + 4 = 7."
    return found


def test_a_gguf_file_answers_as_the_model_it_was_made_of(gguf_file, expected):
    assert answers(model=str(gguf_file)) == expected
    assert answers(model=str(gguf_file.parent), quantization="int8_weight_only") == expected


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantising_at_load_leaves_the_answers(scheme, expected):
    assert answers(quantization=scheme) == expected


def test_a_gptq_checkpoint_answers(tmp_path, expected):
    writers.write_gptq(tmp_path, embedded_path(), group=64)
    assert answers(model=str(tmp_path)) == expected


def test_in_a_process_of_its_own(gguf_file, expected):
    assert answers(model=str(gguf_file), engine_process=True) == expected


def test_the_command_line_takes_a_file(gguf_file, capsys):
    arguments = ["generate", "--model", str(gguf_file), "--chat", QUESTIONS[0], "--temperature", "0", "--json"]
    assert main([*arguments, "--quantization", "int8"]) == 0
    assert "3 + 4 = 7." in json.dumps(json.loads(capsys.readouterr().out))


def test_the_server_takes_a_file(gguf_file):
    command = ["-m", "quire.interfaces.cli", "serve", str(gguf_file), "--port", "0", "--device", "cpu"]
    with ServerProcess(command) as server:
        body = {"model": str(gguf_file), "messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0}
        answer = httpx2.post(f"{server.wait_ready()}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "3 + 4 = 7."
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_mistake_is_one_line(capsys):
    assert main(["generate", "Hi", "--quantization", "int5"]) == 2
    shown = capsys.readouterr().err
    assert "quantization='int5': must be one of int8" in shown
    assert "Traceback" not in shown
