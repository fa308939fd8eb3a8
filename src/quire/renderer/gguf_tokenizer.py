"""The tokenizer, the special tokens and the chat templates in the metadata of a GGUF file.

Two kinds are read: byte-level BPE (`tokenizer.ggml.model` = gpt2), whose way of cutting a text into words stands in the
file as a name, and SentencePiece's BPE (= llama), whose merges follow from the scores of its pieces. Owns the table of
those names; one that is not in it is refused, because another cut gives other tokens without a word of warning.
Called by Tokenizer, SpecialTokens and ChatTemplates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.gguf_file import GGUFFile
from quire.errors import ModelError, suggestion
from quire.json_files import parse_object
from quire.panics import panics_are_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_ADVICE = "Give tokenizer=FOLDER with the tokenizer.json of the model."
# tokenizer.ggml.token_type
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
_SPACE = "▁"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_letters(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _by_case(digits: str, end: str = "") -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{_UPPER}*{_LOWER}+{end}|{before}{_UPPER}+{_LOWER}*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


@dataclass(frozen=True)
class _Cut:
    """How a text is cut into words before BPE. patterns: what each leaves whole the next one cuts; none: GPT-2's own.
    digits: each digit is a word."""

    patterns: tuple[str, ...] = ()
    digits: bool = False
    composes: bool = False
    # a word that is a token as a whole is not merged from its letters
    takes_whole_words: bool = False
    begins_with_bos: bool = False


_LLAMA3 = _Cut((_by_letters(r"\p{N}{1,3}"),), takes_whole_words=True, begins_with_bos=True)
_QWEN2 = _Cut((_by_letters(r"\p{N}"),), composes=True)
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
# numbers, Chinese and Japanese, and then the rest
_DEEPSEEK3 = _Cut(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
    )
)
# tokenizer.ggml.pre
_CUTS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"), _Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone"), _Cut(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    "dbrx": _Cut((_by_letters(r"\p{N}{1,3}"),)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    "tekken": _Cut((_by_case(r"\p{N}"),), takes_whole_words=True, begins_with_bos=True),
    "gpt-4o": _Cut((_by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "deepseek-v3": _DEEPSEEK3,
}
# Expressions that cut any text in linear time.
KNOWN_PATTERNS = frozenset(pattern for cut in _CUTS.values() for pattern in cut.patterns)
# For files from before the name was written.
_CUT_OF_ARCHITECTURE = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2moe", "qwen3moe"), "qwen2"),
    "llama": "llama-bpe",
}


def read_backend(path: Path) -> Backend | None:
    """The tokenizer of a GGUF file, None if it holds none."""
    file = GGUFFile.read(path)
    whole = file.metadata.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        return _from_json(path, whole)
    kind = file.metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    if kind not in ("gpt2", "llama"):
        raise _refused(path, f"tokenizer.ggml.model={kind!r} is not read, only gpt2 and llama")
    tokens = file.array("tokenizer.ggml.tokens")
    if not tokens:
        raise _refused(path, "tokenizer.ggml.tokens is empty")
    backend = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    _add_tokens(backend, tokens, _types(file, len(tokens)))
    return backend


def read_special(path: Path) -> dict[str, Any]:
    """Arguments for SpecialTokens: names of tokens, and whether a text begins or ends with one."""
    file = GGUFFile.read(path)
    tokens = file.array("tokenizer.ggml.tokens")
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    by_name = {}
    for key, short in keys.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            by_name[f"{short}_token"] = tokens[token_id]
    is_sentencepiece = file.metadata.get("tokenizer.ggml.model") == "llama"
    begins = is_sentencepiece or (
        bool(tokens) and "tokenizer.huggingface.json" not in file.metadata and _cut(file).begins_with_bos
    )
    return {
        "by_name": by_name,
        "add_bos": bool(file.metadata.get("tokenizer.ggml.add_bos_token", begins)),
        "add_eos": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
    }


def read_templates(path: Path) -> dict[str, str]:
    """Chat templates by name."""
    metadata = GGUFFile.read(path).metadata
    prefix = "tokenizer.chat_template"
    texts = {key.removeprefix(f"{prefix}."): text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    if prefix in metadata:
        texts["default"] = metadata[prefix]
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _byte_level(file: GGUFFile, tokens: list[str]) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut = _cut(file)
    merges = [tuple(merge.split(" ", 1)) for merge in file.array("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = _made(file.path, lambda: models.BPE(vocabulary, merges, ignore_merges=cut.takes_whole_words))
    backend = Tokenizer(model)
    if cut.composes:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    types = _types(file, len(tokens))
    scores = file.array("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise _refused(file.path, f"it has {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    has_bytes = _BYTE in types
    merges = _merges(vocabulary, types, scores)
    model = _made(
        file.path,
        lambda: models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes),
    )
    backend = Tokenizer(model)
    has_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocabulary: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins, of all neighbours, the two that give the piece with the best score.

    As a list of merges: every way to join two pieces into a third, the third with the best score first.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        if types[index] in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        for place in range(1, len(piece)):
            left = vocabulary.get(piece[:place])
            right = vocabulary.get(piece[place:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, piece[:place], piece[place:]))
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in a text before it is cut: control tokens are special, a user's are plain text."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (_CONTROL, _USER_DEFINED)
    ]
    if added:
        backend.add_tokens(added)


def _types(file: GGUFFile, count: int) -> list[int]:
    types = file.array("tokenizer.ggml.token_type") or [1] * count
    if len(types) != count:
        raise _refused(file.path, f"it has {count} tokens and {len(types)} types of tokens")
    return types


def _cut(file: GGUFFile) -> _Cut:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        name = _CUT_OF_ARCHITECTURE.get(str(file.metadata.get("general.architecture")))
    if name not in _CUTS:
        raise _refused(
            file.path, f"tokenizer.ggml.pre={name!r} is not among {', '.join(_CUTS)}{suggestion(str(name), _CUTS)}"
        )
    return _CUTS[name]


def _from_json(path: Path, text: str) -> Backend:
    from tokenizers import Tokenizer

    from quire.renderer.tokenizer_gate import unknown_part

    reason = unknown_part(parse_object(text, f"{path}: tokenizer.huggingface.json", advice=_ADVICE))
    if reason:
        raise _refused(path, f"{reason}, and what a GGUF file holds as JSON is not tried first")
    backend: Backend = _made(path, lambda: Tokenizer.from_str(text))
    return backend


def _made(path: Path, make: Any) -> Any:
    try:
        with panics_are_errors:
            return make()
    except Exception as error:  # the library raises bare Exception
        raise _refused(path, f"the tokenizers library does not accept it ({error})") from error


def _refused(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: its tokenizer cannot be read: {reason}. {_ADVICE}")
