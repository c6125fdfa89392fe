"""scripts/setup.sh and test.sh on machines that lack something: one line says what, and a broken environment is made again.

Nothing is installed: `python3`, pip and df are programs of the test, alone in the PATH with what scripts use of the system.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.launched import ROOT
from tests.worlds.patience import PATIENCE

pytestmark = pytest.mark.processes

TOOLS = (
    "awk",
    "bash",
    "cat",
    "cut",
    "dirname",
    "grep",
    "kill",
    "ls",
    "rm",
    "sha256sum",
    "sleep",
    "tail",
    "touch",
    "id",
)
NOTHING = "pass"
TOO_NEW = "import sys; sys.version_info = (3, 13, 1, 'final', 0)"
NO_VENV = (
    "import importlib.util as u; f = u.find_spec; u.find_spec = lambda name: None if name == 'ensurepip' else f(name)"
)
PYTHON = """#!{bash}
case "$1 $2" in
    "-I -c") code=$3; shift 3; exec {python} -I -c "{other}
$code" "$@" ;;
    "-m venv")
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "#!$PWD/$3/bin/python" >"$3/bin/pip" && touch "$3/pyvenv.cfg" ;;
    "-m pip") echo "$@" >>"$PIP_CALLS"; echo "{pip_says}"; exit {pip_code} ;;
esac
"""
DF = "#!{bash}\necho Filesystem\necho /dev/disk 9 9 {free} 9% /\n"


class Machine:
    """A folder with the scripts, and programs that are all there is."""

    def __init__(self, folder: Path) -> None:
        self.repository, self.programs = folder / "a clone", folder / "bin"
        self.calls = folder / "calls"
        (self.repository / "scripts").mkdir(parents=True)
        self.programs.mkdir()
        for name in ("setup.sh", "test.sh", "constraints.txt"):
            shutil.copy(ROOT / "scripts" / name, self.repository / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.repository)
        for name in (*TOOLS, "mkdir", "cp"):
            if path := shutil.which(name):
                (self.programs / name).symlink_to(path)
        self.bash = shutil.which("bash")
        self.program("df", DF.format(bash=self.bash, free=9999))

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def python(self, name: str = "python3", other: str = NOTHING, pip_says: str = "", pip_code: int = 0) -> None:
        """A Python that is another one than this, and whose pip says and returns what is given."""
        settings = {"bash": self.bash, "python": sys.executable, "other": other}
        self.program(name, PYTHON.format(**settings, pip_says=pip_says, pip_code=pip_code))

    def run(self, script: str = "setup.sh", *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        names = {"PATH": str(self.programs), "PIP_CALLS": str(self.calls), "HOME": os.environ["HOME"]} | environment
        command = [str(self.bash), f"scripts/{script}", *arguments]
        return subprocess.run(command, cwd=self.repository, env=names, capture_output=True, text=True, timeout=PATIENCE)

    def refuses(self, pattern: str, script: str = "setup.sh", **environment: str) -> None:
        """One line says what is wrong, and nothing else."""
        done = self.run(script, **environment)
        assert done.returncode == 1, done
        assert re.fullmatch(pattern + "\n", done.stderr), done.stderr
        assert done.stdout.count("\n") <= 2

    @property
    def installed(self) -> int:
        """How often pip was called."""
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_python_it_says_so(machine):
    machine.refuses(
        r"setup: Python 3\.11 or 3\.12 with venv is needed, and there is no python3; there is no python3\.12; .*PYTHON=\S+"
    )
    machine.refuses(r"setup: Python .* is needed, and there is no /no/python\. Install .*", PYTHON="/no/python")
    assert not (machine.repository / ".venv").exists()


def test_a_python_that_is_too_new_is_named_and_another_one_is_taken(machine):
    machine.python(other=TOO_NEW)
    machine.refuses(
        r"setup: .*, and python3 is Python 3\.13; there is no python3\.12; there is no python3\.11\. Install .*"
    )
    machine.python("python3.12")
    assert machine.run("setup.sh", "demo").returncode == 0
    assert machine.installed == 2


def test_a_python_without_venv_is_named_with_the_package_that_has_it(machine):
    machine.python(other=NO_VENV)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine.refuses(rf"setup: .*, and python3 has no venv \(on .*: apt install python{version}-venv\); there is .*")


def test_a_python_that_does_not_start_is_named(machine):
    machine.program("python3", f"#!{machine.bash}\nexit 127\n")
    machine.refuses(r"setup: .*, and python3 does not start; there is no .*")


def test_without_room_it_says_how_much_is_needed(machine):
    machine.python()
    machine.program("df", DF.format(bash=machine.bash, free=1200))
    machine.refuses(rf"setup: 2500 MiB of disk are needed in {machine.repository}, and 1200 are free: make room")


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        (
            "WARNING: Retrying: NewConnectionError('[Errno -3]')",
            r"setup: torch failed: no package index could be reached\. .*",
        ),
        ("ERROR: [Errno 28] No space left on device", r"setup: torch failed: no space is left on a disk .*: make room"),
        (
            "ERROR: a wheel is odd",
            r"(?s)ERROR: a wheel is odd\nsetup: torch failed, as the end of \S+ clone/\.venv/install\.log .*",
        ),
    ],
)
def test_why_pip_failed_is_said_and_the_next_run_begins_again(machine, message, pattern):
    machine.python(pip_says=message, pip_code=1)
    machine.refuses(pattern)
    machine.python()
    done = machine.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "setup: .venv is made again: its installation was interrupted" in done.stdout


def test_what_is_installed_is_said_and_a_second_run_says_and_does_nothing(machine):
    machine.python(pip_says="WARNING: chatter")
    done = machine.run("setup.sh", "demo", "test")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"Installing into \.venv, once: .*\ntorch: done in \d+ s\nhf_longctx\[demo,test\] and what it needs: done in \d+ s\n",
        done.stdout,
    )
    assert (machine.run("setup.sh", "test").stdout, machine.installed) == ("", 2)
    assert "other" in machine.run("setup.sh", "other").stdout, "another extra"
    assert machine.installed == 4


def remove_python(venv: Path) -> None:
    (venv / "bin" / "python").unlink()


def stop_python(venv: Path) -> None:
    (venv / "bin" / "python").write_text("#!/no/such/python\n")


def move(venv: Path) -> None:
    (venv / "bin" / "pip").write_text("#!/somewhere/else/.venv/bin/python\n")


def upgrade(venv: Path) -> None:
    """The Python that the environment was made with is another one now."""
    python = venv / "bin" / "python"
    python.write_text(python.read_text().replace(NOTHING, TOO_NEW))


def interrupt(venv: Path) -> None:
    """Interrupt as when Ctrl-C comes while the environment is made."""
    shutil.rmtree(venv / "bin")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove_python, "it has no Python that can be started"),
        (stop_python, "its Python does not start"),
        (move, "it was made in another folder"),
        (upgrade, "its Python is 3.13, and 3.11 or 3.12 is needed"),
        (interrupt, "it has no Python that can be started"),
    ],
)
def test_an_environment_that_is_broken_is_made_again(machine, damage, reason):
    machine.python()
    machine.run()
    damage(machine.repository / ".venv")
    done = machine.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"setup: .venv is made again: {reason}\n")
    assert machine.installed == 4


def test_what_is_no_environment_is_not_removed(machine):
    machine.python()
    (machine.repository / ".venv").mkdir()
    (machine.repository / ".venv" / "thesis.txt").write_text("years of work")
    machine.refuses(rf"setup: {machine.repository}/\.venv is no environment of Python: move it away")
    assert (machine.repository / ".venv" / "thesis.txt").read_text() == "years of work"


def test_tests_without_git_are_not_begun(machine):
    machine.python()
    machine.refuses(r"test: git is needed \(.*\): install it", "test.sh")
    assert machine.installed == 0
