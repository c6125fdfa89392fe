"""The command line: `hf-longctx VERB`, or `python -m hf_longctx VERB`. Without a verb, help.

A verb is a function in a file of commands/: its arguments are the options, its docstring is the help. Verbs import what
they run when they run, so that help needs neither torch nor the planner.

What a user can get wrong is a ValueError or an OSError whose message says what, why, and what would be valid: it is
shown without a traceback, and the exit code is 2, as for a wrong option.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hf_longctx.commands.estimate import estimate
from hf_longctx.commands.kernels import kernels
from hf_longctx.commands.merge import merge
from hf_longctx.commands.plan import plan
from hf_longctx.commands.prepare import prepare
from hf_longctx.commands.profile import profile
from hf_longctx.commands.simulate import simulate

VERBS = (prepare, plan, simulate, estimate, profile, merge, kernels)
USER_ERROR = 2

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@dataclass
class Session:
    """Options that come before the verb."""

    traceback: bool = False


@app.callback(invoke_without_command=True)
def _begin(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Exact, balanced fine-tuning on long and mixed-length documents."""
    context.obj.traceback = traceback
    if context.invoked_subcommand is None:
        print(context.get_help())


for _verb in VERBS:
    app.command()(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb with `arguments`, by default those of the process. Returns the exit code."""
    session, to_user = Session(), Console(stderr=True, highlight=False, soft_wrap=True)

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        to_user.print(f"[yellow]warning:[/yellow] {escape(str(message))}")

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            typer.main.get_command(app).main(arguments, prog_name="hf-longctx", obj=session)
    except SystemExit as ended:  # how typer ends, also when all went well
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (ValueError, OSError) as error:
        if session.traceback:
            raise
        to_user.print(f"[red]error:[/red] {escape(str(error))}")
        return USER_ERROR
    return 0
