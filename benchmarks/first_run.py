"""What a new user sees: both commands of the README in a fresh clone, with empty caches.

    python benchmarks/first_run.py --check first-run
    python benchmarks/first_run.py --only quickstart --output lines        # every line that was printed, in files there

1. `git clone` of this checkout's HEAD into an empty folder; scripts/setup.sh; scripts/quickstart.sh, and the same again.
2. The same run with bfloat16 units masked, from empty caches, in the environment that is installed.
3. scripts/test.sh.
4. The first plans without compiled code, by one process and by four side by side (cold_plan.py).

Caches are empty: HOME, Hugging Face's, ours, numba's, matplotlib's. pip's stays where PIP_CACHE_DIR names one. Memory is the
sum of PSS over all processes (process_tree.py). Every line that was printed is kept, in a file for each run; a warning is one
that holds a word of WARNINGS.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import cold_plan, report  # noqa: E402
from benchmarks.process_tree import Measured, measure  # noqa: E402

MASKED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Lets torch use AVX2 at most: a processor as most laptops have it."""
MACHINES: dict[str, Mapping[str, str]] = {"as it is": {}, "bfloat16 masked": MASKED}
WARNINGS = re.compile(r"warn|deprecat|traceback|(?<!standard )error|exception|watchdog|\x1b", re.IGNORECASE)
FALL = re.compile(
    r"plain transformers in \w+: ([\d.]+) before, ([\d.]+) after; a fall of (-?[\d.]+), standard error ([\d.]+)"
)
KEPT = (
    *("PATH", "PYENV_ROOT", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "USER", "LOGNAME", "TMPDIR"),
    *("*_proxy", "*_PROXY", "PIP_*", "SSL_CERT_*", "*_CA_BUNDLE", "GIT_SSL_CAINFO", "HF_LONGCTX_BROWSER"),
)
"""Of this process's environment, what a new user's has, too: where programs and files are, how one writes, and how the network
is reached. No setting of a library is: a machine where products are limited to AVX2, or nothing is compiled, is another one."""
LINES = ROOT / "runs" / "first_run"
"""Where lines are written if no other folder is named; git ignores it."""
GIB = 2**30
PLANS = ("9 on 2", "1000 on 64")
"""Beginnings of cases of cold_plan.py: what runs without being compiled."""


def environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return that of a user who has just come: no caches, no settings but pip's and where Python is."""
    names = {
        name: os.environ[name] for name in os.environ if any(fnmatch.fnmatchcase(name, pattern) for pattern in KEPT)
    }
    settings = Path("~/.config/pip/pip.conf").expanduser()
    if settings.is_file():
        names.setdefault("PIP_CONFIG_FILE", str(settings))
    home.mkdir(parents=True)
    cache = home / ".cache"
    names |= {"HOME": str(home), "XDG_CACHE_HOME": str(cache), "HF_HOME": str(cache / "huggingface")}
    names |= {"HF_LONGCTX_CACHE": str(cache / "hf_longctx"), "NUMBA_CACHE_DIR": str(cache / "numba")}
    names |= {"MPLCONFIGDIR": str(cache / "matplotlib")}
    # A launcher of Python versions finds them below HOME: the interpreter itself is named.
    names["PYTHON"] = str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))
    return names | dict(more)


class FirstRun:
    """Runs commands in a clone, and keeps figures, rows and lines of each.

    Args:
        folder: empty; holds the clone and the homes.
        output: where lines are written.
    """

    def __init__(self, folder: Path, output: Path) -> None:
        self.figures: dict[str, float] = {}
        self.rows: list[dict[str, str]] = []
        self.plan_rows: list[dict[str, str]] = []
        self.warnings: list[str] = []
        self.peaks: dict[str, Mapping[str, int]] = {}
        self._folder, self._output = folder, output
        self._clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self._clone)], check=True)
        self._homes = 0

    def new_home(self, more: Mapping[str, str]) -> dict[str, str]:
        """An environment with empty caches; what an earlier run left in the clone is removed."""
        self._homes += 1
        shutil.rmtree(self._clone / "runs", ignore_errors=True)
        return environment(self._folder / f"home{self._homes}", more)

    def run(self, what: str, command: list[str], names: Mapping[str, str]) -> Measured:
        """Runs a command in the clone.

        Raises:
            RuntimeError: it failed; its last lines are included.
        """
        print(f"{what} ...", file=sys.stderr, flush=True)
        usage = measure(command, self._clone, names)
        self._output.mkdir(parents=True, exist_ok=True)
        (self._output / f"{what.replace('/', ', ')}.txt").write_text("".join(f"{line}\n" for line in usage.lines))
        if usage.code:
            raise RuntimeError(f"{what}: {' '.join(command)} ended with {usage.code}:\n" + "\n".join(usage.lines[-30:]))
        warnings = [line for line in usage.lines if WARNINGS.search(line)]
        self.warnings += [f"{what}: {line}" for line in warnings]
        self.peaks[what] = usage.peak_processes
        measured = {
            "wall seconds": usage.wall_seconds,
            "CPU seconds": usage.cpu_seconds,
            "peak PSS, GiB": usage.peak_pss_bytes / GIB,
            "lines": len(usage.lines),
            "warnings": len(warnings),
        }
        self.figures |= {f"{what}/{name}": value for name, value in measured.items()}
        self.rows.append({"what": what, **{name: f"{value:.4g}" for name, value in measured.items()}})
        return usage

    def quickstart(self) -> None:
        """On each kind of machine: a run from empty caches, and a second one."""
        for machine, more in MACHINES.items():
            names = self.new_home(more)
            if machine == "as it is":
                installed = self.run("quickstart/installation", ["bash", "scripts/setup.sh", "demo"], names)
            for which in ("first", "second"):
                name = f"quickstart/{machine}/{which} run"
                usage = self.run(name, ["bash", "scripts/quickstart.sh"], names)
                self._read_loss(name, usage.lines)
                if which == "first":
                    whole = installed.wall_seconds + usage.wall_seconds
                    self.figures[f"{name} with installation/wall seconds"] = whole

    def tests(self) -> None:
        names = self.new_home({})
        self.run("tests/installation", ["bash", "scripts/setup.sh", "demo", "test"], names)
        self.run("tests/run", ["bash", "scripts/test.sh"], names)

    def plans(self) -> None:
        self.plan_rows, figures = cold_plan.measure([case for case in cold_plan.CASES if case.startswith(PLANS)])
        self.figures |= {f"plans/{name}": value for name, value in figures.items()}

    def _read_loss(self, name: str, lines: list[str]) -> None:
        losses = next((match for line in lines if (match := FALL.search(line))), None)
        if losses is None:
            raise RuntimeError(f"{name}: no line says the losses of plain transformers")
        before, after, fall, error = map(float, losses.groups())
        self.figures |= {f"{name}/held-out loss before": before, f"{name}/held-out loss after": after}
        self.figures[f"{name}/fall over standard error"] = fall / error


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says, or these words of one."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", choices=("quickstart", "tests", "plans"), help="run one of the three parts")
    parser.add_argument(
        "--output",
        type=Path,
        default=LINES,
        help="write what each run prints to a file in this folder (default: %(default)s)",
    )
    return parser.parse_args(words)


def main() -> int:
    arguments = arguments_of()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run = FirstRun(Path(folder), arguments.output)
        for part, measured in (("quickstart", run.quickstart), ("tests", run.tests), ("plans", run.plans)):
            if arguments.only in (None, part):
                measured()
    for line in run.warnings:
        print(f"WARNING  {line}", file=sys.stderr)
    if run.rows:
        print(f"every line that was printed is in {arguments.output}", file=sys.stderr)
    if run.plan_rows:
        print(report.table(run.plan_rows) + "\n")
    rows = run.rows or [{"what": "no command was run"}]
    return report.conclude(arguments, rows, run.figures, load, warnings=run.warnings, peaks=run.peaks)


if __name__ == "__main__":
    raise SystemExit(main())
