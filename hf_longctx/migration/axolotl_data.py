"""axolotl's data sets, after its schemas in release 0.19: paths, kinds, columns, roles and splits."""

from typing import Any

from hf_longctx.migration import shared
from hf_longctx.migration.rules import Migration, Needless, Refuse, Without, as_list, keys

KINDS = {
    "chat_template": "messages",
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
}
"""Types of data sets, up to a dot or colon -> kinds."""
SOURCE_KEYS = {
    **keys(
        Needless("documents are tokenised once, in parallel, and rows are shared out by the loader"),
        "shards shards_idx preprocess_shards",
    ),
    **keys(
        Needless("labels are what the assistant writes, found for any template: also where a turn ends"),
        "roles_to_train train_on_eos train_on_eot conversation message_field_training_detail",
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


def datasets(migration: Migration, value: Any) -> None:
    """Set the sources of a configuration."""
    sources = [_source(migration, source) for source in (value if isinstance(value, list) else [value])]
    splits = list(dict.fromkeys(split for _, split in sources if split))
    if len(splits) > 1:
        migration.note("without", f"one name for all of {', '.join(splits)}: data.train_split")
    if splits and splits[0] != "train":
        migration.put("data.train_split", splits[0])
    given = [source for source, _ in sources]
    if len(given) == 1:
        for name, setting in given[0].items():
            migration.put(f"data.{name}", setting)
    else:
        migration.put("data.sources", given)
    migration.note("translated", f"data: {given[0] if len(given) == 1 else given}")


def _source(migration: Migration, given: Any) -> tuple[dict[str, Any], str]:
    """Return one source of ours, and its split."""
    given = {"path": given} if isinstance(given, str) else given
    kind = given.get("type")
    name = "messages" if isinstance(kind, dict) else str(kind or "chat_template").split(".")[0].split(":")[0]
    source: dict[str, Any] = {"path": given.get("data_files") or given.get("path")}
    if name in KINDS:
        source["kind"] = KINDS[name]
    elif kind is not None:
        migration.note(
            "without", f"type {kind}: rows as data.kind reads them, with data.columns and data.roles (docs/data.md)"
        )
    if isinstance(kind, dict):
        fields = {"instruction": "instruction", "input": "input", "output": "output", "system": "system"}
        source |= {
            "kind": "alpaca",
            "columns": {
                ours: kind[f"field_{theirs}"] for ours, theirs in fields.items() if kind.get(f"field_{theirs}")
            },
        }
        migration.note(
            "without",
            "type with formats of its own: model.chat_template, a file with a jinja template that writes them",
        )
    columns = dict(source.pop("columns", {}))
    pairs = given.get("message_property_mappings") or {}
    pairs |= {"role": given.get("message_field_role"), "content": given.get("message_field_content")}
    pairs |= {
        key: value
        for key, value in (given.get("message_property_mappings") or {}).items()
        if key in ("role", "content")
    }
    if source.get("kind") == "messages":
        columns |= (
            {"messages": given["field_messages"]} if given.get("field_messages") not in (None, "messages") else {}
        )
        columns |= {key: pairs[key] for key in ("role", "content") if pairs.get(key) not in (None, key)}
        columns |= {"tools": given["field_tools"]} if given.get("field_tools") not in (None, "tools") else {}
    elif field := given.get("text_column") or given.get("field"):
        columns |= {"text": field} if field != "text" else {}
    if columns:
        source["columns"] = columns
    if roles := given.get("roles"):
        source["roles"] = {
            theirs: ours for ours, all_theirs in roles.items() for theirs in as_list(all_theirs) if theirs != ours
        }
        source = {key: value for key, value in source.items() if key != "roles" or value}
    if given.get("name"):
        source["subset"] = given["name"]
    split, _, part = str(given.get("split") or "").partition("[")
    if part:
        migration.note("without", f"split {given['split']}: data.max_documents takes the first so many")
    read = {
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
    }
    read |= {"message_property_mappings", "message_field_role", "message_field_content"}
    for key in given.keys() - read:
        rule = SOURCE_KEYS.get(key)
        if isinstance(rule, Refuse):
            raise ValueError(f"{key}: {rule.why}")
        advice = (
            rule.why
            if isinstance(rule, Needless)
            else rule.instead
            if isinstance(rule, Without)
            else "no key of axolotl 0.19"
        )
        migration.note("needless" if isinstance(rule, Needless) else "without", f"{key}: {advice}")
    return source, split
