"""docs/comparison.md, setting by setting: each key that it names is there, here and in the released packages."""

import re

import hf_longctx
from hf_longctx.cli import app
from hf_longctx.settings import Config, LoraSection, SourceKeys
from hf_longctx.settings.training import field_types
from tests.worlds.launched import ROOT

KEYS = ROOT / "tests" / "builders" / "migration_keys"
"""Names of the keys in the schemas of the released packages."""


def table_of_the_comparison() -> list[list[str]]:
    """Cells of each row: the setting, what is said of ours, and of others."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    lines = text.partition("## Setting by setting")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def test_the_table_of_the_comparison_names_keys_that_there_are():
    rows = table_of_the_comparison()
    [counted] = re.findall(r"^(\d+) settings and features", (ROOT / "docs" / "comparison.md").read_text(), re.MULTILINE)
    assert int(counted) == len(rows)
    assert len(rows) >= 60
    assert len({row[0] for row in rows}) == len(rows)
    assert [row[0] for row in rows if not re.match(r"has|does not need|refuses|lacks", row[1])] == []
    shared = set(field_types())
    files = ("axolotl-0.19", "llama-factory-0.9.5", "trl-1.16", "ms-swift-4.6")
    for column, file in enumerate(files, start=2):
        known = set((KEYS / f"{file}.txt").read_text().split()) | (shared if column > 2 else set())
        named = [name for row in rows for name in re.findall(r"`(\w+)`", row[column])]
        assert len(named) > 20
        assert [name for name in named if name not in known] == []


def test_what_the_table_says_that_we_have_is_there():
    """Each row with "has" names a setting, a verb, a file of the repository or a name of the package; so do other rows."""
    rows = table_of_the_comparison()
    named = {row[0]: re.findall(r"`([^`]+)`", row[1]) for row in rows}
    assert [row[0] for row in rows if row[1].startswith("has") and not named[row[0]]] == []
    known = {
        f"{section}.{key}"
        for section in ("model", "data", "longctx")
        for key in Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    }
    known |= {f"training.{key}" for key in field_types()} | set(LoraSection.model_fields) | set(SourceKeys.model_fields)
    known |= {f"hf-longctx {command.name or command.callback.__name__}" for command in app.registered_commands}
    known |= {path for path in ("Dockerfile", "examples/deploy") if (ROOT / path).exists()} | set(hf_longctx.__all__)
    others = {"auto": "a value", "TrainJob": "Kubernetes' name of a kind"}
    assert len({name for names in named.values() for name in names}) > 50
    for row, names in named.items():
        for name in names:
            key = " ".join(name.partition(": ")[0].split(" ")[:2])
            assert key in known or name in others, f"{row}: {name}"
