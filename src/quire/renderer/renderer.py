"""Everything that a user writes becomes tokens here, and tokens become what a user reads (4.3.2).

Owns the tokenizer and the chat templates of one model. Never talks to the engine. Called by LLM, AsyncLLM and the
server; safe to use from several threads, as each output has a TextStream of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from quire.config import EngineConfig
from quire.config.process_memory import give_back_freed
from quire.errors import ContextLengthError, RequestError
from quire.messages import Media
from quire.renderer.chat_template import DOCUMENT, QUERY, ChatTemplates, NotBriefError, pairs_texts
from quire.renderer.growing_text import GrowingText, PieceEncoder
from quire.renderer.image_parts import NOTHING_FETCHED, Sources, placed, take_media
from quire.renderer.image_processor import ImageProcessor, OpenedMedia
from quire.renderer.output_formats import AUTO, OutputFormats
from quire.renderer.prompt_vectors import FIELD, PLACEHOLDER, PromptVectors
from quire.renderer.sounds import SoundProcessor
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.stop_strings import StopMatcher
from quire.renderer.text_decoder import SilentDecoder, TextDecoder
from quire.renderer.text_stream import TextStream
from quire.renderer.tokenizer import Tokenizer
from quire.renderer.vector_parts import VectorParts, has_vectors, take_vectors
from quire.sampling_params import SamplingParams
from quire.thought_marks import ThoughtMarks

Chat = Sequence[Mapping[str, Any]]
# Tokenised in a few milliseconds.
_MOST_BRIEF_CHARACTERS = 16_000
# of a part of a chat, where nobody says how many tokens a model takes
_MOST_VECTORS = 2**20


@dataclass(slots=True)
class RenderedPrompt:
    """What goes to the engine; `text` is what was tokenised."""

    token_ids: list[int]
    media: list[Media] = field(default_factory=list)
    text: str | None = None
    # position from which on its tokens are those of a second text; 0: it is one text
    second_start: int = 0


class Renderer:
    """Text and chats to tokens; tokens to text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        templates: ChatTemplates | None = None,
        eos_token_ids: Sequence[int] = (),
        output_formats: OutputFormats | None = None,
        *,
        special_tokens_in_messages: bool = False,
        images: ImageProcessor | None = None,
        vectors: PromptVectors | None = None,
    ) -> None:
        # None: the model does not listen
        self.sounds: SoundProcessor | None = None
        # None: the model takes text only
        self._images = images
        # None: nobody may give some in the place of tokens
        self._vectors = vectors
        self._marks_in_messages = special_tokens_in_messages
        self._tokenizer = tokenizer
        self._templates = templates
        # how this model calls tools and how it thinks
        self.output_formats = output_formats or OutputFormats()
        # config.json and generation_config.json name some, tokenizer_config.json another: all of them end an answer
        self.eos_token_ids = list(dict.fromkeys((*eos_token_ids, *_own_eos(tokenizer))))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Renderer:
        if config.tokenizer_path is None:
            return cls(None, eos_token_ids=config.facts.eos_token_ids)
        renderer = cls.from_folder(
            Path(config.tokenizer_path),
            template_folders=(config.facts.path,),
            chat_template=config.chat_template,
            eos_token_ids=config.facts.eos_token_ids,
            trust_remote_code=config.worker.trust_remote_code,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            special_tokens_in_messages=config.special_tokens_in_messages,
        )
        renderer._images = ImageProcessor.find(
            config.facts.path,
            config.facts.hf_config,
            config.images.max_images,
            config.images.max_num_encoder_tokens,
            config.images.videos,
            renderer._tokenizer,
        )
        if renderer._images is not None and renderer._images.is_whole and config.worker.model_impl == "transformers":
            renderer._images = None  # attention is causal there, and its images want another
        renderer.sounds = SoundProcessor.find(config.facts.path, config.facts.hf_config)
        if config.worker.enable_prompt_embeds:
            renderer._vectors = PromptVectors(config.facts.embedding_size, config.worker.dtype)
        if renderer._templates is not None:
            renderer._templates.prepare()
        # to read a large vocabulary takes about as much again as to keep it
        give_back_freed()
        return renderer

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        template_folders: Sequence[Path] = (),
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        trust_remote_code: bool = False,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        special_tokens_in_messages: bool = False,
    ) -> Renderer:
        """A renderer from files alone. Without a tokenizer it still serves prompts of token ids."""
        tokenizer = Tokenizer.from_folder(folder, trust_remote_code=trust_remote_code)
        special = tokenizer.special if tokenizer is not None else SpecialTokens()
        templates = ChatTemplates.find((folder, *template_folders), special, chat_template)
        formats = OutputFormats.choose(
            templates.texts.values() if templates is not None else (), tool=tool_call_parser, reasoning=reasoning_parser
        )
        return cls(tokenizer, templates, eos_token_ids, formats, special_tokens_in_messages=special_tokens_in_messages)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_known_tokenizer(self) -> bool:
        """It may run on an event loop."""
        return self._tokenizer is not None and self._tokenizer.is_known

    @property
    def has_chat_template(self) -> bool:
        return self._templates is not None

    @property
    def chat_template_text(self) -> str:
        """Of a chat without tools; empty: there is none."""
        return self._templates.texts.get("default", "") if self._templates is not None else ""

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts of tokens that `skip_special_tokens` leaves out."""
        return self._tokenizer.special_texts if self._tokenizer is not None else frozenset()

    @property
    def named_special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and so on, as far as the tokenizer has them."""
        return {} if self._tokenizer is None else self._tokenizer.special.by_name

    @property
    def sees_images(self) -> bool:
        return self._images is not None

    def close(self) -> None:
        """Ends what works for it beside this process; it may be used again."""
        if self._images is not None:
            self._images.close()
        if self.sounds is not None:
            self.sounds.processes.close()

    def media_sources(self, chat: str | Chat, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Sources:
        """What stands for images and videos in a chat, or beside a text, and where: one in memory, a data URL, or a URL
        that must be fetched before this is rendered. No more than a request may have."""
        if self._images is None:
            return Sources()
        sources = placed(images, videos) if isinstance(chat, str) else take_media(chat)[1]
        self._images.check_limits(sources)
        return sources

    @staticmethod
    def has_vectors(chat: str | Chat) -> bool:
        """Whether parts of it stand in the place of tokens."""
        return not isinstance(chat, str) and has_vectors(chat)

    # ------------------------------------------------------------------------------------------ to tokens

    def render_prompt(
        self,
        chat: str | Chat,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        is_brief: bool = False,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        fetched: Mapping[str, bytes] = NOTHING_FETCHED,
        sound: Any = None,
    ) -> RenderedPrompt:
        """A text is tokenised as it is; a chat goes through the model's template first.

        add_special_tokens: by default yes for a text, no for a chat, whose template has already written them.
        chat_template: a file or a text, instead of the model's.
        max_tokens: a text that cannot be so few tokens is refused before it is tokenised.
        is_brief: NotBriefError instead of what takes more than a few milliseconds.
        images, videos: those that the placeholders of a text stand for; a chat brings its own.
        fetched: what stands behind those of their URLs that are no data URLs.
        sound: what a text begins with; its special tokens stand in it.
        """
        param = "prompt" if isinstance(chat, str) else "messages"
        tokenizer = self._needed_tokenizer(param)
        if is_brief and (chat_template is not None or not tokenizer.is_known):
            raise NotBriefError
        vectors = None
        if self.has_vectors(chat):
            vectors = take_vectors(chat)
            chat = vectors.chat
        sources = placed(images, videos)
        if self._images is not None and not isinstance(chat, str):
            chat, sources = take_media(chat)
        if vectors is not None and sources:
            reason = "messages: images and videos do not go together with prompt_embeds. Send one of them."
            raise RequestError(reason, param=param)
        if (sources or vectors is not None) and is_brief:
            raise NotBriefError
        if isinstance(chat, str):
            pieces = [chat]
            add_special_tokens = add_special_tokens is not False and sound is None
        else:
            templates = self._needed_templates() if chat_template is None else self._templates_of(chat_template)
            pieces = templates.render_pieces(
                chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
                marks=() if self._marks_in_messages else self.special_tokens,
                is_brief=is_brief,
                takes_images=bool(sources),
            )
        media = self._opened(sources, fetched)
        if media is not None:
            pieces = media.set_apart(pieces, tokenizer)
        text = "".join(pieces) if vectors is None else vectors.text_of(pieces)
        if is_brief and len(text) > _MOST_BRIEF_CHARACTERS:
            raise NotBriefError
        if max_tokens is not None:
            tokenizer.check_can_fit(text, max_tokens, param)
        if vectors is not None:
            if add_special_tokens:
                raise RequestError(
                    "add_special_tokens: not with prompt_embeds. Leave it out.", param="add_special_tokens"
                )
            return self._with_vectors(vectors, pieces, text, tokenizer, max_tokens)
        token_ids = tokenizer.encode_pieces(pieces, add_special_tokens=bool(add_special_tokens))
        return self._with_media(RenderedPrompt(token_ids, text=text), media, max_tokens, sound)

    def render_tokens(
        self,
        token_ids: list[int],
        images: Sequence[Any],
        max_tokens: int | None,
        fetched: Mapping[str, bytes] = NOTHING_FETCHED,
        sound: Any = None,
        videos: Sequence[Any] = (),
    ) -> RenderedPrompt:
        """A prompt of tokens in which each image and each video has one placeholder, or which begins with a sound."""
        media = self._opened(placed(images, videos), fetched)
        if media is not None:
            token_ids = media.with_times(token_ids, self._tokenizer)
        return self._with_media(RenderedPrompt(token_ids), media, max_tokens, sound)

    def render_vectors(self, given: Any, max_tokens: int, where: str = FIELD) -> RenderedPrompt:
        """A prompt of vectors: a tensor, an array, or base64 of a saved tensor. Takes long where there are many."""
        if self._vectors is None:
            raise RequestError(
                f"{FIELD}: vectors are not taken here. Start the engine with enable_prompt_embeds "
                "(--enable-prompt-embeds), or send text or tokens.",
                param=FIELD,
            )
        media = self._vectors.media(given, max_tokens, where)
        return RenderedPrompt([PLACEHOLDER] * media.length, [media])

    def _opened(self, sources: Sources, fetched: Mapping[str, bytes]) -> OpenedMedia | None:
        if not sources:
            return None
        if self._images is None:
            raise RequestError("multi_modal_data: this model takes text only. Leave it out.", param="multi_modal_data")
        return self._images.open(sources.fetched(fetched))

    def _with_vectors(
        self, vectors: VectorParts, pieces: list[str], text: str, tokenizer: Tokenizer, max_tokens: int | None
    ) -> RenderedPrompt:
        encode = partial(tokenizer.encode_pieces, add_special_tokens=False)
        prompt = RenderedPrompt([], text=text)
        most = _MOST_VECTORS if max_tokens is None else max_tokens
        for part in vectors.placed(pieces, encode, tokenizer.encode_continuation):
            if isinstance(part, int):
                given, where = vectors.given[part]
                [media] = self.render_vectors(given, most, where).media
                if len(prompt.token_ids) + media.length > most:
                    # before the next ones take memory
                    raise ContextLengthError(
                        f"{where}: with what stands before them these vectors are more than {most} tokens, the most "
                        "that are taken. Send fewer.",
                        param=where,
                    )
                prompt.media.append(replace(media, start=len(prompt.token_ids)))
                part = [PLACEHOLDER] * media.length
            prompt.token_ids += part
        return prompt

    def _with_media(
        self, prompt: RenderedPrompt, opened: OpenedMedia | None, max_tokens: int | None, sound: Any
    ) -> RenderedPrompt:
        if sound is not None:
            if self.sounds is None:
                raise RequestError(
                    "multi_modal_data: this model does not listen. Leave audio out.", param="multi_modal_data"
                )
            media = self.sounds.one_window(sound, "multi_modal_data.audio")
            prompt.token_ids = self.sounds.begun(prompt.token_ids, media)
            prompt.media = [media]
        elif opened is not None:
            prompt.token_ids, prompt.media = opened.expand(prompt.token_ids, max_tokens)
        return prompt

    def render_pair(self, first: str, second: str, *, max_tokens: int) -> RenderedPrompt:
        """Two texts that are compared. A chat template that knows the roles query and document says how; otherwise the
        tokenizer does."""
        tokenizer = self._needed_tokenizer("text")
        tokenizer.check_can_fit(first, max_tokens, "query")
        tokenizer.check_can_fit(second, max_tokens, "document")
        if self.has_pair_template:
            chat = [{"role": QUERY, "content": first}, {"role": DOCUMENT, "content": second}]
            return self.render_prompt(chat, max_tokens=max_tokens)
        token_ids, second_start = tokenizer.encode_pair(first, second)
        return RenderedPrompt(token_ids, second_start=second_start)

    @cached_property
    def has_pair_template(self) -> bool:
        return pairs_texts(self.chat_template_text)

    def render_continuation(self, text: str, *, max_tokens: int) -> list[int]:
        """The tokens of a text that follows other tokens: no special tokens around it, no space put before it."""
        tokenizer = self._needed_tokenizer("prompt")
        tokenizer.check_can_fit(text, max_tokens, "prompt")
        return tokenizer.encode_continuation(text)

    def open_text(self, *, max_tokens: int, add_special_tokens: bool = True) -> GrowingText:
        """For a prompt that arrives in pieces. One that cannot be max_tokens or fewer is refused before its end."""
        self._needed_tokenizer("prompt")
        return GrowingText(self._piece_encoder, max_tokens, add_special_tokens=add_special_tokens)

    @cached_property
    def _piece_encoder(self) -> PieceEncoder:
        return PieceEncoder(self._needed_tokenizer("prompt"))

    @property
    def tokens_around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind a text."""
        return self._needed_tokenizer("text").around

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._needed_tokenizer("text").encode(text, add_special_tokens=add_special_tokens)

    def bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word as it stands at the beginning of a text, and after a space."""
        found: list[list[int]] = []
        for word in words:
            bare = self._tokens_of_word(word.lstrip())
            spaced = self._tokens_of_word(" " + word.lstrip())
            # a sequence that only puts a space token in front is already covered by the bare one
            found += [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
        return list({tuple(ids): ids for ids in found}.values())

    def _tokens_of_word(self, word: str) -> list[int]:
        token_ids = self._needed_tokenizer("bad_words").encode(word, add_special_tokens=False)
        if not token_ids:
            raise RequestError(f"bad_words: {word!r} has no tokens in this model's vocabulary.", param="bad_words")
        return token_ids

    @cached_property
    def thought_marks(self) -> ThoughtMarks:
        """Between which tokens the model thinks. RequestError: it does not, or not between two tokens."""
        reasoning = self.output_formats.reasoning
        if reasoning is None:
            raise _no_budget("no way is known in which this model writes thoughts (reasoning_parser)")
        if not reasoning.closing:
            raise _no_budget(f"thoughts of the format {reasoning.name} end in more than one way")
        opening, closing = (self._token_of(mark) for mark in (reasoning.opening, reasoning.closing))
        if opening is None or closing is None:
            marks = f"{reasoning.opening} and {reasoning.closing}"
            raise _no_budget(f"{marks} are not one token each in this model's vocabulary")
        return ThoughtMarks(opening=opening, closing=closing, is_always_open=reasoning.is_always_open)

    @property
    def can_count_thoughts(self) -> bool:
        try:
            return bool(self.thought_marks)
        except RequestError:
            return False

    def has_tokens(self, texts: Sequence[str]) -> bool:
        """Whether each of them is one token."""
        return all(self._token_of(text) is not None for text in texts)

    def _token_of(self, text: str) -> int | None:
        token_ids = self._needed_tokenizer("thinking_token_budget").encode_continuation(text)
        return token_ids[0] if len(token_ids) == 1 else None

    # ------------------------------------------------------------------------------------------ to text

    def open_stream(self, prompt_token_ids: list[int], sampling: SamplingParams) -> TextStream:
        """The text of one sequence that follows this prompt."""
        eos = () if sampling.ignore_eos else self.eos_token_ids
        ends = frozenset((*sampling.stop_token_ids, *eos))
        return TextStream(
            self._open_decoder(prompt_token_ids, sampling),
            StopMatcher(sampling.stop, includes_stop=sampling.include_stop_str_in_output) if sampling.stop else None,
            min_tokens=sampling.min_tokens,
            silent_last=() if sampling.include_stop_str_in_output else ends,
        )

    def _open_decoder(self, prompt_token_ids: list[int], sampling: SamplingParams) -> TextDecoder:
        if not sampling.detokenize:
            return SilentDecoder()
        if self._tokenizer is None:
            if sampling.stop:
                self._needed_tokenizer("stop")
            return SilentDecoder()
        return self._tokenizer.open_decoder(prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._needed_tokenizer("token_ids").decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """A token as it reads inside a text; a part of a character reads as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, piece: str) -> int | None:
        """The other way round."""
        return self._needed_tokenizer("token_ids").id_of(piece)

    def piece(self, token_id: int) -> str:
        """A token as the vocabulary writes it down."""
        return self._needed_tokenizer("token_ids").piece_of(token_id)

    @property
    def chat_templates(self) -> dict[str, str]:
        """By their names."""
        return {} if self._templates is None else self._templates.texts

    def token_bytes(self, token_id: int) -> bytes:
        return self._needed_tokenizer("token_ids").bytes_of(token_id)

    def token_table(self, size: int) -> tuple[list[bytes], frozenset[int]]:
        """The bytes of the first `size` tokens, and the ids of special ones. Where a token's text depends on its
        neighbours, there is no such table."""
        tokenizer = self._needed_tokenizer("structured_outputs")
        if not tokenizer.has_token_bytes:
            raise RequestError(
                "structured_outputs: not with this model's tokenizer, whose tokens mean different texts beside "
                "different neighbours. Leave them out.",
                param="structured_outputs",
            )
        return [tokenizer.bytes_of(token_id) for token_id in range(size)], tokenizer.special_ids

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text. The model's embedding may have more rows."""
        return self._needed_tokenizer("vocab_size").vocab_size

    # ------------------------------------------------------------------------------------------ what is missing

    def _needed_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{param}: this model has no tokenizer, so it takes and gives token ids only. "
                "Give a prompt of token ids, or start the engine with tokenizer=FOLDER.",
                param=param,
            )
        return self._tokenizer

    def _templates_of(self, asked: str) -> ChatTemplates:
        """For a caller in this process, or for a request that may bring one."""
        return ChatTemplates.brought(asked, self._needed_tokenizer("messages").special)

    def _needed_templates(self) -> ChatTemplates:
        if self._templates is None and self.sounds is not None:
            raise RequestError(
                "messages: this model writes down what it hears, and answers nothing. Use /v1/audio/transcriptions or "
                "LLM.transcribe.",
                param="messages",
            )
        if self._templates is None:
            raise RequestError(
                "messages: this model has no chat template. Use completions with a text, "
                "or start the engine with chat_template=FILE.",
                param="messages",
            )
        return self._templates


def _no_budget(why: str) -> RequestError:
    return RequestError(
        f"thinking_token_budget: {why}, so that thoughts cannot be counted while they are written. Leave it out, or "
        "bound the whole answer with max_tokens.",
        param="thinking_token_budget",
    )


def _own_eos(tokenizer: Tokenizer | None) -> list[int]:
    token = tokenizer.special.by_name.get("eos_token") if tokenizer is not None else None
    token_id = tokenizer.id_of(token) if tokenizer is not None and token else None
    return [] if token_id is None else [token_id]
