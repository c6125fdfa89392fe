"""Names of what rows hold: columns, keys of a message, roles. Settings and data both read them; nothing is imported."""

from collections.abc import Iterator, Mapping

COLUMNS = (
    *("input_ids", "labels", "messages", "prompt", "completion", "text"),
    *(
        "conversations",
        "instruction",
        "input",
        "output",
        "history",
        "system",
        "tools",
        "documents",
        "chat_template_kwargs",
    ),
)
"""Columns that are read."""
MESSAGE_KEYS = ("role", "content")
NAMES = (*COLUMNS, *MESSAGE_KEYS)
"""Names that `columns` may map to others."""
ROLES = ("system", "user", "assistant", "tool", "function_call")
"""Roles that `roles` may map other names to; function_call: an assistant's call, whose content is JSON."""


def format_problems(columns: Mapping[str, str], roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the setting and the rule of what `columns` and `roles` cannot be."""
    for ours in columns:
        if ours not in NAMES:
            yield "columns", f"{ours!r} is nothing that is read; valid on the left: {', '.join(NAMES)}"
    twice = [name for name in dict.fromkeys(columns.values()) if list(columns.values()).count(name) > 1]
    for name in twice:
        yield "columns", f"{name!r} is read as two things; valid: each column once"
    for theirs, ours in roles.items():
        if ours not in ROLES:
            yield "roles", f"{theirs!r}: {ours!r} is no role; valid on the right: {', '.join(ROLES)}"
