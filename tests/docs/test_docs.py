"""The documentation is true where a machine can tell: links lead somewhere, Python blocks import what exists and call it with
arguments that it has, YAML blocks are valid configurations, command lines parse, errors are quoted as they are, tables
are what benchmarks/results say; and the site builds without a warning and asks no other server for anything.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from markdown.extensions.toc import slugify
from markdown_it import MarkdownIt
from torch.distributed.run import get_args_parser

from hf_longctx import cli
from hf_longctx.config import load_config
from tests.builders.transformers_versions import SPREADS_MODELS
from tests.worlds.launched import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
USERS_PROGRAMS = {"train.py"}
"""Programs of the reader's own."""
PLAIN = {"bash", "cd", "export", "git", "mkdocs", "sbatch", "source"}
"""Programs of which only files that they name are checked."""
MINIMAL: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"path": "documents.jsonl"},
    "longctx": {"capacity": 1024},
    "training": {},
}


class Block(NamedTuple):
    language: str
    text: str
    line: int


def parsed(page: Path) -> list[Any]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def blocks(page: Path, language: str) -> list[Block]:
    fences = [token for token in parsed(page) if token.type == "fence"]
    fenced = [Block(token.info.split(" ")[0], token.content, token.map[0] + 1) for token in fences]
    return [block for block in fenced if block.language == language]


by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# Links


def links(page: Path) -> Iterator[str]:
    for token in parsed(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target and not re.match(r"[a-z]+:", target):
                yield target


def anchors(page: Path) -> set[str]:
    headings = {
        slugify("".join(child.content for child in inline.children), "-")
        for heading, inline in itertools.pairwise(parsed(page))
        if heading.type == "heading_open"
    }
    return headings | set(re.findall(r'<a id="([^"]+)"', page.read_text()))


@by_page
def test_links_lead_to_files_and_headings_that_exist(page: Path):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        assert target.is_relative_to(ROOT), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}: {sorted(anchors(target))}"


# Python


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return what `a.b.c` of imported names is; None where it is not known."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (of := resolved(node.value, names)) is not None:
        if inspect.ismodule(of):
            assert hasattr(of, node.attr), f"{of.__name__} has no {node.attr}"
        return getattr(of, node.attr, None)
    return None


NEWER = set() if SPREADS_MODELS else {"ep_size"}
"""Arguments that the installed transformers does not have yet; pages say which one has."""


@by_page
def test_python_blocks_import_what_exists_and_call_it_with_arguments_that_it_has(page: Path):
    names: dict[str, Any] = {}  # a later block goes on with what an earlier one has imported
    for block in blocks(page, "python"):
        tree = ast.parse(block.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {
                    alias.asname or alias.name.split(".")[0]: importlib.import_module(alias.name)
                    for alias in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                resolved(node, names)
            if isinstance(node, ast.Call) and callable(called := resolved(node.func, names)):
                parameters = inspect.signature(called).parameters.values()
                valid = {parameter.name for parameter in parameters} | NEWER
                anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
                for keyword in node.keywords:
                    assert anything or keyword.arg in valid, f"{page}:{block.line}: {called.__name__}({keyword.arg}=)"


# Data and configurations


def paths_in(data: Any) -> Iterator[str]:
    """Paths that a section `data` names."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key == "sources":
                for source in value:
                    yield from paths_in(source)
            elif key == "path":
                listed = value.values() if isinstance(value, dict) else [value]
                for entry in listed:
                    yield from entry if isinstance(entry, list) else [entry]


def check_configuration(fragment: dict[str, Any], overrides: list[str], folder: Path) -> None:
    """Fails with load_config's own words where a configuration, or a part of one, is not valid."""
    whole = {section: MINIMAL[section] | (fragment.get(section) or {}) for section in MINIMAL}
    whole |= {section: fragment[section] for section in fragment.keys() - MINIMAL.keys()}
    for one, instead in (("model", "random_init"), ("data", "sources")):
        if instead in whole[one]:
            whole[one] = {
                key: value for key, value in whole[one].items() if key != "path" or key in (fragment[one] or {})
            }
    for path in paths_in(whole["data"]):
        if Path(path).suffix:
            (folder / path).touch()
        else:
            (folder / path).mkdir(parents=True, exist_ok=True)
            if whole["data"].get("on_the_fly"):
                (folder / path / "state.json").touch()  # as datasets' save_to_disk leaves it
    (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    load_config(folder / "config.yaml", overrides)


@by_page
def test_yaml_blocks_are_configurations_or_parts_of_them(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block.text)
        if "distributed_type" in content:  # a file of accelerate's
            unknown = content.keys() - {field.name for field in dataclasses.fields(ClusterConfig)}
            assert not unknown, f"{page}:{block.line}: {unknown}"
        else:
            check_configuration(content, [], tmp_path)


@by_page
def test_json_blocks_are_rows(page: Path):
    for block in blocks(page, "json"):
        for line in block.text.splitlines():
            json.loads(line)


# Command lines


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_0-9]+=", words[0]):
            words = words[1:]
        if words:
            yield words


def check_program(script: str, arguments: list[str], folder: Path) -> None:
    if script in USERS_PROGRAMS:
        return
    assert (ROOT / script).is_file(), script
    if script.endswith("train.py"):
        assert arguments[0] == "--config", arguments
        config, *overrides = arguments[1:]
        if (ROOT / config).exists():
            load_config(ROOT / config, overrides)
        else:
            check_configuration({}, overrides, folder)
        return
    text = "".join(file.read_text() for file in (ROOT / script).parent.glob("*.py"))  # some options are shared
    for word in arguments:
        assert not word.startswith("--") or f'"{word.split("=")[0]}"' in text, f"{script} has no {word}"


def check_command(words: list[str], folder: Path) -> None:
    program, *rest = words
    if program == "hf-longctx":
        group: Any = typer.main.get_command(cli.app)
        verb, *arguments = rest
        assert verb in group.commands, f"no verb {verb!r}"
        group.commands[verb].make_context(verb, arguments)
    elif program == "accelerate":
        assert rest[0] == "launch"
        launched = launch_command_parser().parse_args(rest[1:])
        check_program(launched.training_script, launched.training_script_args, folder)
    elif program == "torchrun":
        launched = get_args_parser().parse_args(rest)
        if launched.module:
            assert launched.training_script == "hf_longctx"
            check_command(["hf-longctx", *launched.training_script_args], folder)
        else:
            check_program(launched.training_script, launched.training_script_args, folder)
    elif program == "python":
        check_program(rest[0], rest[1:], folder)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"\[([a-z,]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= set(extras)
    else:
        assert program in PLAIN, f"unknown program {program!r}"
        for word in rest:
            assert not word.endswith(".sh") or (ROOT / word).is_file(), word
        if (config := [i for i, word in enumerate(rest) if word.endswith((".yaml", ".yml"))]) and program != "mkdocs":
            check_configuration({}, rest[config[0] + 1 :], folder)


@by_page
def test_command_lines_name_verbs_options_and_files_that_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_documents.jsonl").touch()
    for block in blocks(page, "bash"):
        for words in commands(block):
            try:
                check_command(words, tmp_path)
            except (SystemExit, Exception) as error:
                pytest.fail(f"{page}:{block.line}: {shlex.join(words)}: {error!r} {error}")


# What the pages say


def messages() -> Iterator[str]:
    """Every text in the package, with … where something is filled in."""
    for file in sorted((ROOT / "hf_longctx").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_errors_are_quoted_as_they_are():
    headings = re.findall(r"^### (`.+`)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [text for heading in headings for text in heading.strip("`").split("`, `")]
    assert len(quoted) > 30
    known = list(messages())
    for text in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in text.split("…")), re.DOTALL)
        assert any(pattern.search(message) for message in known), f"no message of ours: {text}"


def _tests_by_name() -> dict[str, str]:
    """Text of each test module, by its name, which no two have."""
    return {file.name: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}


def test_every_promise_of_the_readme_names_a_test_that_exists():
    promises = (ROOT / "docs" / "promises.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", promises)
    assert len(named) > 100
    tests = _tests_by_name()
    for file, test in named:
        assert re.search(rf"^def {test}\(", tests.get(file, ""), re.MULTILINE), f"{file}::{test}"
    rows = re.compile(r"^\| (\w[^|]*?) \|", re.MULTILINE)
    promised = rows.findall((ROOT / "README.md").read_text().split("## What works")[1].split('<a id="status">')[0])
    assert len(promised) > 20
    assert promised == rows.findall(promises.split("## What works")[1].split("##")[0])[1:]


def test_every_finding_about_gpus_names_tests_that_exist():
    rows = re.findall(
        r"^\| (\d+) \|.*\| ([^|]*) \|$", (ROOT / "docs" / "gpus.md").read_text().split("## What stands in")[0], re.M
    )
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    tests = _tests_by_name()
    for number, held_by in rows:
        named = re.findall(r"`(test_\w+\.py)::(\w+)`", held_by)
        assert named, f"finding {number}"
        for file, test in named:
            assert re.search(rf"^def {test}\(", tests[file], re.MULTILINE), f"{file}::{test}"


def test_the_first_screen_says_what_has_not_run_and_what_the_weights_are():
    readme = (ROOT / "README.md").read_text()
    assert "not yet run on several GPUs" in "\n".join(readme.splitlines()[:5])
    assert "a 4-bit file" in readme
    commands = (ROOT / "docs" / "commands.md").read_text()
    assert "100 to 500 where they have AMX" in commands


def test_those_who_ran_the_quickstart_are_told_to_activate_its_environment():
    for name in ("README.md", "docs/quickstart.md", "scripts/quickstart.sh"):
        assert "source .venv/bin/activate" in (ROOT / name).read_text(), name


def test_no_page_denies_what_runs_or_claims_what_was_never_measured():
    """Statements that were once true of pipelines and sharding, and the layouts that the table of attention is of."""
    pages = {page.name: " ".join(page.read_text().split()) for page in PAGES}
    for outdated in ("planned and simulated only", "stages are not run", "optimizers cannot be saved"):
        assert not [name for name, text in pages.items() if outdated in text], outdated
    assert "*Ours* runs the planner's layouts" in pages["performance.md"]


def test_measured_tables_are_what_the_results_say():
    script = runpy.run_path(str(ROOT / "docs" / "performance_tables.py"))
    page = script["PAGE"].read_text()
    assert page.count("<!-- table ") == len(script["TABLES"])
    assert script["filled"](page) == page, "run python docs/performance_tables.py"


class Requests(HTMLParser):
    """Addresses that a browser asks for by itself."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.found.append(given.get("src") or "")
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(given.get("href") or "")


@pytest.mark.processes
def test_the_site_builds_without_a_warning_and_asks_nobody_else(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        html = page.read_text()
        assert not [address for address in Requests(html).found if re.match(r"(https?:)?//", address)], page
    described = (tmp_path / "api.html").read_text()
    for name in (
        "training.trainer.LongContextTrainer",
        "layouts.layout.Layout",
        "inference.score.score",
        "planner.hdp.plan_step",
    ):
        assert f'id="hf_longctx.{name}"' in described
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style
