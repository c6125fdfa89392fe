"""The modules that a file imports, with the line of each."""

import ast
from importlib.util import resolve_name


def imported_names(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported anywhere in the tree of a module of `package`."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            names += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return names
