"""Finds what a conversation holds beside roles and contents, and whether its chat template writes it.

A template reads the keys that its author thought of; any other is left out of the text without a word. A row with tool
calls under a template that knows none would teach an empty answer. So a row is rendered again without each of these,
and refused where its text stays the same:

    tools, documents               of the row
    tool calls                     each of them: rendered once with other names, all of which must stand in the text
    their arguments                all together
    content beside tool calls      of all such messages together (Llama 3.1's template leaves it out)
    reasoning                      under any of its names; templates may leave out that of earlier turns, not all of it
    parts that are no text         of all contents together
    any other key of a message     each; but `tool_call_id` and `name` of a tool's answer only where answers do not follow
                                   their calls in order: else the order says what they say

A name among chat_template_kwargs must stand in the template. Rows of roles and texts alone, which are most, are rendered
no more often than before, but for the first: without contents, which shows that the template reads strings.

Two things are written in the form that the template reads. Contents that are lists of texts become strings where it
reads no lists; mappings and other lists are refused where it would write them as Python does. Arguments of tool calls may
be mappings or JSON text: templates get mappings, as transformers documents and servers do (many quote a text:
"{\\"city\\": ...}"), or JSON text where they fail on mappings (DeepSeek's). Which form a template reads is seen by marks, put
in place of the texts and into other contents and the arguments: other messages may quote these in any form, as a tool does
that answers "TypeError: weather() got {'city': 'Rome'}". A text is searched once for all marks, so that time grows with its
length alone. Nothing is sent between ranks.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hf_longctx.data.chats.conversation import REASONING, Conversation, Message, RowError

Render = Callable[[Conversation], str]
"""Renders a conversation's text. Raises RowError."""

MARK = re.compile(r"marked(?P<what>part|content|arguments|call)(?P<number>\d+)x")
"""Text that stands in a rendered conversation for a text part, another content that is no text, the arguments or the name of a
call."""
DUMPED = re.compile(r"""['"]text['"]: ?['"]$""")
"""Stands before the text of a part where a template writes the part itself."""

PLAIN = {"role", "content"}
SAME = "its text is the same with and without"


def readable(conversation: Conversation, render: Render) -> Conversation:
    """Return the conversation in the form that the template reads: as it is, unless contents or arguments have to be others.

    Raises:
        RowError: the template can render none; says what it makes of the first.
    """
    problem: RowError | None = None
    for form in _forms(conversation):
        try:
            render(form)
            misread = _misread(form, render)
        except RowError as error:
            problem = problem or error
        else:
            if not misread:
                return form
            problem = problem or RowError(misread)
    assert problem is not None
    raise problem


def refuse_unwritten(conversation: Conversation, render: Render, template: str) -> None:
    """Raises RowError for what the template leaves out of the text, see above."""
    for name in conversation.variables or {}:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise RowError(
                f"the chat template reads no variable {name!r}, which chat_template_kwargs sets. Valid: variables that stand "
                "in the template, or rows without this one"
            )
    text = render(conversation)
    _refuse_unwritten_calls(conversation, render, text)
    for what, without in _without(conversation):
        try:
            same = render(without) == text
        except RowError:  # it cannot do without
            continue
        if same:
            raise _unwritten(what)


def refuse_unread_contents(conversation: Conversation, render: Render) -> bool:
    """Raises RowError if the template reads no contents that are strings; returns whether there was one to tell by."""
    if not any(_is_text(message.get("content")) for message in conversation.messages):
        return False
    other = _mapped(conversation, _with_other_content)
    try:
        same = render(other) == render(conversation)
    except RowError:
        return False
    if same:
        raise RowError(
            "the chat template does not write contents that are strings: its text is the same with others. Valid: contents "
            "in the form that it reads, as [{'type': 'text', 'text': ...}], or another template"
        )
    return True


def _unwritten(what: str) -> RowError:
    return RowError(
        f"the chat template does not write {what}: {SAME} it. Valid: a chat template that writes it (in "
        "tokenizer.chat_template), or rows without it"
    )


# What is left out, one thing at a time


def _without(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """(what, the conversation without it)"""
    if conversation.tools:
        yield "the column 'tools'", replace(conversation, tools=None)
    if conversation.documents:
        yield "the column 'documents'", replace(conversation, documents=None)
    messages = conversation.messages
    if where := _where(messages, _speaks_and_calls):
        yield f"the content of {where} beside its tool calls", _changed(conversation, _speaks_and_calls, content="")
    if where := _where(messages, lambda message: bool(_other_parts(message))):
        yield f"the parts of {where} that are no text", _mapped(conversation, _without_other_parts)
    if where := _where(messages, _holds_a_mapping):
        yield f"the content of {where}", _changed(conversation, _holds_a_mapping, content="")
    keys = dict.fromkeys(key for message in messages for key in message if not _is_empty(message[key]))
    in_order = _answers_in_order(messages)
    for key in keys:
        if key in PLAIN or key == "tool_calls" or (key in REASONING and key != _first_of(keys, REASONING)):
            continue
        names = REASONING if key in REASONING else (key,)
        left_to_order = in_order if key in ("tool_call_id", "name") else False

        def has(message: Message, names: tuple[str, ...] = names, but_answers: bool = left_to_order) -> bool:
            return any(not _is_empty(message.get(name)) for name in names) and not (but_answers and _answers(message))

        if where := _where(messages, has):
            yield f"the key {key!r} of {where}", _without_keys(conversation, has, names)


def _refuse_unwritten_calls(conversation: Conversation, render: Render, text: str) -> None:
    calls = list(_calls(conversation.messages))
    if not calls:
        return
    named = _with_calls(conversation, lambda call, number: _named(call, _mark("call", number)))
    try:
        shown = render(named)
    except RowError:  # it knows only some names
        shown = ""
    written = {int(mark["number"]) for mark in MARK.finditer(shown)}
    unwritten = [where for number, (where, call) in enumerate(calls) if _name(call) and number not in written]
    if not shown or not any(_name(call) for _, call in calls):
        without = _without_keys(conversation, _has_calls, ("tool_calls",))
        unwritten = [calls[0][0]] if _same(without, render, text) else []
    if unwritten:
        raise _unwritten(unwritten[0])
    where = next((where for where, call in calls if not _is_empty(_arguments(call)) and _arguments(call) != "{}"), None)
    if where and _same(_with_arguments(conversation, _emptied), render, text):
        raise _unwritten(f"the arguments of {where}")


def _same(conversation: Conversation, render: Render, text: str) -> bool:
    try:
        return render(conversation) == text
    except RowError:
        return False


def _answers_in_order(messages: list[Message]) -> bool:
    """Return whether every tool's answer that names its call stands where the order of calls says so."""
    waiting: list[Any] = []
    for message in messages:
        if _has_calls(message):
            waiting = list(message["tool_calls"])
        elif _answers(message):
            call = waiting.pop(0) if waiting else None
            expected = (("tool_call_id", _of(call, "id")), ("name", _name(call)))
            if call is None or any(message.get(key) not in (None, "", known) for key, known in expected if known):
                return False
        else:
            waiting = []
    return True


# The forms in which a template may read a conversation


def _forms(conversation: Conversation) -> Iterator[Conversation]:
    """Yield the forms in the order in which they are tried. A list or mapping of nothing is no text: many a template would write
    its brackets."""
    conversation = _changed(conversation, _holds_nothing, content="")
    joined = _mapped(conversation, _joined)
    for form in (conversation, joined) if joined != conversation else (conversation,):
        mappings = _with_arguments(form, _decoded)
        yield mappings
        if (texts := _with_arguments(form, _encoded)) != mappings:
            yield texts


def _misread(conversation: Conversation, render: Render) -> str:
    """Return what the template writes that it does not read; "" if nothing is known of."""
    marked, places = _with_marks(conversation)
    if marked == conversation:
        return ""
    try:
        text = render(marked)
    except RowError:  # it takes no other texts or arguments
        return ""
    calls, read = list(_calls(conversation.messages)), set[int]()
    quoted: tuple[str, Any] | None = None
    for mark in MARK.finditer(text):
        number, (start, stop) = int(mark["number"]), mark.span()
        if mark["what"] == "part" and not DUMPED.search(text, max(0, start - 12), start):
            read.add(number)
        if mark["what"] == "content" and text.endswith("'", 0, start):
            return _unread_content(number, f"but writes {str(conversation.messages[number]['content'])[:60]}")
        if mark["what"] == "arguments" and quoted is None and number < len(calls):
            as_text = isinstance(_arguments(calls[number][1]), str)
            is_json = as_text and text.endswith('\\"', 0, start)
            is_mapping = not as_text and text.endswith("'", 0, start) and text.startswith("': ", stop)
            quoted = calls[number] if is_json or is_mapping else None
    for part, number in enumerate(places):
        if part not in read:
            return _unread_content(number, "a list of parts")
    if quoted is None:
        return ""
    where, arguments = quoted[0], _arguments(quoted[1])
    written = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, str) else str(arguments)
    return (
        f"the chat template does not read the arguments of {where}, but writes {written}. Valid: a mapping, or JSON text "
        "of one"
    )


def _unread_content(number: int, what: str) -> str:
    return (
        f"the chat template does not read the content of messages[{number}], {what}. Valid: a string, or a list of parts, "
        "[{'type': 'text', 'text': ...}]"
    )


def _with_marks(conversation: Conversation) -> tuple[Conversation, list[int]]:
    """Put a mark in place of each text of a part, into other contents that are no text, and into the arguments of each call;
    returns the messages of the parts."""
    places, messages = list[int](), list[Message]()
    for number, message in enumerate(conversation.messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = list[Any]()
            for part in content:
                if isinstance(part, dict) and _is_text(part.get("text")):
                    part = {**part, "text": _mark("part", len(places))}
                    places.append(number)
                parts.append(part)
            if number not in places[-1:]:
                parts.append(_mark("content", number))
            message = {**message, "content": parts}
        elif isinstance(content, dict):
            message = {**message, "content": {**content, _mark("content", number): ""}}
        messages.append(message)
    marked = _with_calls(replace(conversation, messages=messages), _with_marked_arguments)
    return marked, places


def _with_marked_arguments(call: Any, number: int) -> Any:
    def marked(arguments: Any) -> Any:
        mark = _mark("arguments", number)
        if not arguments or not isinstance(arguments, str | dict):
            return arguments
        # A template may read the keys that are there, so they stay; a text it can only write, as it is or quoted.
        return json.dumps({mark: ""}) if isinstance(arguments, str) else {**arguments, mark: ""}

    return _argued(call, marked)


def _joined(message: Message) -> Message:
    parts = message.get("content")
    if isinstance(parts, list) and parts and all(_is_text_part(part) for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return message


def _decoded(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _encoded(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _emptied(arguments: Any) -> Any:
    return "{}" if isinstance(arguments, str) else {} if isinstance(arguments, dict) else arguments


# Messages and their calls


def _calls(messages: list[Message]) -> Iterator[tuple[str, Any]]:
    """(where, call)"""
    for number, message in enumerate(messages):
        if _has_calls(message):
            for which, call in enumerate(message["tool_calls"]):
                named = f" (function {_name(call)!r})" if _name(call) else ""
                yield f"messages[{number}].tool_calls[{which}]{named}", call


def _has_calls(message: Message) -> bool:
    return isinstance(message.get("tool_calls"), list) and bool(message["tool_calls"])


def _answers(message: Message) -> bool:
    return message["role"] in ("tool", "ipython", "function")


def _speaks_and_calls(message: Message) -> bool:
    return _has_calls(message) and _is_text(message.get("content"))


def _holds_a_mapping(message: Message) -> bool:
    return isinstance(message.get("content"), dict)


def _holds_nothing(message: Message) -> bool:
    return isinstance(message.get("content"), list | dict) and not message["content"]


def _mark(what: str, number: int) -> str:
    return f"marked{what}{number}x"


def _of(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _name(call: Any) -> Any:
    name = _of(_of(call, "function") or call, "name")
    return name if isinstance(name, str) else None


def _arguments(call: Any) -> Any:
    return _of(_of(call, "function") or call, "arguments")


def _named(call: Any, name: str) -> Any:
    return _with_part(call, {"name": name}) if _name(call) else call


def _argued(call: Any, change: Callable[[Any], Any]) -> Any:
    arguments = _arguments(call)
    return call if arguments is None else _with_part(call, {"arguments": change(arguments)})


def _with_part(call: Any, part: dict[str, Any]) -> Any:
    """Copy a call with another name or other arguments, wherever it keeps them."""
    function = _of(call, "function")
    return {**call, "function": {**function, **part}} if isinstance(function, dict) and function else {**call, **part}


def _with_calls(conversation: Conversation, change: Callable[[Any, int], Any]) -> Conversation:
    """Change each call; `change` takes it and its number, counted through all messages."""
    messages, number = list[Message](), 0
    for message in conversation.messages:
        if _has_calls(message):
            changed = [change(call, number + which) for which, call in enumerate(message["tool_calls"])]
            number, message = number + len(changed), {**message, "tool_calls": changed}
        messages.append(message)
    return replace(conversation, messages=messages)


def _with_arguments(conversation: Conversation, change: Callable[[Any], Any]) -> Conversation:
    return _with_calls(conversation, lambda call, _: _argued(call, change))


def _mapped(conversation: Conversation, change: Callable[[Message], Message]) -> Conversation:
    return replace(conversation, messages=[change(message) for message in conversation.messages])


def _changed(conversation: Conversation, which: Callable[[Message], bool], **keys: Any) -> Conversation:
    return _mapped(conversation, lambda message: {**message, **keys} if which(message) else message)


def _without_keys(conversation: Conversation, which: Callable[[Message], bool], names: tuple[str, ...]) -> Conversation:
    def change(message: Message) -> Message:
        return {key: value for key, value in message.items() if key not in names} if which(message) else message

    return _mapped(conversation, change)


def _where(messages: list[Message], which: Callable[[Message], bool]) -> str:
    """Name the first of such messages, and count the others; "" if there is none."""
    numbers = [number for number, message in enumerate(messages) if which(message)]
    more = f" (and of {len(numbers) - 1} more)" if len(numbers) > 1 else ""
    return f"messages[{numbers[0]}]{more}" if numbers else ""


def _first_of(keys: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in names), None)


def _is_text(content: Any) -> bool:
    return isinstance(content, str) and bool(content.strip())


def _with_other_content(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": "x" if content != "x" else "y"} if _is_text(content) else message


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _other_parts(message: Message) -> list[Any]:
    content = message.get("content")
    return [part for part in content if not _is_text_part(part)] if isinstance(content, list) else []


def _without_other_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": list(filter(_is_text_part, content))} if isinstance(content, list) else message


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
