"""Rows as other stacks name and nest them -> the rows that tokenisation.py reads.

    kind       columns                                          becomes
    sharegpt   conversations, perhaps system and tools          messages, with the roles of chat templates
    alpaca     instruction, output, perhaps input, system       messages: what came before, a user's turn
               and history                                      (instruction, then input on a line of its own), an answer

    {"from": "human", "value": "Hi"}                  {"role": "user", "content": "Hi"}
    {"from": "function_call", "value": "{...}"}       {"role": "assistant", "tool_calls": [...]}
    {"from": "observation", "value": "..."}           {"role": "tool", "content": "..."}

Columns, the two keys of a message and roles that are called something else again are named in `RowFormat`. Nothing is sent
between ranks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_longctx.data.chats.conversation import EMPTY, RowError, found
from hf_longctx.row_names import COLUMNS, MESSAGE_KEYS, ROLES, format_problems

SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
"""Roles in `conversations` -> roles of chat templates."""
LISTS = ("messages", "prompt", "completion", "conversations")
"""Columns that may hold lists of messages."""

PREFERENCES = (
    "is for preference tuning, and learning it as text would teach the rejected answers too. It belongs to TRL's DPOTrainer or "
    "KTOTrainer, LLaMA-Factory's stage dpo or axolotl's rl. Valid here: rows of what is to be learned alone, for instance "
    "columns prompt and completion"
)
LOOKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("chosen", "rejected"), f"pairs of preferred and rejected answers, which {PREFERENCES}"),
    (("conversations",), "ShareGPT: kind sharegpt"),
    (("messages",), "conversations: kind messages"),
    (("instruction", "output"), "Alpaca: kind alpaca"),
    (
        ("instruction", "response"),
        "Dolly: kind alpaca with columns {output: response}, and {input: context} where there is one",
    ),
    (("question", "answer"), "questions and answers: columns {prompt: question, completion: answer}"),
    (("query", "response"), "questions and answers: columns {prompt: query, completion: response}"),
    (("prompt", "response"), "prompts and answers: columns {completion: response}"),
    (("problem", "solution"), "problems and solutions: columns {prompt: problem, completion: solution}"),
    (("input", "output"), "inputs and outputs: columns {prompt: input, completion: output}"),
    (("conversation",), "conversations: columns {messages: conversation}"),
    (("dialogue",), "conversations: columns {messages: dialogue}"),
    (("dialog",), "conversations: columns {messages: dialog}"),
    (("content",), "texts: columns {text: content}"),
    (("body",), "texts: columns {text: body}"),
)
"""Columns -> the format that they are known from, and how it is read; the first that has all its columns counts."""


@dataclass(frozen=True)
class RowFormat:
    """How the columns, message keys and roles of a source are called.

    Raises:
        ValueError: a name that nothing is read from, or a role that there is not.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    """one of NAMES -> its name in the source; `role` and `content` are the keys of a message"""
    roles: Mapping[str, str] = field(default_factory=dict)
    """role in the source -> one of ROLES"""

    def __post_init__(self) -> None:
        for rule in format_problems(self.columns, self.roles):
            raise ValueError(": ".join(rule))

    def __bool__(self) -> bool:
        return bool(self.columns or self.roles)

    def renamed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row under the names that are read here; the row itself where nothing is named otherwise."""
        if not self:
            return row
        named = {ours: theirs for ours, theirs in self.columns.items() if ours in COLUMNS}
        mapped = set(named.values())
        result = {name: value for name, value in row.items() if name not in mapped and name not in named}
        result |= {ours: row[theirs] for ours, theirs in named.items() if theirs in row}
        for name in LISTS:
            if isinstance(value := result.get(name), list | tuple):
                result[name] = [self._message(message) for message in value]
        return result

    def names(self, columns: Iterable[str]) -> list[str]:
        """Return what columns are called after `renamed`."""
        column_names = list(columns)
        back = {theirs: ours for ours, theirs in self.columns.items() if ours in COLUMNS and theirs in column_names}
        return [back.get(name, name) for name in column_names if name in back or name not in self.columns]

    def _message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        keys = {self.columns[name]: name for name in MESSAGE_KEYS if name in self.columns}
        # What the message holds under our name, beside theirs, is something else: Arrow fills in keys of other messages too.
        others = {name for theirs, name in keys.items() if theirs in message} - keys.keys()
        result: dict[str, Any] = {
            keys.get(str(key), str(key)): value for key, value in message.items() if str(key) not in others
        }
        role = result.get("role")
        if isinstance(role, str) and role in self.roles:
            result["role"] = self.roles[role]
        return _called(result) if result.get("role") == "function_call" else result


def sharegpt(row: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of `conversations` with `messages` instead.

    Args:
        row: as `RowFormat.renamed` returns it.
        roles: in addition to SHAREGPT_ROLES.

    Raises:
        RowError: a turn has no speaker or one that is not known, or two columns say what the system says.
    """
    turns = row["conversations"]
    if not isinstance(turns, list | tuple):
        raise RowError(f"column 'conversations' holds {found(turns)}; valid: a list of turns, each with from and value")
    known = SHAREGPT_ROLES | dict(roles)
    messages = []
    for number, turn in enumerate(turns):
        place = f"conversations[{number}]"
        if not isinstance(turn, Mapping):
            raise RowError(f"{place} is {found(turn)}; valid: a mapping with from and value")
        turn = {str(key): value for key, value in turn.items() if value is not None}
        speaker = turn.pop("from", None) if "role" not in turn else turn.pop("role")
        if not isinstance(speaker, str) or speaker not in known:
            raise RowError(
                f"{place} is said by {found(speaker)}; valid: {', '.join(known)}, or data.roles, which says what it is: "
                f"{{{speaker}: user}}"
            )
        value = turn.pop("value", None) if "content" not in turn else turn.pop("content")
        message: dict[str, Any] = {"role": known[speaker], **({} if value is None else {"content": value}), **turn}
        messages.append(_called(message) if message["role"] == "function_call" else message)
    rest = {name: value for name, value in row.items() if name not in ("conversations", "system")}
    return {**rest, "messages": [*_system(row, messages), *messages]}


def alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `instruction` and `output` with `messages` instead.

    Raises:
        RowError: one of them is no text, or the history is no list of pairs of texts.
    """
    instruction, given, output = (_text(row, name) for name in ("instruction", "input", "output"))
    if not output:
        raise RowError(f"{EMPTY}column 'output' is empty")
    messages = []
    history = row.get("history") or []
    for pair in history if isinstance(history, list | tuple) else [history]:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(turn, str) for turn in pair)):
            raise RowError(
                f"column 'history' holds {found(history)}; valid: a list of pairs of an instruction and its output"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = "\n".join(part for part in (instruction, given) if part)
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    rest = {
        name: value
        for name, value in row.items()
        if name not in ("instruction", "input", "output", "history", "system")
    }
    return {**rest, "messages": [*_system(row, messages), *messages]}


def preference_reason(row: Mapping[str, Any]) -> str | None:
    """Return why a row is one of preferences, which are not trained on here; None: it is none."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return f"columns 'chosen' and 'rejected': a pair of answers {PREFERENCES}"
    if "completion" in row and _is_flag(row.get("label")):
        return f"column 'label' says whether the completion is wanted: it {PREFERENCES}"
    if _is_flag(row.get("kto_tag")):
        return f"column 'kto_tag' says whether the answer is wanted: it {PREFERENCES}"
    return None


def _is_flag(value: Any) -> bool:
    """Return whether a value says yes or no; as a text, too, as all values of a CSV file are."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false"))


def looks_like(columns: Iterable[str]) -> str:
    """Return "; it looks like ..." of columns that are known from a format, or ""."""
    column_names = set(columns)
    description = next((description for names, description in LOOKS if set(names) <= column_names), None)
    return f"; it looks like {description}" if description else ""


def _system(row: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the message that the column `system` is."""
    prompt = _text(row, "system")
    if not prompt:
        return []
    if messages and messages[0]["role"] == "system":
        if messages[0].get("content") == prompt:
            return []
        raise RowError(
            "both column 'system' and the first turn say what the system says, and differ; valid: one of them"
        )
    return [{"role": "system", "content": prompt}]


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"column {name!r} holds {found(value)}; valid: a string")
    return value


def _called(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with the calls that the content of a function_call spells in JSON."""
    text = message.get("content")
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        calls = None
    calls = [calls] if isinstance(calls, Mapping) else calls
    if (
        not isinstance(calls, list)
        or not all(isinstance(call, Mapping) and "name" in call for call in calls)
        or not calls
    ):
        raise RowError(f"a function_call holds {found(text)}; valid: JSON with name and arguments, or a list of such")
    functions = [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {"role": "assistant", "tool_calls": functions, **rest}
