"""Conversations: what a row of messages holds, checked before a chat template sees it.

What Arrow fills in is taken out: in a column of structs every row has every key, None where the row had none. So a value
that is None, in a tool's schema or in a tool call's arguments, is kept only where these are JSON text. Nothing is sent
between ranks.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_longctx.data.media import media_part

EMPTY = "teaches nothing: "
"""How the reason begins why a row is refused that is well-formed, but of which no token can be learned."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under any of which transformers gives a template its reasoning."""

ELSEWHERE = {"system": "a first message with the role 'system'", "functions": "the column 'tools'"}
"""Columns beside messages that other stacks read -> where their content is read here."""

Message = dict[str, Any]


class RowError(ValueError):
    """Why a row is no document: names the column, what was found in it, and what is valid."""


@dataclass(frozen=True)
class Conversation:
    """The messages and variables that a chat template renders."""

    messages: list[Message]
    """keys that are None are left out"""
    first: int = 0
    """the first message that may be learned"""
    tools: list[Any] | None = None
    """JSON schemas of functions that the assistant may call"""
    documents: list[Any] | None = None
    """mappings, such as a title and a text, that the assistant may quote"""
    variables: Mapping[str, Any] | None = None
    """other variables of the template"""

    @classmethod
    def from_row(cls, row: Mapping[str, Any], *columns: str, checked: bool = True) -> "Conversation":
        """Read the messages of these columns, one after the other; only those of the last column may be learned. Columns
        `tools`, `documents` and `chat_template_kwargs` are read where a row has them, as values or as JSON text.

        Args:
            checked: whether a row is refused for what would be ignored. False: rows are read as for documents of version 1
                (data/tokenisation.py), without `documents`, and what is None in JSON text is left out too.

        Raises:
            RowError: a column holds something else, or there is no message.
        """
        parts = [_messages(row, name, checked) for name in columns]
        if not any(parts):
            raise RowError(f"{EMPTY}no message in {' and '.join(map(repr, columns))}")
        messages = [message for part in parts for message in part]
        if checked:
            _refuse_elsewhere(row, messages)
        conversation = cls(
            messages=messages,
            first=sum(map(len, parts[:-1])),
            tools=_mappings(row, "tools", "a list of JSON schemas"),
            documents=_mappings(row, "documents", "a list of documents with a title and a text") if checked else None,
            variables=_optional(
                row, "chat_template_kwargs", Mapping, "variables of the chat template and their values"
            ),
        )
        if checked:
            return conversation
        tools, variables = _without_none(conversation.tools), _without_none(conversation.variables)
        return replace(conversation, tools=tools, variables=variables)

    @property
    def is_plain(self) -> bool:
        """whether there is nothing but roles, and contents that are texts"""
        return not (self.tools or self.documents or self.variables) and all(
            message.keys() <= {"role", "content"} and isinstance(message.get("content", ""), str)
            for message in self.messages
        )


def found(value: Any) -> str:
    """Shorten what a row holds, for messages."""
    return "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def _messages(row: Mapping[str, Any], name: str, checked: bool) -> list[dict[str, Any]]:
    messages = row[name]
    if not isinstance(messages, list | tuple):
        raise RowError(
            f"column {name!r} holds {found(messages)}; valid: a list of messages, each with a role and a content"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RowError(f"{name}[{number}] is {found(message)}; valid: a mapping with a role and a content")
        if not isinstance(message.get("role"), str):
            raise RowError(f"the role of {name}[{number}] is {found(message.get('role'))}; valid: a string")
        if checked and (part := media_part(message.get("content"))):
            raise RowError(
                f"the content of {name}[{number}] holds {part}, and only text is trained on. Valid: parts of text, as "
                "{'type': 'text', 'text': ...}"
            )
    return _without_none(messages)


def _refuse_elsewhere(row: Mapping[str, Any], messages: list[Message]) -> None:
    """Raises RowError for columns that other stacks put before the messages, unless the messages hold the same."""
    for name, valid in ELSEWHERE.items():
        value = row.get(name)
        if value is None or (isinstance(value, str | list | dict) and not value):
            continue
        if name == "system" and messages and messages[0].get("content") == value:
            continue
        raise RowError(f"column {name!r} holds {found(value)}, and is not read. Valid: {valid}")


def _mappings(row: Mapping[str, Any], name: str, valid: str) -> list[Any] | None:
    values = _optional(row, name, Sequence, valid)
    for number, value in enumerate(values or ()):
        if not isinstance(value, dict):
            raise RowError(f"{name}[{number}] is {found(value)}; valid: {valid}, each a mapping")
    return values


def _optional(row: Mapping[str, Any], name: str, kind: type, valid: str) -> Any:
    """Read a column that a row may have, as a value, from which None is taken out, or as JSON text."""
    value = _without_none(row.get(name))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"column {name!r} holds text that is no JSON ({error}); valid: {valid}") from error
    if value is not None and (isinstance(value, str) or not isinstance(value, kind)):
        raise RowError(f"column {name!r} holds {found(value)}; valid: {valid}, or such a value as JSON text")
    return value


def _without_none(value: Any) -> Any:
    """Copy a value with dicts and lists for the mappings and lists in it, and without keys that are None."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
