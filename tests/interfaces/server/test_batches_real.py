"""A batch outlives its server: killed in the middle, the next one goes on where the results end."""

import json
import signal
import time

import openai
import pytest
from tests.support.server_process import ServerProcess

NUM_LINES = 60


def server_on(folder):
    storage = f"sqlite:///{folder}/server.db"
    command = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--storage-url", storage]
    return ServerProcess([*command, "--max-batch-concurrency", "4"])


def client_of(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def until(client, batch, is_enough):
    while not is_enough(batch := client.batches.retrieve(batch.id)):
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        time.sleep(0.05)
    return batch


@pytest.mark.nightly
def test_a_killed_server_is_followed_by_one_that_goes_on(tmp_path):
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Number {number} is", "max_tokens": 60, "seed": number, "ignore_eos": True},
        }
        for number in range(NUM_LINES)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    with server_on(tmp_path) as first:
        client = client_of(first.wait_ready(300))
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = until(client, batch, lambda one: one.request_counts.completed >= 10)
        assert batch.status == "in_progress"
        first.signal(signal.SIGKILL)
        first.wait()
    (part,) = [
        path for path in (tmp_path / "server-files").iterdir() if path.name.startswith("file-") and path.name != file.id
    ]
    whole_lines = part.read_bytes().rpartition(b"\n")[0] + b"\n"
    assert whole_lines.count(b"\n") >= 10
    with server_on(tmp_path) as second:
        client = client_of(second.wait_ready(300))
        batch = until(client, batch, lambda one: one.status == "completed")
        assert batch.request_counts.completed == NUM_LINES
        content = client.files.content(batch.output_file_id).content
        # what was there is there as it was, and each line once
        assert content.startswith(whole_lines)
        results = [json.loads(line) for line in content.splitlines()]
        assert sorted(one["custom_id"] for one in results) == sorted(line["custom_id"] for line in lines)
        assert all(one["response"]["body"]["usage"]["completion_tokens"] == 60 for one in results)
        second.signal()
        assert second.wait() == 0
