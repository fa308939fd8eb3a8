"""Chat templates: which one a model has, and rendering a chat with it.

Owns the texts of the templates. Equal to Transformers' apply_chat_template for what both accept. A request brings
values for one, and a template of its own only where the server says so. Called by Renderer.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError, OptionError, RequestError
from quire.renderer.chat_messages import Dialect, plain, prepare_messages
from quire.renderer.gguf_tokenizer import read_templates
from quire.renderer.quoting import Quoting
from quire.renderer.special_tokens import SpecialTokens, read_json

if TYPE_CHECKING:
    import jinja2

# What render() itself hands to a template, and words that mean something to other engines' template calls.
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "continue_final_message"}
)
_READS_REASONING = re.compile(r"\breasoning\b")
# It tests for none, or writes whole messages down.
_READS_NONE = re.compile(r"\bnone\b|\bmessages?\s*\|\s*tojson")
_END_OF_FINAL = "\ue000end of the final message\ue000"
# roles of the two texts that a model compares
QUERY = "query"
DOCUMENT = "document"
# Of what a template says when it refuses messages.
_MOST_CHARACTERS_OF_ERROR = 1_000


class NotBriefError(Exception):
    """It takes longer than other work should wait for it: render it where nothing waits."""


class ChatTemplates:
    """The templates of one model, by name. `default` serves; `tool_use` serves requests with tools where it exists."""

    def __init__(
        self,
        texts: Mapping[str, str],
        special: SpecialTokens,
        now: Callable[[], datetime] = datetime.now,
        *,
        origin: str = "the model's",
    ) -> None:
        self.texts = dict(texts)
        self._origin = origin
        # those that have been compiled, which takes longer than most renderings, and what they read
        self._compiled: dict[str, jinja2.Template] = {}
        self._dialects: dict[str, Dialect] = {}
        self._special = special
        self._now = now

    @classmethod
    def find(cls, folders: Sequence[Path], special: SpecialTokens, asked: str | None = None) -> ChatTemplates | None:
        """An option's template, else the first folder that has one; None if no folder has."""
        if asked is not None:
            return cls({"default": asked_template(asked)}, special, origin="the option chat_template")
        for folder in folders:
            texts = _templates_in(folder)
            if texts:
                return cls(texts, special, origin=folder.name)
        return None

    @classmethod
    def brought(cls, asked: str, special: SpecialTokens) -> ChatTemplates:
        """By a request, or a caller in this process."""
        text = _text_of(asked)
        templates = cls({"default": text}, special, origin="the argument chat_template")
        templates._compiled[text] = _compiled(text, templates._now, is_of_request=True)
        return templates

    def prepare(self) -> None:
        """Compiles them, so that no request does. What is wrong with one is said when it is asked for."""
        import jinja2

        from quire.renderer.template_sandbox import compile_template

        for text in self.texts.values():
            with contextlib.suppress(jinja2.TemplateError):
                self._compiled[text] = compile_template(text, self._now)
                self._dialect_of(text)

    def render(self, chat: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a chat; options as below."""
        return "".join(self.render_pieces(chat, **options))

    def render_pieces(
        self,
        chat: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        marks: Collection[str] = (),
        is_brief: bool = False,
        takes_images: bool = False,
    ) -> list[str]:
        """The text, cut inside each of `marks` that a client wrote: pieces are to be tokenised one by one.

        is_brief: NotBriefError instead of a rendering that takes more than a few milliseconds.
        """
        text = self._choose(tools)
        if is_brief and text not in self._compiled:
            raise NotBriefError
        messages = prepare_messages(chat, replace(self._dialect_of(text), takes_images=takes_images))
        shown_tools = plain(list(tools), "tools") if tools is not None else None
        kwargs = _checked_kwargs(template_kwargs)
        quoting = Quoting(marks, messages, shown_tools, kwargs)
        messages = [quoting.quote(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message=True: needs add_generation_prompt=False, else a new message begins.",
                    param="continue_final_message",
                )
            _mark_end(messages[-1])
        rendered = self._run(
            text,
            {
                **self._special.by_name,
                "documents": None,
                **quoting.quote(kwargs),
                "messages": messages,
                "tools": quoting.quote(shown_tools),
                "add_generation_prompt": add_generation_prompt,
            },
            is_brief=is_brief,
        )
        return quoting.pieces(_cut_at_end(rendered) if continue_final_message else rendered)

    def _dialect_of(self, text: str) -> Dialect:
        if text not in self._dialects:
            self._dialects[text] = dialect_of(text)
        return self._dialects[text]

    def _choose(self, tools: object) -> str:
        if tools is not None and "tool_use" in self.texts:
            return self.texts["tool_use"]
        if "default" not in self.texts:
            raise RequestError(
                f"messages: this model has only the chat templates {', '.join(sorted(self.texts))} and none for a "
                "chat without tools. Start the engine with chat_template=FILE.",
                param="messages",
            )
        return self.texts["default"]

    def _run(self, text: str, values: dict[str, Any], *, is_brief: bool) -> str:
        from quire.renderer.template_budget import BRIEF, WHOLE, TemplateBudgetError
        from quire.renderer.template_sandbox import compile_template, render

        try:
            if text not in self._compiled:
                self._compiled[text] = compile_template(text, self._now)
            return render(self._compiled[text], values, BRIEF if is_brief else WHOLE)
        except Exception as error:  # a template is foreign code: it may fail in any way
            if is_brief and isinstance(error, TemplateBudgetError):
                raise NotBriefError from None
            words = _in_words(error)[:_MOST_CHARACTERS_OF_ERROR]
            if isinstance(error, TemplateBudgetError):
                words += ". It is refused so that it keeps nobody waiting; give a better one with chat_template=FILE"
            raise RequestError(
                f"messages: the chat template of {self._origin} does not accept them ({words}).", param="messages"
            ) from error


def asked_template(asked: str) -> str:
    """The option's text, which can be compiled."""
    text = _text_of(asked)
    _compiled(text)
    return text


def _text_of(asked: str) -> str:
    """The option is a file; a template itself is taken too, as it can hardly be a file's name."""
    if "{{" in asked or "{%" in asked:
        return asked
    path = Path(os.path.expanduser(asked))
    if not path.is_file():
        raise OptionError(f"chat_template={asked}: no such file. Give a file that holds a Jinja template.")
    return path.read_text(encoding="utf-8")


def _compiled(text: str, now: Callable[[], datetime] = datetime.now, *, is_of_request: bool = False) -> jinja2.Template:
    import jinja2

    from quire.renderer.template_sandbox import OF_REQUEST, compile_template

    try:
        return compile_template(text, now, OF_REQUEST if is_of_request else None)
    except jinja2.TemplateError as error:
        raise OptionError(f"chat_template={text[:80]}: {_in_words(error)}.") from error


def _templates_in(folder: Path) -> dict[str, str]:
    """All spellings, the later ones of Transformers first."""
    if folder.is_file():
        return read_templates(folder)
    texts: dict[str, str] = {}
    for config in ("chat_template.json", "tokenizer_config.json"):
        texts |= _named_templates(read_json(folder / config).get("chat_template"), folder / config)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        texts[file.stem] = file.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        texts["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return texts


def _named_templates(value: Any, file: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    try:
        return {str(item["name"]): str(item["template"]) for item in value}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"{file}: chat_template must be a text, or a list of objects with name and template."
        ) from error


def _checked_kwargs(template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    kwargs: dict[str, Any] = plain(template_kwargs or {}, "chat_template_kwargs")
    for name in kwargs:
        if name in _RESERVED:
            raise RequestError(
                f"chat_template_kwargs.{name}: is not for a request to set.", param=f"chat_template_kwargs.{name}"
            )
    return kwargs


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if message["role"] != "assistant":
        raise RequestError(
            f"continue_final_message=True: the last message is the {message['role']}'s, and only the assistant's can "
            "go on.",
            param="continue_final_message",
        )
    if isinstance(content, str) and content:
        message["content"] = content + _END_OF_FINAL
    elif isinstance(content, list) and content and "text" in content[-1]:
        content[-1]["text"] += _END_OF_FINAL
    else:
        raise RequestError(
            "continue_final_message=True: the last message has no text at its end to go on with.", param="messages"
        )


def _cut_at_end(rendered: str) -> str:
    before, found, _ = rendered.rpartition(_END_OF_FINAL)
    if not found:
        raise RequestError(
            "continue_final_message=True: this model's chat template drops or changes the last message.",
            param="messages",
        )
    return before


def _in_words(error: Exception) -> str:
    import jinja2

    line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    text = str(error) or type(error).__name__
    return (text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}") + line


def dialect_of(text: str) -> Dialect:
    """What this template reads. What is wrong with one is said when it is rendered."""
    import jinja2
    from jinja2 import nodes

    from quire.renderer.template_sandbox import parse_template

    try:
        tree = parse_template(text)
        # not too deep for what looks into it below
        list(tree.find_all(nodes.Node))
    except (jinja2.TemplateError, RecursionError):
        tree = nodes.Template([])
    reads_parts, reads_texts = _content_kinds(tree)
    return Dialect(
        as_parts=reads_parts and not reads_texts,
        keeps_parts=reads_parts,
        knows_developer="developer" in text,
        knows_any_role=_writes_roles(tree) or pairs_texts(text),
        knows_none=_READS_NONE.search(text) is not None,
        joins_arguments=_joins_arguments(tree),
        reads_reasoning=_READS_REASONING.search(text) is not None and "reasoning_content" not in text,
    )


def pairs_texts(template: str) -> bool:
    """Whether it says how two texts are compared: of a model that ranks documents."""
    return all(f'"{role}"' in template or f"'{role}'" in template for role in (QUERY, DOCUMENT))


def _writes_roles(tree: jinja2.nodes.Template) -> bool:
    """Whether it puts a message's role into the text, and does not only compare it."""
    from jinja2 import nodes

    written = [part for output in tree.find_all(nodes.Output) for node in output.nodes for part in _parts_of(node)]
    return any(_last_name(part) == "role" for part in written)


def _parts_of(node: jinja2.nodes.Node) -> Iterator[jinja2.nodes.Node]:
    """What is joined to a text."""
    from jinja2 import nodes

    if isinstance(node, nodes.Add):
        yield from _parts_of(node.left)
        yield from _parts_of(node.right)
    elif isinstance(node, nodes.Concat):
        for part in node.nodes:
            yield from _parts_of(part)
    else:
        yield node


def _joins_arguments(tree: jinja2.nodes.Template) -> bool:
    """Whether it adds a call's arguments to a text (DeepSeek's do), which fails with an object."""
    from jinja2 import nodes

    added = [side for node in tree.find_all(nodes.Add) for side in (node.left, node.right)]
    return any(_last_name(side) == "arguments" for side in added)


def _last_name(node: jinja2.nodes.Node) -> object:
    """The last part of `a.b` and of `a["b"]`."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value
    return None


def _content_kinds(tree: jinja2.nodes.Template) -> tuple[bool, bool]:
    """(reads lists of parts, reads plain texts), found in the template: does it loop over a content, test for a string?

    A template that neither loops nor tests reads plain texts.
    """
    from jinja2 import nodes

    contents = {"content"} | {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, {"content"})
    }
    loops = any(_is_content(node.iter, contents) for node in tree.find_all(nodes.For))
    tests = any(node.name == "string" and _is_content(node.node, contents) for node in tree.find_all(nodes.Test))
    return loops, tests or not loops


def _is_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    """message.content, message["content"], a variable that holds it, or one of these behind a filter or `or`."""
    from jinja2 import nodes

    if isinstance(node, nodes.Or):
        return _is_content(node.left, names)
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Name):
        return node.name in names
    return _last_name(node) == "content"
