"""lm-evaluation-harness, through /v1/completions (scores of choices, and generation) and /v1/chat/completions."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from reporting import MODEL, URL, run

ROWS = [
    {"question": "Once upon a", "good": " time", "bad": " zxqv"},
    {"question": "The dog and the", "good": " cat", "bad": " wqxz"},
]
SCORES = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["{{{{good}}}}", "{{{{bad}}}}"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
TEXTS = """
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{good}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""
FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "rows.json").write_text("\n".join(json.dumps(row) for row in ROWS))
for name, text in (("scores", SCORES), ("texts", TEXTS)):
    (FOLDER / f"{name}.yaml").write_text(text.format(file=FOLDER / "rows.json"))


def evaluate(kind: str, path: str, task: str, **options: object) -> dict:
    arguments = {"model": MODEL, "base_url": URL + path, "num_concurrent": 1, "max_retries": 1, **options}
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    done = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=[task], task_manager=manager,
        apply_chat_template=kind == "local-chat-completions", bootstrap_iters=0,
    )  # fmt: skip
    return done["results"][task]


def choices_by_their_scores():
    # scores of an echo, of tokens that the harness makes itself
    options = {"tokenizer_backend": "huggingface", "tokenizer": os.environ["TOKENIZER"]}
    found = evaluate("local-completions", "/completions", "tiny_choice", **options)
    assert found["acc,none"] == 1.0, found


def texts_of_completions():
    evaluate("local-completions", "/completions", "tiny_text", tokenizer_backend="none", tokenized_requests=False)


def texts_of_chats():
    evaluate("local-chat-completions", "/chat/completions", "tiny_text")


SCORED = [choices_by_their_scores] if os.environ.get("TOKENIZER") else []
raise SystemExit(run(*SCORED, texts_of_completions, texts_of_chats))
