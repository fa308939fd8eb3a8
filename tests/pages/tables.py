"""The tables of docs/fields.md and metrics.md, made from the code."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from quire.interfaces.gateway.batches.requests import BatchRequest
from quire.interfaces.gateway.sessions.requests import REFUSED_BY_TURNS, RewindRequest, SessionRequest
from quire.interfaces.server.administration.adapters import LoadAdapterRequest, UnloadAdapterRequest
from quire.interfaces.server.administration.pinned_prefixes import PinPrefixRequest
from quire.interfaces.server.administration.weights import UpdateWeightsRequest
from quire.interfaces.server.anthropic_messages.fields import REFUSED as REFUSED_BY_MESSAGES
from quire.interfaces.server.anthropic_messages.fields import RULES as MESSAGES_RULES
from quire.interfaces.server.anthropic_messages.fields import MessagesRequest
from quire.interfaces.server.cohere import CohereEmbedRequest
from quire.interfaces.server.llama_cpp.fields import REFUSED as REFUSED_BY_LLAMA_CPP
from quire.interfaces.server.llama_cpp.fields import CompletionOfLlamaCpp, InfillRequest
from quire.interfaces.server.ollama.fields import OPTION_RULES, OllamaChatRequest, OllamaGenerateRequest, Options
from quire.interfaces.server.ollama.fields import REFUSED as REFUSED_BY_OLLAMA
from quire.interfaces.server.openai.classification import ClassifyRequest, PoolingRequest
from quire.interfaces.server.openai.embeddings import EmbeddingRequest
from quire.interfaces.server.openai.known_fields import REFUSED_BY_ALL
from quire.interfaces.server.openai.requests import ChatRequest, CompletionRequest, GenerationFields, PromptPiece
from quire.interfaces.server.openai.sampling import NOT_WITH_BEAMS
from quire.interfaces.server.openai.scoring import REFUSED as REFUSED_BY_SCORING
from quire.interfaces.server.openai.scoring import RerankRequest, ScoreRequest
from quire.interfaces.server.openai.transcriptions import REFUSED as REFUSED_BY_TRANSCRIPTIONS
from quire.interfaces.server.openai.transcriptions import TranscriptionRequest
from quire.interfaces.server.openai_responses.fields import REFUSED as REFUSED_BY_RESPONSES
from quire.interfaces.server.openai_responses.fields import RULES as RESPONSES_RULES
from quire.interfaces.server.openai_responses.fields import ResponsesRequest
from quire.interfaces.server.wire.field_rules import (
    IGNORED,
    REFUSED_BY_BOTH,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    FieldRules,
    Refused,
)
from quire.observability.instruments import Counter, Gauge, Histogram
from quire.observability.metrics import ENGINE_STATISTICS, EngineMetric, ServerMetrics


def tables() -> dict[str, str]:
    """Markdown by title."""
    shared = set(GenerationFields.__struct_fields__)
    return {
        "Fields of both": _implemented(GenerationFields, set()),
        "Fields of /v1/chat/completions": _implemented(ChatRequest, shared),
        "Fields of /v1/completions": _implemented(CompletionRequest, shared),
        "Fields of /v1/embeddings": _implemented(EmbeddingRequest, set()),
        "Fields of /v2/embed": _implemented(CohereEmbedRequest, set()),
        "Fields of /v1/rerank": _implemented(RerankRequest, set()),
        "Fields of /v1/score": _implemented(ScoreRequest, set()),
        "Fields of /v1/classify": _implemented(ClassifyRequest, set()),
        "Fields of /pooling": _implemented(PoolingRequest, set(ClassifyRequest.__struct_fields__)),
        "Fields of /v1/audio/transcriptions": _implemented(TranscriptionRequest, set()),
        "Refused by /v1/audio/transcriptions": _refused(REFUSED_BY_TRANSCRIPTIONS),
        "Fields of a piece": _implemented(PromptPiece, set()),
        "Fields of /v1/load_lora_adapter": _implemented(LoadAdapterRequest, set()),
        "Fields of /v1/unload_lora_adapter": _implemented(UnloadAdapterRequest, set()),
        "Fields of /v1/admin/update_weights": _implemented(UpdateWeightsRequest, set()),
        "Fields of /v1/admin/pinned_prefixes": _implemented(PinPrefixRequest, set()),
        "Fields of /v1/batches": _implemented(BatchRequest, set()),
        "Fields of /v1/sessions": _implemented(SessionRequest, set()),
        "Fields of /v1/sessions/{id}/rewind": _implemented(RewindRequest, set()),
        "Refused by turns of sessions": _refused(REFUSED_BY_TURNS),
        "Refused with use_beam_search": _table(("field", "let through"), _refused_with_beams()),
        "Refused by /v1/chat/completions": _refused({**REFUSED_BY_BOTH, **REFUSED_BY_CHAT}),
        "Refused by /v1/completions": _refused({**REFUSED_BY_BOTH, **REFUSED_BY_COMPLETIONS}),
        "Refused by all endpoints": _refused(REFUSED_BY_ALL),
        "Accepted and ignored": _ignored(IGNORED),
        "Fields of /v1/responses": _implemented(ResponsesRequest, set()),
        "Refused by /v1/responses": _refused(REFUSED_BY_RESPONSES),
        "Accepted and ignored by /v1/responses": _ignored(_own_words(RESPONSES_RULES)),
        "Fields of /v1/messages": _implemented(MessagesRequest, set()),
        "Refused by /v1/messages": _refused(REFUSED_BY_MESSAGES),
        "Accepted and ignored by /v1/messages": _ignored(_own_words(MESSAGES_RULES)),
        "Fields of /api/chat": _implemented(OllamaChatRequest, set()),
        "Fields of /api/generate": _implemented(OllamaGenerateRequest, set(OllamaChatRequest.__struct_fields__)),
        "Refused by /api/chat and /api/generate": _refused(REFUSED_BY_OLLAMA),
        "Their options": _implemented(Options, set()),
        "Refused options": _refused(OPTION_RULES.refused),
        "Ignored options": _ignored(OPTION_RULES.ignored),
        "Fields of /completion": _implemented(CompletionOfLlamaCpp, set()),
        "Fields of /infill": _implemented(InfillRequest, set(CompletionOfLlamaCpp.__struct_fields__) - {"prompt"}),
        "Refused by /completion and /infill": _refused(REFUSED_BY_LLAMA_CPP),
        "Refused by /v1/rerank and /v1/score": _refused(REFUSED_BY_SCORING),
        "Of the front end": _table(("metric", "kind", "meaning"), _front_end_metrics()),
        "Of the engine": _table(("metric", "kind", "meaning"), _engine_metrics()),
    }


def page_of(title: str) -> str:
    """Where a table stands."""
    return "metrics.md" if title.startswith("Of the ") else "fields.md"


def _ignored(ignored: Mapping[str, str]) -> str:
    return _table(("field", "why"), sorted(ignored.items()))


def _own_words(rules: FieldRules) -> dict[str, str]:
    """What is ignored beyond the fields that every endpoint ignores."""
    return {name: reason for name, reason in rules.ignored.items() if IGNORED.get(name) != reason}


def _implemented(request_type: type[msgspec.Struct], without: set[str]) -> str:
    rows = []
    for name, annotation in typing.get_type_hints(request_type, include_extras=True).items():
        if name in without or name not in request_type.__struct_fields__:
            continue
        kind, meta = typing.get_args(annotation)[:2]
        rows.append((name, _kind_of(kind), meta.description))
    return _table(("field", "type", "meaning"), rows)


def _kind_of(annotation: object) -> str:
    """A type in the words of JSON."""
    words = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", typing.Any: "any"}
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) is list:
        return "list" if parts == [typing.Any] else f"list of {_kind_of(parts[0])}"
    if typing.get_origin(annotation) is dict:
        return "object"
    if parts:
        return " or ".join(_kind_of(part) for part in parts)
    return words.get(annotation, "object")  # type: ignore[call-overload, no-any-return]


def _refused(refused: Mapping[str, Refused]) -> str:
    rows = []
    for name, rule in sorted(refused.items()):
        rows.append((name, rule.reason, _values(rule.neutral)))
    return _table(("field", "why", "let through"), rows)


def _refused_with_beams() -> Iterator[tuple[str, str]]:
    for name, neutral in sorted(NOT_WITH_BEAMS.items()):
        yield name, _values(neutral)


def _values(neutral: tuple[typing.Any, ...]) -> str:
    return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in (None, *neutral))


def _front_end_metrics() -> Iterator[tuple[str, str, str]]:
    for instrument in ServerMetrics().instruments:
        kind = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}[type(instrument)]
        labels = [*instrument.label_names] if isinstance(instrument, Counter) else []
        by = f" By {', '.join(f'`{label}`' for label in labels)}." if labels else ""
        yield instrument.name, kind, instrument.help_text + by


def _engine_metrics() -> Iterator[tuple[str, str, str]]:
    by_name: dict[str, list[EngineMetric]] = {}
    for metric in ENGINE_STATISTICS.values():
        by_name.setdefault(metric.name, []).append(metric)
    for name, metrics in by_name.items():
        text = metrics[0].help_text
        for label in metrics[0].labels:
            text += f" By `{label}`: {', '.join(metric.labels[label] for metric in metrics)}."
        yield name, "counter" if name.endswith("_total") else "gauge", text


def _table(head: tuple[str, ...], rows: typing.Iterable[tuple[str, ...]]) -> str:
    """The first column is code."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for first, *rest in rows:
        lines.append(f"| {' | '.join([f'`{first}`', *rest])} |")
    return "\n".join(lines)


def write(docs: Path) -> list[str]:
    """Puts each table under its heading; names of the pages that changed. Raises ValueError for a heading that no page
    has, and has written nothing then."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for title, table in tables().items():
        name = page_of(title)
        if name not in before:
            before[name] = after[name] = (docs / name).read_text(encoding="utf-8")
        after[name] = _with_table(after[name], title, table, name)
    changed = [name for name, text in after.items() if text != before[name]]
    for name in changed:
        (docs / name).write_text(after[name], encoding="utf-8")
    return changed


def _with_table(page: str, title: str, table: str, name: str) -> str:
    places = list(re.finditer(rf"^#+ {re.escape(title)}\n\n((?:\|.*\n)*)", page, re.MULTILINE))
    if len(places) != 1:
        raise ValueError(f"{name}: has {len(places)} headings {title!r}. Write one, with an empty line behind it.")
    start, end = places[0].span(1)
    return f"{page[:start]}{table}\n{page[end:]}"
