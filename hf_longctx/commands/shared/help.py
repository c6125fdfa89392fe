"""Help that fits a screen of 80 columns and 40 rows: one or two lines for each option, and an example at the end.

typer's own gives ranges that go without saying (x>=1), writes names of switches twice, and leaves little room for words. A
default stands in brackets after them.
"""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDEST = 24
"""Columns of an option's name; a longer one has a line of its own."""
SHORTER = (
    (r" <([^>|]*\|[^>]*)>", r" NAME"),  # choices: their names stand before the help
    (r" <([a-z]+)( range)?>", lambda match: f" {match[1].upper()}"),
    (r" <list\[.*\]>", ""),
    (r"^--(\S+) / --no-\1$", r"--[no-]\1"),
)
WITHOUT = (
    (r"; [x0-9.<>=]*x[x0-9.<>=]*(?=\])", ""),
    (r"\[[x0-9.<>=]*x[x0-9.<>=]*; ", "["),
    (r"  \[[x0-9.<>=]*x[x0-9.<>=]*\]", ""),
    (r"  \[default: (.*)\]$", r" [\1]"),
)


class Verb(TyperCommand):
    """A command whose help is short."""

    def invoke(self, ctx: Any) -> Any:
        """Run it, and say where a file ends too early, which click would take for the end of what a person types."""
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise ValueError(f"a file ends before it is complete: {error or 'nothing is left of it'}") from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments, options = [], []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            choices = re.search(SHORTER[0][0], name)
            for pattern, shorter in SHORTER:
                name = re.sub(pattern, shorter, name)  # type: ignore[call-overload]
            for pattern, shorter in WITHOUT:
                text = re.sub(pattern, shorter, text)
            if name.startswith("--[no-]"):
                switch = name.removeprefix("--[no-]")
                text = text.replace(f"[no-{switch}]", "[no]").replace(f"[{switch}]", "[yes]")
            if choices:
                text = f"{choices[1].replace('|', ', ')}. {text}"
            if parameter.param_type_name == "argument":
                arguments.append((name, text.removesuffix("  [required]")))
            else:
                options.append((name, text))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=WIDEST)


class Verbs(TyperGroup):
    """A group whose help says of each command all that its first paragraph says."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands: typer's own cuts their lines."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, " ".join((command.help or "").partition("\n\n")[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
