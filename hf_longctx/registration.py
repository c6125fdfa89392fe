"""Makes the attention implementation "longctx" known to transformers, whichever of the two is imported first.

transformers keeps its table of implementations in transformers.modeling_utils, beside the code that loads models. Where
that has been imported, the entry is made at once. Importing it here would cost every command and every planner seconds
and torch; so where it has not, a finder on sys.meta_path (the import system's own place for it) waits for it, lets the
other finders find it, and makes the entry when it has been executed, before anyone can load a model.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELS = "transformers.modeling_utils"
"""The module that holds the table."""


def register_with_transformers() -> None:
    """Registers now, or as soon as transformers' models are imported."""
    if MODELS in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _RegisterOnImport())


class _RegisterOnImport(MetaPathFinder):
    """Finds nothing by itself; adds the registration to what other finders found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODELS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in [*sys.meta_path] if finder is not self)
        spec = next((candidate for candidate in others if candidate is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    # Importing it registers; where it is being imported already, and waits for transformers, it registers at its end.
    import_module("hf_longctx.models.registered")
