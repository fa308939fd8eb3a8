"""`run(checks)`: runs functions one after the other and prints a line each. Used by the scripts of this folder."""

import os
import warnings
from collections.abc import Callable

URL, KEY, MODEL = os.environ["URL"], os.environ["KEY"], os.environ["MODEL"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": SCHEMA}


def run(*checks: Callable[[], None]) -> int:
    num_failed = 0
    # of classes of the client itself, before anything was asked
    warnings.filterwarnings("ignore", message="Item .* on TypedDict class")
    for check in checks:
        try:
            check()
        except Exception as error:
            num_failed += 1
            print(f"FAIL {check.__name__}: {type(error).__name__}: {error}".replace("\n", " ")[:500])
        else:
            print(f"ok {check.__name__}")
    return int(num_failed > 0)
