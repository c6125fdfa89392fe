"""The command line: `hf-longctx VERB`, or `python -m hf_longctx VERB`. Without a verb, help.

A verb is a function in a file of commands/: its arguments are the options, its docstring is the help, and ends with an example
that a test runs. Verbs import what they run when they run, so that help needs neither torch nor the planner.

What a user can get wrong is an error whose message says what, why, and what would be valid: it is shown without a traceback,
and the exit code is 2, as for a wrong option.
"""

import inspect
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hf_longctx.commands.certify import certify
from hf_longctx.commands.config import config
from hf_longctx.commands.doctor import doctor
from hf_longctx.commands.estimate import estimate
from hf_longctx.commands.evaluate import evaluate
from hf_longctx.commands.export import export
from hf_longctx.commands.generate import generate
from hf_longctx.commands.init import init
from hf_longctx.commands.kernels import kernels
from hf_longctx.commands.merge import merge
from hf_longctx.commands.migrate import migrate
from hf_longctx.commands.plan import plan
from hf_longctx.commands.prepare import prepare
from hf_longctx.commands.profile import profile
from hf_longctx.commands.report import report
from hf_longctx.commands.shared.help import Verb, Verbs
from hf_longctx.commands.shared.ranks import USER_ERROR, in_words
from hf_longctx.commands.simulate import simulate
from hf_longctx.commands.train import train

VERBS: tuple[Callable[..., None], ...] = (
    *(train, prepare, plan, simulate, profile, estimate, evaluate, generate),
    *(report, merge, export, init, migrate, config, doctor, kernels, certify),
)
EXPECTED = (ValueError, OSError, ImportError, RuntimeError)
"""Errors of settings, files, missing packages, and what ran out or away. Others are faults of this program."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code that typer ends with after Ctrl-C."""
AFTER_CTRL_C = (
    "interrupted: nothing was saved after the last checkpoint. The same command with training.resume_from_checkpoint=auto goes "
    "on from there, on any number of ranks; SIGTERM instead of Ctrl-C saves first"
)
BETWEEN_LIBRARIES = "`is_gradient_checkpointing` is deprecated"
"""How a warning begins that transformers has for PEFT: nobody who reads it here can do anything about it."""

app = typer.Typer(cls=Verbs, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@dataclass
class Session:
    """Options that come before the verb."""

    traceback: bool = False


def example(verb: Callable[..., None]) -> str:
    """The command in the last line of a verb's docstring."""
    return (inspect.getdoc(verb) or "").rpartition("Example: ")[2]


def _say_versions(asked: bool) -> None:
    if asked:
        print(
            ", ".join(
                f"{name} {metadata.version(name)}" for name in ("hf_longctx", "torch", "transformers", "accelerate")
            )
        )
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=f"Example: {example(train)}")
def _begin(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_versions, is_eager=True, help="Show versions, and end.")
    ] = False,
) -> None:
    """Exact, balanced fine-tuning on long and mixed-length documents."""
    context.obj.traceback = traceback
    if context.invoked_subcommand is None:
        print(context.get_help())


for _verb in VERBS:
    _help = (inspect.getdoc(_verb) or "").partition("\n\nExample: ")[0]
    app.command(cls=Verb, help=_help, epilog=f"Example: {example(_verb)}")(_verb)


def _is_escaped(character: str) -> bool:
    """Tell whether Python has put it in the place of a byte that it could not read."""
    return "\udc80" <= character <= "\udcff"


def _refuse_start(arguments: Sequence[str]) -> None:
    """Raise ValueError for what Python was started with, where libraries would end in an error that does not name it."""
    if sys.flags.optimize >= 2:
        raise ValueError(
            "Python leaves docstrings out (-OO, or PYTHONOPTIMIZE=2), and transformers cannot be imported without them. "
            "Valid: -O, or no such option"
        )
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and (unread := next((text for text in arguments if any(map(_is_escaped, text))), None)):
        raise ValueError(
            f"argument {unread!r}: Python reads arguments as {encoding} here, which has not all of its characters. "
            "Valid: a locale of UTF-8 (LC_ALL=C.UTF-8), or PYTHONUTF8=1"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb with `arguments`, by default those of the process. Returns the exit code."""
    session, to_user = Session(), Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    first = os.environ.get("RANK", "0") == "0"

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if first:  # others have the same to say
            to_user.print(f"[yellow]warning:[/yellow] {escape(str(message))}")

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            warnings.filterwarnings("ignore", BETWEEN_LIBRARIES, FutureWarning)
            _refuse_start(sys.argv[1:] if arguments is None else arguments)
            typer.main.get_command(app).main(arguments, prog_name="hf-longctx", obj=session)
    except SystemExit as ended:  # how typer ends, also when all went well
        if ended.code == INTERRUPTED:
            given = sys.argv[1:] if arguments is None else arguments
            if first and given[:1] == ["train"]:
                to_user.print(AFTER_CTRL_C)
            sys.last_value = ended  # at exit, a rank waits for the others unless it has failed (attention/exchange.py)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except EXPECTED as error:
        if session.traceback:
            raise
        who = "" if first else f" (rank {os.environ['RANK']})"
        to_user.print(f"[red]error{who}:[/red] {escape(in_words(error))}")
        return USER_ERROR
    return 0
