"""`section.key=value` on the command line, and what a shell completes it to."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_key(typed: str) -> list[str]:
    """Keys of model, data and longctx that begin as what was typed; those of `training` are transformers' and too many."""
    from hf_longctx.settings import Config, DataConfig, LongctxConfig, ModelConfig, Section

    sections: dict[str, type[Section]] = {"model": ModelConfig, "data": DataConfig, "longctx": LongctxConfig}
    keys = [f"{name}.{key}=" for name, section in sections.items() for key in section.model_fields]
    return [
        key for key in [*keys, *(f"{name}." for name in Config.model_fields)] if key.startswith(typed) and key != typed
    ]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Replace what the file says: section.key=value, in YAML.",
        metavar="[KEY=VALUE]...",
        show_default=False,
        autocompletion=complete_key,
    ),
]
