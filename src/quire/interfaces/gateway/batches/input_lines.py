"""The lines of a batch, as OpenAI's API has them: JSON objects with custom_id, method, url and body.

Owns what a line must look like. Whether its body is a good request is the endpoint's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

# A line holds a body, and a little around it. Which bodies are too large is the endpoint's business.
MAX_LINE_BYTES = 32 * 2**20 + 4096
MAX_CUSTOM_ID = 512
# A file of another kind would bring one for each line.
MAX_ERRORS = 100
_UTF8_MARK = b"\xef\xbb\xbf"


class InputLine(msgspec.Struct):
    """One request. Other fields than these are not looked at, as in OpenAI's API."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_DECODER = msgspec.json.Decoder(InputLine)


class LineError(msgspec.Struct):
    """Why a line is no request; `errors.data` of a batch holds these."""

    code: str
    line: int | None
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """What a look at all lines has found."""

    num_lines: int
    errors: list[LineError]


def raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line that is not empty. One that is too long comes cut, just above the limit."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            data = data.removeprefix(_UTF8_MARK)
        if data.strip():
            yield number, data
        while len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            data = file.readline(MAX_LINE_BYTES + 1)


def parsed(number: int, data: bytes, urls: Collection[str]) -> InputLine | LineError:
    """One line for one of these endpoints."""
    if len(data) > MAX_LINE_BYTES:
        return LineError("line_too_large", number, f"This line is larger than {MAX_LINE_BYTES:,} bytes.")
    try:
        line = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        return _mismatch(number, str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineError("invalid_json_line", number, "This line is not parseable as valid JSON.")
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        text = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters."
        return LineError("invalid_custom_id", number, text, "custom_id")
    if line.method != "POST":
        return LineError("invalid_method", number, f"method is {line.method[:40]!r}; it must be POST.", "method")
    if line.url not in urls:
        text = f"url is {line.url[:80]!r}; it must be {' or '.join(urls)}."
        return LineError("mismatched_endpoint", number, text, "url")
    if not bytes(line.body).lstrip().startswith(b"{"):
        return LineError("invalid_body", number, "body must be a JSON object, the request itself.", "body")
    return line


def _mismatch(number: int, text: str) -> LineError:
    """msgspec names the field in backquotes, or as a path that begins with $."""
    for name in ("custom_id", "method", "url", "body"):
        if f"field `{name}`" in text:
            return LineError("missing_required_parameter", number, f"{name} is missing.", name)
        if f"$.{name}`" in text:
            kind = "an object" if name == "body" else "a string"
            return LineError(f"invalid_{name}", number, f"{name} must be {kind}.", name)
    return LineError("invalid_json_line", number, "This line is no JSON object.")


def check_input(file: BinaryIO, urls: Collection[str], max_lines: int) -> CheckedInput:
    """Looks at every line once, before any is run. Blocks: call it in a thread."""
    errors: list[LineError] = []
    line_by_id: dict[str, int] = {}
    count = 0
    for number, data in raw_lines(file):
        count += 1
        if count > max_lines:
            text = f"The file has more than {max_lines:,} requests, which is the limit (option max_batch_lines)."
            errors.append(LineError("too_many_requests", number, text))
            break
        line = parsed(number, data, urls)
        if isinstance(line, LineError):
            errors.append(line)
        elif line.custom_id in line_by_id:
            text = f"The custom_id {line.custom_id[:80]!r} is that of line {line_by_id[line.custom_id]} already."
            errors.append(LineError("duplicate_custom_id", number, text, "custom_id"))
        else:
            line_by_id[line.custom_id] = number
        if len(errors) >= MAX_ERRORS:
            break
    if not count:
        errors.append(LineError("empty_file", None, "The file holds no request."))
    return CheckedInput(count, errors)


def good_lines(file: BinaryIO, urls: Collection[str]) -> Iterator[InputLine]:
    """The requests of a file that was checked."""
    for number, data in raw_lines(file):
        line = parsed(number, data, urls)
        if isinstance(line, InputLine):
            yield line
