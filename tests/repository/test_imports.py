"""Imports point one way, the planning side needs no torch, tests mirror the package, and no file is a drawer for odds and ends.

    layouts <- attention <- models <- training -> data -> planner -> layouts;   simulator, models -> planner

Read from the syntax trees, so that an import inside a function counts like any other.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.builders.imported_names import imported_names

ROOT = Path(__file__).parents[2]
PACKAGE = "hf_longctx"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

MAY_IMPORT: dict[str, set[str]] = {
    "layouts": set(),
    "supervision": set(),
    "counting": set(),
    "redaction": set(),
    "row_names": set(),
    "whole_files": set(),
    "hardware": {"counting"},
    "precision": {"counting", "hardware"},
    "attention": {"layouts", "hardware", "supervision"},
    "planner": {"counting", "hardware", "layouts"},
    "models": {"attention", "planner", "hardware", "layouts"},
    "simulator": {"parallel", "counting", "hardware", "planner", "layouts"},
    "data": {"planner", "layouts", "row_names", "whole_files"},
    "certificate": {"models", "attention", "data", "layouts", "whole_files"},
    "certified_patch": {"models", "certificate"},
    "settings": {"models", "planner", "hardware", "row_names"},
    "migration": {"settings"},
    "parallel": {"planner", "attention", "models", "settings", "supervision"},
    "checkpoint": {"attention", "models", "supervision", "redaction", "whole_files"},
    "training": {
        *("layouts", "supervision", "hardware", "precision", "attention", "planner", "models", "data", "certificate"),
        *("certified_patch", "settings", "parallel", "checkpoint", "redaction", "counting", "whole_files"),
    },
    "inference": {"models", "attention", "data", "planner", "hardware", "precision", "layouts"},
    "report": {"simulator", "planner", "counting", "hardware", "layouts", "redaction", "whole_files"},
}
"""Which other parts of the package (the files and folders directly in it) each part may import."""
ON_TOP = {"__init__", "__main__", "cli", "commands", "config", "run_documents", "registration", "run"}
"""Parts that may import everything; of the others, none may import these."""
WITHOUT_TORCH = ("layouts/", "planner/", "parallel/world.py", "hardware/", "simulator/")
"""How the paths of files begin that work without torch."""
BRINGS_TORCH = {"torch", "transformers", "accelerate", "datasets", "peft"}
ODDS_AND_ENDS = {"util", "utils", "helper", "helpers", "misc", "common"}
MOST_FILES = 20
"""How many files a folder may have: a reader sees them all at once."""
BESIDE_THE_PACKAGE = {"worlds", "builders", "journeys", "benchmarks", "docs", "scripts", "repository", "suite"}
"""Folders of tests/ that mirror no folder of the package (docs/contributing.md says what is in them)."""


def part_of(dotted: str) -> str:
    """`hf_longctx.planner.cost.cost_model.CostModel` -> `planner`; `hf_longctx` and its lazy attributes -> `__init__`."""
    part = [*dotted.split("."), ""][1]
    return part if part in MAY_IMPORT or part in ON_TOP else "__init__"


def violations(file: str, source: str) -> list[str]:
    """Return what is wrong with the imports of `file`, a path within the package such as `planner/cost/cost_model.py`."""
    part = Path(file).parts[0].removesuffix(".py")
    if part in ON_TOP:
        return []
    if part not in MAY_IMPORT:
        return [f"{file}: no rule says what {part!r} may import; the parts are {sorted([*MAY_IMPORT, *ON_TOP])}"]
    package = ".".join([PACKAGE, *Path(file).parent.parts])
    problems = []
    for line, name in imported_names(ast.parse(source), package):
        top = name.split(".")[0]
        if top == PACKAGE and part_of(name) not in {part, *MAY_IMPORT[part]}:
            allowed = ", ".join(sorted(MAY_IMPORT[part])) or "nothing of ours"
            problems.append(f"{file}:{line} imports {name}: {part} may import {allowed}, not {part_of(name)}")
        if top in BRINGS_TORCH and file.startswith(WITHOUT_TORCH):
            problems.append(f"{file}:{line} imports {name}: it works without torch")
    return problems


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file: Path):
    problems = violations(str(file.relative_to(ROOT / PACKAGE)), file.read_text())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        (
            "layouts/layout.py",
            "import hf_longctx.attention.engine",
            "layouts/layout.py:1 imports hf_longctx.attention.engine",
        ),
        ("planner/hdp.py", "\ndef f():\n    from hf_longctx.data import loader", "planner/hdp.py:3"),
        ("planner/hdp.py", "from ..training import step", "imports hf_longctx.training.step"),
        ("attention/kernels/flash.py", "from ...models import llama", "imports hf_longctx.models.llama"),
        ("data/__init__.py", "from . import loader\nfrom ..training import step", "data/__init__.py:2"),
        ("models/families/llama.py", "from hf_longctx import LongContextTrainer", "not __init__"),
        ("models/families/llama.py", "import hf_longctx", "not __init__"),
        ("data/loader.py", "from hf_longctx import config", "not config"),
        (
            "planner/cost/cost_model.py",
            "import numpy\nimport torch.distributed as dist",
            "planner/cost/cost_model.py:2",
        ),
        ("layouts/layout.py", "from transformers import Trainer", "works without torch"),
        ("extras/new.py", "", "no rule says what 'extras' may import"),
    ],
)
def test_a_wrong_import_is_named(file: str, source: str, expected: str):
    (problem,) = violations(file, source)
    assert expected in problem


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config.py", "from hf_longctx.training import step"),
        ("__init__.py", "import torch, hf_longctx.models"),
        ("planner/hdp.py", "import numpy\nfrom hf_longctx.layouts.layout import Layout\nfrom .cost import CostModel"),
        ("planner/hdp.py", "from .. import layouts\nfrom hf_longctx import layouts\nfrom . import cost"),
        ("training/step.py", "import torch\nfrom ..data import loader\nfrom hf_longctx.attention import engine"),
    ],
)
def test_a_right_import_passes(file: str, source: str):
    assert violations(file, source) == []


def test_no_file_is_named_for_odds_and_ends():
    tracked = [path for top in (PACKAGE, "tests", "scripts", "benchmarks") for path in (ROOT / top).rglob("*")]
    named = [str(path.relative_to(ROOT)) for path in tracked if path.stem.lower() in ODDS_AND_ENDS]
    assert not named, f"{named}: a file's name says what is in it"


@pytest.mark.processes
def test_the_planning_side_runs_without_torch():
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in FILES
        if str(file.relative_to(ROOT / PACKAGE)).startswith(WITHOUT_TORCH)
    ]
    assert f"{PACKAGE}.planner" in modules
    # An import of a module that is None in sys.modules fails, and the traceback names the file and line that tried.
    program = f"import sys\nsys.modules.update(dict.fromkeys({sorted(BRINGS_TORCH)}))\nimport {', '.join(modules)}"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_verbs_import_no_verbs():
    """Several verbs share what has a file of its own, which is no verb."""
    commands = ROOT / PACKAGE / "commands"
    verbs = {
        name.rpartition(".")[2] for _, name in imported_names(ast.parse((ROOT / PACKAGE / "cli.py").read_text()), "")
    }
    files = {verb: commands / f"{verb}.py" for verb in verbs if (commands / f"{verb}.py").is_file()}
    assert len(files) > 15
    for verb, file in files.items():
        imported = {name for _, name in imported_names(ast.parse(file.read_text()), f"{PACKAGE}.commands")}
        modules = {name.split(".")[2] for name in imported if name.startswith(f"{PACKAGE}.commands.")}
        others = (modules & files.keys()) - {verb}
        assert not others, f"{verb} imports {others}"


def test_test_modules_are_imported_by_nobody():
    """Several share builders, worlds, and files of their room."""
    for file in sorted((ROOT / "tests").rglob("*.py")):
        package = ".".join(file.relative_to(ROOT).parent.parts)
        names = {name for _, name in imported_names(ast.parse(file.read_text()), package)}
        assert not [name for name in names if name.startswith("tests.") and ".test_" in name], file


def crowded(files: Collection[Path]) -> list[str]:
    """Return which folders have more files than a reader sees at once."""
    counts = Counter(file.parent for file in files)
    return [f"{folder}: {count} files" for folder, count in counts.items() if count > MOST_FILES]


@pytest.mark.parametrize("top", [PACKAGE, "tests"])
def test_folders_have_few_files(top: str):
    files = [path.relative_to(ROOT) for path in (ROOT / top).rglob("*") if path.is_file()]
    assert not crowded([file for file in files if "__pycache__" not in file.parts])


def misplaced(files: Collection[Path], rooms: Collection[Path]) -> list[str]:
    """Return what is wrong with the places of test modules.

    Args:
        files: paths within tests/.
        rooms: folders of the package, as paths within it.
    """
    names = Counter(file.name for file in files)
    twice = [f"{file}: another test module has this name" for file in files if names[file.name] > 1]
    free = {file.parent for file in files if file.parts[0] not in BESIDE_THE_PACKAGE} - {Path()}
    return twice + [f"{folder} is no folder of {PACKAGE}" for folder in sorted(free - {*rooms})]


def test_tests_mirror_the_package():
    files = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    assert not misplaced(files, {file.relative_to(ROOT / PACKAGE).parent for file in FILES})
    beside = {path.name for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")}
    assert beside == {"__init__.py", "conftest.py"}


def test_misplaced_tests_are_named():
    files = [Path("test_cli.py"), Path("planner/test_plan.py"), Path("docs/test_plan.py"), Path("plans/test_cost.py")]
    problems = misplaced(files, {Path("planner")})
    assert [problem.split(":")[0] for problem in problems] == [
        *("planner/test_plan.py", "docs/test_plan.py"),
        f"plans is no folder of {PACKAGE}",
    ]
    assert crowded([Path("planner") / f"{number}.py" for number in range(MOST_FILES + 1)]) == ["planner: 21 files"]
    assert not crowded([Path("planner") / f"{number}.py" for number in range(MOST_FILES)])
