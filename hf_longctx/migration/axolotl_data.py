"""axolotl's data sets, after its schemas in release 0.19: paths, kinds, columns, roles and splits."""

from typing import Any

from hf_longctx.migration import shared
from hf_longctx.migration.rules import (
    Migration,
    Needless,
    NotTranslated,
    Refuse,
    Rule,
    Without,
    as_list,
    keys,
    rule_for,
)

KINDS = {
    "chat_template": "messages",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
}
"""Types of data sets, up to a dot or colon -> kinds."""
SOURCE_KEYS: dict[str, Rule] = {
    **keys(
        Needless("documents are tokenised once, in parallel, and rows are shared out by the loader"),
        "shards shards_idx preprocess_shards",
    ),
    "roles_to_train": Needless(
        "labels are what the assistant writes, found for any template",
        of=("assistant", "gpt", ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
        otherwise=Without("labels are what the assistant writes; data.train_on: all learns every role"),
    ),
    **keys(
        Needless(
            "labels are what the assistant writes, also where its turn ends",
            of=("turn",),
            otherwise=Without("the end of each turn of the assistant is learned; data.train_on: all learns all tokens"),
        ),
        "train_on_eos train_on_eot",
    ),
    **keys(
        Needless("labels are what the assistant writes, found for any template"),
        "conversation message_field_training_detail",
    ),
    **keys(
        Needless("files are read by their ending, and rows by their columns"),
        "ds_type input_format input_transform format no_input_format",
    ),
    **keys(Without("one template for all sources: model.chat_template"), "chat_template chat_template_jinja"),
    **keys(Without("name a local copy of the revision wanted: hf download --repo-type dataset --revision"), "revision"),
    **keys(Without("no code of a data set is run: give files of rows"), "trust_remote_code"),
    **keys(Without("columns in data.columns"), "field_human field_model field_system system_prompt system_format"),
    **keys(
        Without("refused in rows where a template does not write it; a template of your own: model.chat_template"),
        "field_thinking template_thinking_key split_thinking drop_system_message message_field_training",
    ),
    **keys(
        shared.OTHER_OBJECTIVE,
        "field_chosen field_rejected field_completion field_label field_prompt prompt_format chosen_format rejected_format "
        "completion_format step_separator max_completion_length train_on_last_step_only logprobs_field temperature",
    ),
    **keys(Without("drawn at random there; give documents"), "length sequence_length min_input_id max_input_id seed"),
    **keys(Without("data.max_documents takes the first; rows cannot be skipped"), "skip"),
}
"""Keys of a data set that `_source` does not read."""


READ = frozenset(
    {
        *(
            "path",
            "type",
            "split",
            "name",
            "data_files",
            "field",
            "text_column",
            "field_messages",
            "field_tools",
            "roles",
        ),
        *("message_property_mappings", "message_field_role", "message_field_content"),
    }
)
"""Keys of a data set that `_source` reads."""
FIELDS = ("instruction", "input", "output", "system")
"""Columns of a type with fields of its own."""


def datasets(migration: Migration, value: Any) -> None:
    """Set the sources of a configuration."""
    given = [{"path": source} if isinstance(source, str) else source for source in _listed(value)]
    sources = [_source(migration, source) for source in given]
    migration.put_sources(sources)
    if migration.get("model.chat_template") is None and all(source.get("kind") == "alpaca" for source in sources):
        migration.put("model.chat_template", "alpaca")
        migration.note(
            "translated",
            "model.chat_template: alpaca (axolotl's default with type alpaca, which has Alpaca's prompts for any model; the "
            "sentence before them is a message of the system here)",
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _split(given: dict[str, Any]) -> tuple[str, str]:
    """Return the name of a data set's split, and what it takes of it: train[:100]."""
    name, _, part = str(given.get("split") or "").partition("[")
    return name, part


def _source(migration: Migration, given: dict[str, Any]) -> dict[str, Any]:
    """Return one source of ours."""
    source: dict[str, Any] = {"path": given.get("data_files") or given.get("path")} | _kind(
        migration, given.get("type")
    )
    columns: dict[str, str] = source.pop("columns", {}) | _columns(given, source.get("kind"))
    roles = {
        theirs: ours
        for ours, all_theirs in (given.get("roles") or {}).items()
        for theirs in as_list(all_theirs)
        if theirs != ours
    }
    source |= {"columns": columns, "roles": roles, "subset": given.get("name")}
    split, part = _split(given)
    source["train_split"] = split if split != "train" else None
    if part:
        migration.note("without", f"split {given['split']}: data.max_documents takes the first so many")
    _note_others(migration, given)
    return {key: value for key, value in source.items() if value}


def _kind(migration: Migration, kind: Any) -> dict[str, Any]:
    """Return the kind that a type of theirs is, with columns where it names some."""
    if isinstance(kind, dict):
        migration.note(
            "without",
            "type with formats of its own: model.chat_template, a file with a jinja template that writes them",
        )
        columns = {name: kind[f"field_{name}"] for name in FIELDS if kind.get(f"field_{name}")}
        return {"kind": "alpaca", "columns": columns}
    name = str(kind or "chat_template").split(".")[0].split(":")[0]
    if name in KINDS:
        return {"kind": KINDS[name]}
    migration.note(
        "without", f"type {kind}: rows as data.kind reads them, with data.columns and data.roles (docs/data.md)"
    )
    return {}


def _columns(given: dict[str, Any], kind: str | None) -> dict[str, str]:
    """Return columns, and keys of messages, that are called something else."""
    if kind == "messages":
        named: dict[str, Any] = {
            **{"messages": given.get("field_messages"), "tools": given.get("field_tools")},
            **{"role": given.get("message_field_role"), "content": given.get("message_field_content")},
        }
        mapped = given.get("message_property_mappings") or {}
        named |= {ours: theirs for ours, theirs in mapped.items() if ours in ("role", "content")}
    else:
        named = {"text": given.get("text_column") or given.get("field")}
    return {ours: theirs for ours, theirs in named.items() if theirs not in (None, "", ours)}


def _note_others(migration: Migration, given: dict[str, Any]) -> None:
    """Note what becomes of keys that are not read, in their order."""
    for key in (key for key in given if key not in READ):
        rule = rule_for(SOURCE_KEYS.get(key) or Without("no key of axolotl 0.19"), given[key])
        if isinstance(rule, Refuse):
            raise NotTranslated(f"{key}: {rule.why}")
        if isinstance(rule, Needless):
            migration.note("needless", f"{key}: {rule.why}")
        elif isinstance(rule, Without):
            migration.note("without", f"{key}: {rule.instead}")
