"""docs/coming-from.md, made of the tables of names in `interfaces/compat`."""

from __future__ import annotations

from collections.abc import Iterator

from quire.config.engine_options import EngineOptions
from quire.config.option import Option, options_of
from quire.interfaces.compat.vllm_options import OPTIONS, VALUES, VllmOption
from quire.interfaces.compat.vllm_params import REFUSED
from quire.interfaces.server.options import ServerOptions

NAME = "coming-from.md"
_OPENING = """\
# Coming from vLLM

Made by `python -m tests.pages --write docs` from the tables that the command line and `quire.vllm` use themselves. What
has the same name and meaning on both sides is not listed (docs/options.md has all of ours).

- **A command line**: `vllm serve ...` becomes `quire serve ...`. Options that change nothing here are named once, in
  one line; what cannot be had ends the start with the reason. `VLLM_API_KEY` is read as well.
- **A program**: `import quire.vllm as vllm`, or `from quire.vllm import LLM, SamplingParams`; `LLM`, `AsyncLLM`,
  `LLMEngine`, `EngineArgs`, prompts and outputs have vLLM's names, positions and keywords.
- **A program as it is**: `python -m quire.vllm SCRIPT`, which stands in for the package `vllm`.
- **Logits processors** of vLLM's interface (`vllm.v1.sample.logits_processor`): `LLM(logits_processors=[...])` takes
  the classes, where the engine core is in this process ([below](#logits-processors)).
- **HTTP**: the same addresses and fields for requests that generate; docs/fields.md says of each field what it does,
  or why it is refused. `--metrics-prefix vllm:` gives metrics the names of vLLM's dashboards.

## Logits processors

```python
import torch

from quire.vllm import LLM, LogitsProcessor, SamplingParams, process_dict_updates


class OnlyThese(LogitsProcessor):
    # nothing but the tokens that a request names
    @classmethod
    def validate_params(cls, params):
        if not isinstance((params.extra_args or {}).get("tokens", []), list):
            raise ValueError("tokens must be a list")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.allowed = {}  # by place in the batch

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(self.allowed, batch_update, self.allowed_by)

    def allowed_by(self, params, prompt, output):
        tokens = (params.extra_args or {}).get("tokens")
        return torch.tensor(tokens) if tokens else None

    def apply(self, logits):
        for place, tokens in self.allowed.items():
            kept = logits[place, tokens].clone()
            logits[place] = float("-inf")
            logits[place, tokens] = kept
        return logits


llm = LLM("embedded", logits_processors=[OnlyThese])
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args={"tokens": [70, 71, 72]})
print(llm.generate("Once upon a time", params)[0].outputs[0].token_ids)
```

A class sees each sequence as a batch of one: it is made for every sequence, and told that it was added at place 0. All
are applied before temperature, and not beside drafts. Those of vLLM's second model runner are not built. A class that
raises ends the requests that use it, with its name in `stop_reason`; the others go on. `validate_params` refuses a
request before it starts. What takes long holds up all requests of the program, because they share steps: over one
second a call there is a line with the class' name in the log, and a call of 10 seconds is interrupted and ends its
request. That is done between two instructions of Python; a call into C that never returns cannot be interrupted, and
the program stands still with it.
"""


def markdown() -> str:
    lines = [_OPENING.rstrip()]
    for title, text, rows in (
        ("The same under another name", "", [row for row in OPTIONS if row.ours]),
        ("Nothing to set", "These are taken.", [row for row in OPTIONS if not row.ours and not row.is_refused]),
        ("Not to be had", "The start ends with the reason.", [row for row in OPTIONS if row.is_refused]),
    ):
        lines += ["", f"## {title}", ""]
        if text:
            lines += [text, ""]
        lines += ["| vLLM | Quire | difference |", "|---|---|---|", *map(_row, rows)]
    lines += ["", "## Values", "", "| option | vLLM | Quire |", "|---|---|---|", *_values()]
    lines += ["", "## Sampling parameters", "", "| vLLM | instead |", "|---|---|", *_parameters()]
    return "\n".join(lines) + "\n"


def _row(row: VllmOption) -> str:
    ours = _own()[row.ours].flag if row.ours else ""
    names = ", ".join(f"`{flag}`" for flag in (row.flag, *row.short))
    note = row.note
    if row.accepted and not row.is_refused:
        note += f" ({', '.join(row.accepted)})"
    return f"| {names} | {f'`{ours}`' if ours else '–'} | {note} |"


def _values() -> Iterator[str]:
    for name, values in VALUES.items():
        for theirs, ours in values.items():
            yield f"| `{name}` | `{theirs}` | `{ours}` |"


def _parameters() -> Iterator[str]:
    for name, (_, instead) in REFUSED.items():
        if instead:
            yield f"| `{name}` | {instead} |"


def _own() -> dict[str, Option]:
    return options_of(EngineOptions) | options_of(ServerOptions)
