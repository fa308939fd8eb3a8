"""Ids of tokens that there are not, and headers that are no ids."""

from __future__ import annotations

from typing import Any

from .case import CHAT, JSON, Case, completion, shown

# ids that no vocabulary has, and what is no id
_WRONG: list[Any] = [-1, -(2**31), 2048 * 100, 2**31, 2**31 - 1, 2**63, 2**64, 1.5, "1", True, None, [1], {}]
_KEYS = ["-1", "204800", "2147483648", "9223372036854775808", "1.0", "x", "", " 1", "true", "0x1", "1e3"]

TOKEN_IDS: list[Case] = [
    *(completion(f"prompt with {shown(value)}", prompt=[5, value, 6]) for value in _WRONG),
    *(completion(f"prompts with {shown(value)}", prompt=[[5, 6], [5, value]]) for value in _WRONG if value != [1]),
    *(completion(f"stop_token_ids with {shown(value)}", stop_token_ids=[5, value]) for value in _WRONG),
    *(completion(f"allowed_token_ids with {shown(value)}", allowed_token_ids=[5, value]) for value in _WRONG),
    *(completion(f"logit_bias of {key!r}", logit_bias={key: 1}) for key in _KEYS),
    *(completion(f"logit_bias by {shown(value)}", logit_bias={"5": value})
      for value in (101, -101, 1e308, "1", None, [], True)),
    completion("logit_bias of 1,025 tokens", logit_bias={str(number): 1 for number in range(1025)}),
    completion("no token allowed", allowed_token_ids=[]),
    completion("129 bad words", bad_words=[f"w{number}" for number in range(129)]),
    completion("an empty bad word", bad_words=[""]),
]  # fmt: skip

_GOOD = b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"temperature":9}'
# the body is wrong, so the answer is 400; what the header holds must not appear in it
_IDS = [
    "a b", "a\tb", "x" * 129, "x" * 10_000, "\u00e4", "a;b", "a/b", "../x", "<script>", "%0d%0aX: y", "${jndi:ldap://x}",
    "'; DROP TABLE", "a,b", "a\\b", "{}", "a=b", "@", "#", "\x7f", "~",
]  # fmt: skip
HEADERS = [Case(f"x-request-id {shown(value)}", CHAT, _GOOD, headers=JSON | {"X-Request-Id": value}) for value in _IDS]
