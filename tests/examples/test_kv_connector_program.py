"""The program of docs/kv-connectors.md: two engines, and a prompt that is computed by the first alone."""

import asyncio
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "kv-connectors.md"


def test_the_program_of_the_page_fetches_the_prompt_and_gives_the_tokens_of_one_engine(capsys):
    program = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    names = {}
    exec(compile(program, "program.py", "exec"), names)
    printed = capsys.readouterr().out.strip()

    async def by_one_engine():
        alone = names["open_engine"]()
        try:
            return await names["tokens_of"](alone, names["prompt"], 8, names["KVTransfer"]())
        finally:
            alone.close()

    assert printed == f"{asyncio.run(by_one_engine())} {len(names['prompt'])}"
