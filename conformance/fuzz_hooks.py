"""For Schemathesis: right data that the server can also answer.

Drawn at random, nearly every request has two fields that exclude each other, and none would reach the engine. So of a
request that is right by the schema a few fields are kept. One that is to be wrong stays as it is.
"""

import random

import schemathesis

KEPT = {"messages", "prompt", "input", "tokens", "endpoint", "input_file_id", "completion_window"}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# the model's own names and lengths are not in the schema
DROPPED = {"model", "n", "previous_response_id"}
NUM_OTHERS = 2


@schemathesis.hook
def before_call(context, case, kwargs):
    if not case.meta.generation.mode.is_positive or not isinstance(case.body, dict) or "model" not in _names(case):
        return
    draw = random.Random(repr(sorted(case.body)))
    others = [name for name in case.body if name not in KEPT | DROPPED | set(LIMITS)]
    kept = KEPT | set(draw.sample(others, min(NUM_OTHERS, len(others))))
    body = {name: value for name, value in case.body.items() if name in kept}
    for name in LIMITS:
        if isinstance(case.body.get(name), int):
            body[name] = 1 + abs(case.body[name]) % 8
    case.body = body


def _names(case):
    for body in case.operation.body:
        schema = body.definition.get("schema", {})
        return schema.get("properties") or ("model" if "model" in str(schema) else "")
    return ()
