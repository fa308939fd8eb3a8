"""The model's tokenizer: text to token ids, token ids to text and bytes.

Owns a `tokenizers.Tokenizer` and the tables made from it. Must never change the text it is given, nor add tokens that
the model has no embedding for. Called by Renderer alone. Safe to use from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ContextLengthError, ModelError, RequestError
from quire.failpoints import failpoint
from quire.panics import PanicError, panics_are_errors
from quire.renderer import gguf_tokenizer, tokenizer_gate
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.text_decoder import (
    REPLACEMENT,
    ByteDecoder,
    ContinuedCharacter,
    TextDecoder,
    WindowDecoder,
    unfinished_character,
)
from quire.renderer.token_bytes import ByteDecoding, TokenBytes, recognise

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

# Files from which Transformers can build a tokenizer when there is no tokenizer.json.
_OTHER_FORMATS = ("vocab.json", "tokenizer.model", "spiece.model", "vocab.txt", "tekken.json", "tiktoken.model")
_SAMPLE_SIZE = 256
_MAX_BYTES_IN_CHARACTER = 4
# Longer texts take the library's way for batches: it lets other threads run, but costs a short text more.
_SHORT_CHARACTERS = 2000
_LINE_END = "\n"
# Texts of which one at least leaves tokens behind: some tokenizers drop white space, some what they do not know.
_PROBES = (_LINE_END, "a", "0", ".")
_SURROGATE = "The text holds a lone surrogate, which is no valid Unicode. Remove it."
# Unicode's normal forms compose at most so many characters into one.
_MAX_COMPOSED = 4


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, backend: Backend, special: SpecialTokens, *, is_known: bool = True) -> None:
        self._backend = backend
        # to be harmless (`tokenizer_gate`); any other goes where it holds no lock, and never onto an event loop
        self.is_known = is_known
        self.special = special
        # A tokenizer.json may carry limits from its training; a cut prompt would be a wrong one.
        backend.no_truncation()
        backend.no_padding()
        _add_declared_tokens(backend, special)
        _apply_bos_and_eos(backend, special)
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        self._decoding = _verified_decoding(backend)

    @classmethod
    def from_folder(cls, folder: Path, *, trust_remote_code: bool = False) -> Tokenizer | None:
        """The tokenizer of a checkpoint (a folder, or a GGUF file); None if it holds none."""
        if folder.is_file():
            backend = gguf_tokenizer.read_backend(folder)
            return None if backend is None else cls(backend, SpecialTokens.read(folder))
        file = folder / "tokenizer.json"
        if file.is_file():
            is_known = tokenizer_gate.check(file)
            return cls(_read_backend(file), SpecialTokens.read(folder), is_known=is_known)
        if any((folder / name).is_file() for name in _OTHER_FORMATS):
            return cls(_convert_backend(folder, trust_remote_code), SpecialTokens.read(folder))
        return None

    # ------------------------------------------------------------------------------------------ text to tokens

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Special-token strings in the text become special tokens, as in Transformers."""
        if not isinstance(text, str):
            raise RequestError(f"text: {type(text).__name__} given, must be one text.", param="text")
        # made anew whenever it is asked for: of a prompt of megabytes a second list would keep everybody waiting
        ids: list[int] = self._encoding_of(text, self._backend.encode_batch_fast, add_special_tokens).ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Two texts as one prompt, as models that compare them were trained, and the position from which on its tokens
        are of the second kind; 0: the model knows no kinds."""
        try:
            with panics_are_errors:
                # the batch lets other threads run
                [encoding] = self._backend.encode_batch([(first, second)], add_special_tokens=True)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(_SURROGATE) from error
        except PanicError as error:
            raise _failed(error) from error
        kinds: list[int] = encoding.type_ids
        return list(encoding.ids), kinds.index(1) if 1 in kinds else 0

    def _encoding_of(self, text: str, encode_batch: Callable[..., Any], add_special_tokens: bool = False) -> Encoding:
        failpoint("in_tokenise")
        try:
            with panics_are_errors:
                if len(text) <= _SHORT_CHARACTERS and self.is_known:
                    return self._backend.encode(text, add_special_tokens=add_special_tokens)
                encodings: list[Encoding] = encode_batch([text], add_special_tokens=add_special_tokens)
                return encodings[0]
        except (UnicodeEncodeError, TypeError) as error:
            # half of a surrogate pair: JSON can carry one, UTF-8 cannot
            raise RequestError(_SURROGATE) from error
        except PanicError as error:
            raise _failed(error) from error

    def encode_pieces(self, pieces: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """One text whose parts are tokenised one by one, so that no special token goes across."""
        if len(pieces) == 1:
            return self.encode(pieces[0], add_special_tokens=add_special_tokens)
        before, after = self.around if add_special_tokens else ([], [])
        first = self.encode(pieces[0], add_special_tokens=False)
        return [*before, *first, *(i for piece in pieces[1:] for i in self.encode_continuation(piece)), *after]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Special tokens that stand before and behind a text. RequestError: that cannot be told."""
        for probe in _PROBES:
            whole, bare = (self.encode(probe, add_special_tokens=asked) for asked in (True, False))
            if not whole:
                return [], []
            starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
            if bare and (start := next(starts, None)) is not None:
                return whole[:start], whole[start + len(bare) :]
        raise RequestError(
            "add_special_tokens=true: where this model's tokenizer puts its special tokens cannot be told, because it "
            "leaves nothing of a text as it is. Send the prompt with add_special_tokens=false.",
            param="add_special_tokens",
        )

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens without special ones around them, and the characters from which to which each goes."""
        encoding = self._encoding_of(text, self._backend.encode_batch)
        return list(encoding.ids), list(encoding.offsets)

    def encode_continuation(self, text: str) -> list[int]:
        """As it stands in the middle of a text. SentencePiece puts a space before the first word, which is not wanted
        here: then the text is tokenised behind a line end, whose own tokens are taken off again."""
        if self._decoding is None or self._decoding.bytes_of_first is self._decoding.bytes_of:
            return self.encode(text, add_special_tokens=False)
        opening = self.encode(_LINE_END, add_special_tokens=False)
        whole = self.encode(_LINE_END + text, add_special_tokens=False)
        if whole[: len(opening)] == opening:
            return whole[len(opening) :]
        return self.encode(text, add_special_tokens=False)

    def check_can_fit(self, text: str, max_tokens: int, param: str) -> None:
        """Refuses what cannot fit even if each token were the longest: tokenising it may take gigabytes."""
        self.check_size(len(text), max_tokens, param)

    def check_size(self, num_characters: int, max_tokens: int, param: str) -> None:
        """The same for a text of which not everything has come."""
        if num_characters <= max(_SHORT_CHARACTERS, max_tokens):
            return
        if num_characters <= max_tokens * self._most_characters_of_token:
            return
        raise ContextLengthError(
            f"This model's maximum context length is {max_tokens} tokens, which hold at most "
            f"{max_tokens * self._most_characters_of_token} characters. However, {num_characters} characters were "
            f"given in your {param}. Please reduce the length of the {param}.",
            param=param,
        )

    @cached_property
    def _most_characters_of_token(self) -> int:
        """Of the text that a token stands for. In a byte-level vocabulary a letter is a byte, so this is no less."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._backend.normalizer is None else longest * _MAX_COMPOSED

    def id_of(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def piece_of(self, token_id: int) -> str:
        """As it stands in the vocabulary; empty where nothing has this number."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def has_token_bytes(self) -> bool:
        """Whether a token stands for the same bytes anywhere inside a text."""
        return self._decoding is not None

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    # ------------------------------------------------------------------------------------------ tokens to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The same text as a stream of the same tokens without a prompt."""
        decoder = self.open_decoder((), skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.finish()

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for inside a text; special tokens are their own text."""
        if self._decoding is None:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return self._bytes_by_token[token_id]

    def open_decoder(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for the text that follows a prompt."""
        decoding = self._decoding
        if decoding is None:
            return WindowDecoder(self._backend_decode(skip_special_tokens), prompt_token_ids)
        table = self._visible_bytes_by_token if skip_special_tokens else self._bytes_by_token
        tail = self._open_character_of(prompt_token_ids)
        if tail:
            return ContinuedCharacter(table, tail)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if decoding.bytes_of_first is decoding.bytes_of or any(
            token_id not in skipped for token_id in prompt_token_ids
        ):
            return ByteDecoder(table)
        return ByteDecoder(table, first=self._first_bytes_by_token.__getitem__, is_skipped=skipped.__contains__)

    def _open_character_of(self, prompt_token_ids: Sequence[int]) -> bytes:
        data = b""
        for token_id in reversed(prompt_token_ids[-_MAX_BYTES_IN_CHARACTER:]):
            data = self._bytes_by_token[token_id] + data
        return unfinished_character(data)

    def _backend_decode(self, skip_special_tokens: bool) -> Callable[[list[int]], str]:
        backend = self._backend

        def decode(token_ids: list[int]) -> str:
            try:
                with panics_are_errors:
                    if self.is_known and len(token_ids) <= _SHORT_CHARACTERS:
                        return str(backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
                    return str(backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])
            except PanicError as error:
                raise _failed(error) from error

        return decode

    @cached_property
    def _bytes_by_token(self) -> TokenBytes:
        assert self._decoding is not None
        return TokenBytes(self._backend.id_to_token, self._decoding.bytes_of)

    @cached_property
    def _first_bytes_by_token(self) -> TokenBytes:
        assert self._decoding is not None
        return TokenBytes(self._backend.id_to_token, self._decoding.bytes_of_first)

    @cached_property
    def _visible_bytes_by_token(self) -> TokenBytes:
        assert self._decoding is not None
        return TokenBytes(self._backend.id_to_token, self._decoding.bytes_of, self.special_ids)


def _failed(error: PanicError) -> RequestError:
    return RequestError(f"text: the model's tokenizer fails on it ({error}). Send another text, or token ids.")


def _read_backend(file: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        with panics_are_errors:
            return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file}: is no tokenizer that the tokenizers library can read ({error}).") from error


def _convert_backend(folder: Path, trust_remote_code: bool) -> Backend:
    """Older formats go through Transformers, which takes seconds to import and is asked only here."""
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer

    try:
        with panics_are_errors:
            loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a foreign tokenizer's code raises
        raise ModelError(
            f"{folder}: there is no tokenizer.json, and Transformers cannot load it either ({error})."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(
            f"{folder}: there is no tokenizer.json, and {type(loaded).__name__} is written in Python alone. "
            "Convert it once to a tokenizer.json, or give tokenizer= a folder that has one."
        )
    return backend


def _add_declared_tokens(backend: Backend, special: SpecialTokens) -> None:
    """Tokens that only tokenizer_config.json declares, and the mark `special` on those that it names."""
    from tokenizers import AddedToken

    for token_id, declared in sorted(special.added.items()):
        content = declared.get("content")
        # Only at its declared id: any other would be a row of the embedding that means something else.
        if content and backend.token_to_id(content) is None and token_id == backend.get_vocab_size():
            flags = {name: bool(declared.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(content, special=bool(declared.get("special")), **flags)])
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in special.all:
        token = known.get(content)
        if (token is not None and token.special) or backend.token_to_id(content) is None:
            continue
        token = token or AddedToken(content, normalized=False)
        token.special = True
        backend.add_special_tokens([token])


def _apply_bos_and_eos(backend: Backend, special: SpecialTokens) -> None:
    """`add_bos_token` and `add_eos_token` count only where tokenizer.json does not say what stands around a text.

    Transformers 5 reads it so too; checkpoints carry these flags from times when they meant something else.
    """
    if backend.post_processor is not None or not (special.add_bos or special.add_eos):
        return
    from tokenizers.processors import TemplateProcessing

    bos = special.by_name.get("bos_token") if special.add_bos else None
    eos = special.by_name.get("eos_token") if special.add_eos else None
    around = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    if any(token_id is None for _, token_id in around):
        return
    single = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
    backend.post_processor = TemplateProcessing(single=single, special_tokens=around)


def _verified_decoding(backend: Backend) -> ByteDecoding | None:
    """The fast way, if it says the same as the tokenizer on a sample of pairs of tokens."""
    if backend.decoder is None:
        return None
    decoding = recognise(json.loads(backend.decoder.__getstate__()))
    size = backend.get_vocab_size()
    if decoding is None or size == 0:
        return None
    for number in range(_SAMPLE_SIZE):
        pair = [number * size // _SAMPLE_SIZE, (number * 7919 + 1) % size]
        tokens = [backend.id_to_token(token_id) for token_id in pair]
        if None in tokens:
            continue
        first = str(tokens[0])
        second = str(tokens[1])
        text = (decoding.bytes_of_first(first) + decoding.bytes_of(second)).decode("utf-8", "replace")
        # What is no valid text may be replaced in different ways.
        if REPLACEMENT not in text and text != backend.decode(pair, skip_special_tokens=False):
            return None
    return decoding
