"""Fields that are not implemented: refused with the reason, or ignored because nothing in the answer depends on them.

A field must stand in a request's struct, in REFUSED or in IGNORED. An unknown name that looks like a known one is
refused with a suggestion (a misspelt `max_token` must not pass in silence); any other is ignored and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quire.errors import suggestion
from quire.interfaces.requests import MOST_ENTRIES as MOST_ENTRIES_OF_PARAMETERS
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.sampling_params import MAX_STOP_STRINGS
from quire.structured_outputs_params import MOST_CHOICES

logger = logging.getLogger("quire.server")

# Unknown names of one request: each is compared with all known ones.
_MOST_UNKNOWN = 32
# of those that were told once
_MOST_REMEMBERED = 32
_LONGEST_NAME = 64
_MAX_PAIRS = 16
_MAX_KEY = 64
_MAX_VALUE = 512


class Refused(msgspec.Struct, frozen=True):
    """Why a field is refused, and the values that ask for nothing and are therefore let through."""

    reason: str
    neutral: tuple[Any, ...] = ()


_WIDTH = Refused("with use_beam_search=true n is the number of beams, and all of them are choices; use n")
_GROUPS = Refused("diverse beam search is in Python only, with BeamSearchParams; leave it out")
_OLD_TOOLS = Refused("it was replaced in the API; use tools and tool_choice", ([], "none", "auto"))

# as other servers take them; no place is looked up
_MEDIA = Refused("images and videos are parts of messages here, and other media are not taken", ([], {}))
_CUTTING = Refused("how media are read is decided at start (--media-io-kwargs) and by the model", ([], {}))

REFUSED_BY_BOTH: dict[str, Refused] = {
    "image": _MEDIA,
    "images": _MEDIA,
    "image_url": _MEDIA,
    "audio_url": _MEDIA,
    "video_url": _MEDIA,
    "videos": _MEDIA,
    "multi_modal_data": _MEDIA,
    "media_io_kwargs": _CUTTING,
    "mm_processor_kwargs": _CUTTING,
    "best_of": Refused("it was withdrawn from the API; use n and choose yourself", (1,)),
    "guided_decoding_backend": Refused("there is one backend; leave it out", ("auto", "guidance")),
    "guided_whitespace_pattern": Refused("it is a part of structured_outputs: whitespace_pattern"),
    "spaces_between_special_tokens": Refused("special tokens are joined as the tokenizer does it", (True,)),
    "beam_width": _WIDTH,
    "num_beams": _WIDTH,
    "num_return_sequences": _WIDTH,
    "num_beam_groups": msgspec.structs.replace(_GROUPS, neutral=(1,)),
    "diversity_penalty": msgspec.structs.replace(_GROUPS, neutral=(0,)),
    "vllm_xargs": Refused("extra arguments have no meaning here", ({},)),
}
REFUSED_BY_COMPLETIONS: dict[str, Refused] = {
    "messages": Refused("it belongs to /v1/chat/completions; use prompt"),
}
REFUSED_BY_CHAT: dict[str, Refused] = {
    "functions": _OLD_TOOLS,
    "function_call": _OLD_TOOLS,
    "audio": Refused("no audio is generated"),
    "moderation": Refused("nothing is moderated here"),
    "modalities": Refused("only text is generated", (["text"],)),
    "web_search_options": Refused("the server fetches nothing"),
    "documents": Refused("pass documents in chat_template_kwargs", ([],)),
    "prompt": Refused("it belongs to /v1/completions; use messages"),
    "prompt_embeds": Refused("vectors are prompts of /v1/completions"),
}

# Most entries of lists and objects: what is longer is refused before anything is made of its entries.
MOST_ENTRIES = {**MOST_ENTRIES_OF_PARAMETERS, "messages": 4096, "stop": MAX_STOP_STRINGS, "guided_choice": MOST_CHOICES}

IGNORED: dict[str, str] = {
    "user": "the client's name for its user",
    "safety_identifier": "the client's name for its user",
    "metadata": "notes of the client",
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "the prefix cache finds equal prompts by itself",
    "prompt_cache_options": "the prefix cache finds equal prompts by itself",
    "prompt_cache_retention": "the prefix cache keeps what memory holds",
    "prediction": "a hint for speed",
    "verbosity": "the models served here have no such control",
    "request_id": "ids are the server's; send the header x-request-id to follow a request",
    "rid": "ids are the server's; send the header x-request-id to follow a request",
    "session_id": "the client's name for its conversation; /v1/sessions keeps one in the engine",
    "custom_labels": "labels of another server's metrics",
    # what the names before them would decide over, which are refused
    "mirostat_tau": "only with mirostat, which is refused unless it is 0",
    "mirostat_eta": "only with mirostat, which is refused unless it is 0",
    "dry_base": "only with dry_multiplier, which is refused unless it is 0",
    "dry_allowed_length": "only with dry_multiplier, which is refused unless it is 0",
    "dry_penalty_last_n": "only with dry_multiplier, which is refused unless it is 0",
    "dry_range": "only with dry_multiplier, which is refused unless it is 0",
    "dry_sequence_breakers": "only with dry_multiplier, which is refused unless it is 0",
    "xtc_threshold": "only with xtc_probability, which is refused unless it is 0",
    "adaptive_decay": "only with adaptive_target, which is refused unless it is negative",
    "dynatemp_exponent": "only with dynatemp_range, which is refused unless it is 0",
    "smoothing_curve": "only with smoothing_factor, which is refused unless it is 0",
    # where and how fast, but not what
    "cache_prompt": "an answer does not depend on what is found in the prefix cache",
    "cache_control": "the prefix cache finds equal prompts by itself",
    "n_cache_reuse": "the prefix cache finds equal prompts by itself",
    "id_slot": "there are no slots: the scheduler places requests",
    "n_keep": "prompts are never cut",
    "n_discard": "prompts are never cut",
    "keep_alive": "the model stays loaded as long as the server runs",
    "provider": "there is one provider, this server",
    "route": "there is one model",
    "data_parallel_rank": "requests are placed by the server",
    "routed_dp_rank": "requests are placed by the server",
    "disagg_prefill_dp_rank": "requests are placed by the server",
    "stream_interval": "tokens go out as they come, and together to a client that is slow",
    "speculative_ngram": "a hint for speed: drafts do not change the text",
    "speculative.n_max": "a hint for speed: drafts do not change the text",
    "speculative.n_min": "a hint for speed: drafts do not change the text",
    "speculative.p_min": "a hint for speed: drafts do not change the text",
    "ngram_corpus_id": "a hint for speed: drafts do not change the text",
    "return_mm_kwargs": "there are no images to describe",
    "images_config": "there are no images",
}


def check_metadata(notes: Mapping[str, Any] | None) -> None:
    """A client's notes, where they are kept. The bounds are OpenAI's."""
    notes = notes or {}
    if len(notes) > _MAX_PAIRS:
        raise invalid(f"metadata: {len(notes)} pairs, at most {_MAX_PAIRS} are allowed.", "metadata")
    for key, value in notes.items():
        if len(key) > _MAX_KEY or not isinstance(value, str) or len(value) > _MAX_VALUE:
            text = f"a key has at most {_MAX_KEY} characters, a value is a text of at most {_MAX_VALUE}"
            raise invalid(f"metadata.{key[:_MAX_KEY]}: {text}.", "metadata")


_NOTHING_INSIDE: Mapping[str, FieldRules] = MappingProxyType({})


class FieldRules:
    """Which names one endpoint knows. `check` looks at every name of a request, before any value is converted.

    `foreign`: names of `refused` that nobody means by a misspelt one. `inner`: the same of fields that hold fields."""

    def __init__(
        self,
        request_type: type[msgspec.Struct],
        refused: dict[str, Refused],
        ignored: Mapping[str, str] = IGNORED,
        foreign: Collection[str] = (),
        inner: Mapping[str, FieldRules] = _NOTHING_INSIDE,
    ) -> None:
        self._inner = inner
        self.implemented = request_type.__struct_fields__
        self.refused = refused
        self.ignored = ignored
        self._known = {*self.implemented, *refused, *ignored}
        self._suggested = {*self.implemented, *refused}.difference(foreign)
        self._told: set[str] = set()

    def check(self, body: dict[str, Any], *, strict: bool = False) -> None:
        """Raises ApiError for a field that would change the answer and is not implemented; strict: for any unknown."""
        unknown = body.keys() - self._known
        if len(unknown) > _MOST_UNKNOWN:
            text = f"{len(unknown)} fields are unknown here, at most {_MOST_UNKNOWN} are passed over."
            raise invalid(f"{text} Leave them out.")
        for name, value in body.items():
            if name in self.refused:
                rule = self.refused[name]
                if value is not None and value not in rule.neutral:
                    raise invalid(f"{name}: not supported: {rule.reason}.", name)
            elif name in unknown:
                self._check_unknown(name[:_LONGEST_NAME], strict)
            elif name in MOST_ENTRIES and isinstance(value, list | dict) and len(value) > MOST_ENTRIES[name]:
                raise invalid(f"{name}: {len(value)} entries, at most {MOST_ENTRIES[name]} are allowed.", name)
        self._tell(unknown)
        for name, rules in self._inner.items():
            if isinstance(body.get(name), dict):
                with in_words_of({r"(\w+)": rf"{name}.\1"}):
                    rules.check(body[name], strict=strict)

    def _check_unknown(self, name: str, strict: bool) -> None:
        hint = "" if name in self._told and not strict else suggestion(name, self._suggested)
        if hint or strict:
            raise invalid(f"Unknown field {name!r}.{hint}", name)

    def _tell(self, unknown: set[str]) -> None:
        """Once of each, and of no more than a log should hold."""
        new = sorted({name[:_LONGEST_NAME] for name in unknown} - self._told)[: _MOST_REMEMBERED - len(self._told)]
        if new:
            self._told.update(new)
            logger.warning("unknown request fields are ignored (said once): %s", ", ".join(map(repr, new)))


def text_in(part: Mapping[str, Any], name: str, where: str) -> str:
    """A text that must be there, in a part of a request."""
    value = part.get(name)
    if not isinstance(value, str):
        text = "this field is required" if value is None else "must be a text"
        raise invalid(f"{where}.{name}: {text}.", f"{where}.{name}")
    return value
