"""Words that strangers read: docstrings of functions begin with a verb, or name the thing; locals say what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_BEGINNING = {"What", "Of", "Which", "As", "In", "That", "Where"}
"""First words after which a reader still does not know what a function does."""
NO_LOCALS = {"each", "found", "held", "said", "there"}
"""Names that do not say what a variable holds."""
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.comprehension
FOLDERS = ("hf_longctx", "tests", "benchmarks", "scripts", "examples")


def first_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of every function's docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.lineno, docstring.split()[0].strip(".,:;")


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_of_functions_begin_with_a_verb_or_name_the_thing(folder):
    refused = [
        f"{path.relative_to(ROOT)}:{line} begins with {word}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, word in first_words(path.read_text())
        if word in NO_BEGINNING
    ]
    assert not refused, "\n".join(refused)


def test_a_docstring_that_begins_with_of_is_seen():
    assert list(first_words('def seconds():\n    """Of one step."""\n')) == [(1, "Of")]


def local_names(source: str) -> set[tuple[int, str]]:
    """Line and name of every parameter and variable of functions, lambdas and comprehensions."""
    names: set[tuple[int, str]] = set()
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while nodes:
        node, inside = nodes.pop()
        inside = inside or isinstance(node, SCOPES)
        if inside and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add((node.lineno, node.id))
        elif inside and isinstance(node, ast.arg):
            names.add((node.lineno, node.arg))
        elif inside and isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add((node.lineno, node.name))
        nodes += [(child, inside) for child in ast.iter_child_nodes(node)]
    return names


@pytest.mark.parametrize("folder", FOLDERS)
def test_locals_say_what_they_hold(folder):
    refused = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in sorted(local_names(path.read_text()))
        if name in NO_LOCALS
    ]
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    "code",
    [
        "def f(found): pass",
        "def f(*, found): pass",
        "def f():\n    found = 1",
        "def f():\n    for found in (): pass",
        "def f():\n    with open('') as found: pass",
        "def f():\n    try: pass\n    except OSError as found: pass",
        "x = lambda found: found",
        "x = [found for found in ()]",
    ],
)
def test_a_local_named_found_is_seen(code):
    assert "found" in {name for _, name in local_names(code)}


def test_fields_of_a_class_are_no_locals():
    assert not local_names("class Cell:\n    found: int")
