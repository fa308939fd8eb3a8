"""The program of docs/coming-from.md: a class for logits, and a request that uses it."""

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def test_the_program_of_the_page_samples_nothing_but_the_tokens_that_were_named(capsys):
    program = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    names = {}
    exec(compile(program, "program.py", "exec"), names)
    names["llm"].shutdown()
    tokens = ast.literal_eval(capsys.readouterr().out.strip())
    assert len(tokens) == 8
    assert set(tokens) <= {70, 71, 72}
