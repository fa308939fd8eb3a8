"""Regular expressions, choices and grammars that cannot be followed."""

from __future__ import annotations

from .case import Case, chat, completion, shown

_REGEXES = [
    "(", ")", "[", "[a", "a{2,1}", "*", "+a", "?", "(?P<n>a)(?P=n)", r"(a)\1", "(?=a)", "(?!a)", "(?<=a)b",
    "(?<!a)b", r"\p{Nothing}", r"\k<a>", "(?<a", "[z-a]", r"\xZZ",
    "(" * 5000 + "a" + ")" * 5000, "[" * 5000, "a" * 300_000, "(?#", "(?", "a{,", "[[:none",
]  # fmt: skip
_GRAMMARS = [
    "start", 'start: "a', "start: b", ':: "a"', 'start: "a" {', 'a: "x"', "start: start", "root ::= (",
    'start: /(/', "%import nothing", "%ignore", 'start: "a"~-1', 'start: b\nb: c\nc: b',
    'start: "a"\nstart: "b"', "\x00", "start: %json", "start: %json {", 'start: %json {"type": "thing"}',
    'start: %regex {', "start: " + "(" * 5000 + '"a"' + ")" * 5000, 'start: "a"{5,2}', "x" * 300_000,
]  # fmt: skip
_CHOICES = [[], [""], ["a", ""], [1], [None], ["a"] * 100_000]

# what the library takes, and a server must survive
_HEAVY = ["a**", "a{1000000000}", "(a{10000}){10000}", "((a{1000}){1000}){1000}", "(a|aa)*b", "(.*a){30}", "\\" * 19]
_EMPTY = ["start:", 'start: "a" | ']

CASES: list[Case] = [
    *(completion(f"heavy regex {text}", guided_regex=text, allowed=(200, 400)) for text in _HEAVY),
    *(chat(f"grammar {text!r}", guided_grammar=text, allowed=(200, 400)) for text in _EMPTY),
    *(completion(f"regex {shown(text)}", guided_regex=text) for text in _REGEXES),
    *(chat(f"grammar {shown(text)}", guided_grammar=text) for text in _GRAMMARS),
    *(completion(f"choice {shown(choices)}", guided_choice=choices) for choices in _CHOICES),
]
