"""Words that strangers read: docstrings of functions begin with a verb, or name the thing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_BEGINNING = {"What", "Of", "Which", "As", "In", "That", "Where"}
"""First words after which a reader still does not know what a function does."""


def first_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of every function's docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.lineno, docstring.split()[0].strip(".,:;")


@pytest.mark.parametrize("folder", ["hf_longctx", "tests", "benchmarks", "scripts", "examples"])
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
