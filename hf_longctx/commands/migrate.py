"""`hf-longctx migrate`: a configuration of axolotl, LLaMA-Factory or TRL becomes one of ours, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from hf_longctx.migration.rules import Migration

Stack = Literal["auto", "axolotl", "llama-factory", "trl"]
SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("axolotl", ("base_model",)),
    ("llama-factory", ("stage", "finetuning_type", "template", "cutoff_len")),
    ("trl", ("model_name_or_path", "dataset_name", "datasets")),
)
"""Stack -> keys of which one is in its files; the first that has one counts."""
FROZEN = {"axolotl": "in bfloat16 where it computes in it", "llama-factory": "in the checkpoint's dtype"}
"""How stacks hold the frozen weights beside adapters, and we in model.dtype."""
HEADINGS = {
    "translated": "Translated",
    "needless": "Needless here",
    "without": "Without counterpart: what to do instead",
}


def migrate(
    file: Annotated[Path, typer.Argument(help="YAML file of axolotl, LLaMA-Factory or TRL.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(help="Write this YAML file. By default FILE's name with -hf_longctx.", show_default=False),
    ] = None,
    stack: Annotated[Stack, typer.Option("--from", help="Read a file of this stack; auto: tell by its keys.")] = "auto",
    gpus: Annotated[int, typer.Option(min=1, help="Count with so many processes: the batch in FILE is for each.")] = 1,
) -> None:
    """Turn a file of axolotl, LLaMA-Factory or TRL into one of ours.

    Example: hf-longctx migrate configs/migrate/axolotl_chat.yaml --output migrated.yaml
    """
    from hf_longctx.commands.shared.outputs import refuse_no_file

    given = read_file(file)
    output = output or file.with_name(f"{file.stem}-hf_longctx.yaml")
    if output.exists():
        raise ValueError(f"{output} exists: give another --output, or remove it")
    refuse_no_file(output, f"--output {output}")
    name = stack_of(given) if stack == "auto" else stack
    migration = migrated(given, name, gpus)
    text = _text(migration, name, file, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    _show(migration, name, file)
    print(f"\n{output}: written")
    _say_what_is_left(output)


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ValueError if it holds none, or a key twice."""
    from hf_longctx.config import located, read_yaml

    origin: dict[tuple[str, ...], str] = {}
    problems: list[tuple[tuple[str, ...], str]] = []
    given = read_yaml(path, origin, problems)
    if problems:
        raise ValueError("\n  ".join([f"{path}: {len(problems)} problem(s)", *located(problems, origin)]))
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{path} holds no mapping of keys, but {type(given).__name__ if given else 'nothing'}")
    return {str(key): value for key, value in given.items()}


def stack_of(given: dict[str, Any]) -> str:
    """Return whose file has these keys. Raises ValueError if it is nobody's that is known."""
    name = next((name for name, signs in SIGNS if any(sign in given for sign in signs)), None)
    if name is None:
        known = "; ".join(f"{name}: {' or '.join(signs)}" for name, signs in SIGNS)
        raise ValueError(
            f"whose file it is cannot be told by its keys ({known}): valid: --from axolotl, llama-factory or trl"
        )
    return name


def migrated(given: dict[str, Any], stack: str, gpus: int = 1) -> Migration:
    """Return what a file of theirs becomes.

    Raises:
        ValueError: it asks for what is not trained here.
    """
    from hf_longctx.migration import axolotl, llama_factory, trl
    from hf_longctx.migration.rules import Migration, Without, apply

    theirs = {"axolotl": axolotl, "llama-factory": llama_factory, "trl": trl}[stack]
    defaults = theirs.defaults(given)
    migration = Migration(given | defaults, gpus, stack, frozenset(defaults))
    apply(theirs.TABLE, migration, Without(f"no key that {stack} is known to have: look what it does there"))
    frozen = migration.get("model.lora") and migration.get("training.bf16") and not migration.get("model.dtype")
    if stack in FROZEN and frozen:
        migration.key = "bf16"
        migration.note(
            "without", f"{stack} holds the frozen weights {FROZEN[stack]}: model.dtype: bfloat16, half the memory"
        )
    if not migration.get("longctx.capacity"):
        migration.put("longctx.capacity", 0)
    migration.config["training"].setdefault("output_dir", "runs/migrated")
    migration.config["training"].setdefault("report_to", [])
    return migration


def _text(migration: Migration, stack: str, file: Path, output: Path) -> str:
    import yaml

    config = {section: values for section, values in migration.config.items() if values}
    head = f"# hf-longctx train {output}\n#\n# Made of {file.name} ({stack}) by `hf-longctx migrate`. Left out:\n"
    left = [f"#   {note.key}: {' '.join(note.text.split())}\n" for note in migration.notes if note.kind == "without"]
    return (
        head
        + ("".join(left) or "#   nothing\n")
        + "\n"
        + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120)
    )


def _show(migration: Migration, stack: str, file: Path) -> None:
    """Print what became of each key."""
    print(f"{file}: {len(migration.given.keys() - migration.by_default)} keys of {stack}")
    for kind, heading in HEADINGS.items():
        notes = [note for note in migration.notes if note.kind == kind]
        if notes:
            print(f"\n{heading}:")
        for note in notes:
            print(f"  {note.key}: {note.text}")


def _say_what_is_left(output: Path) -> None:
    """Print what is wrong with the file still, or how to go on."""
    from hf_longctx.config import load_config

    try:
        load_config(output)
    except ValueError as error:
        print(f"what is left to do:\n{error}")
    else:
        print(f"look at its plan and memory:  hf-longctx train {output} --dry-run\ntrain:  hf-longctx train {output}")
