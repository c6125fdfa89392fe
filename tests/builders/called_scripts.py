"""The launch scripts, called with programs that note how they are called."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

from hf_longctx.config import load_config
from tests.worlds.launched import ROOT

NOTES = """#!{python}
import json, os, subprocess, sys
name = os.path.basename(sys.argv[0])
with open("{notes}", "a") as file:
    file.write(json.dumps([name, sys.argv[1:], dict(os.environ)]) + "\\n")
if name == "scontrol" and sys.argv[1] == "show":
    print("node7\\nnode8")
if name == "srun":
    sys.exit(subprocess.run(sys.argv[2:]).returncode)
if name == "torchrun":
    sys.exit(int(os.environ.get("TORCHRUN_CODE", 0)))
"""


class Called(list[tuple[str, list[str], dict[str, str]]]):
    code: int
    said: str


def called(script: str, *arguments: str, folder: Path, **environment: str) -> Called:
    """Programs that a script called: name, arguments, environment."""
    notes = folder / "notes"
    notes.write_text("")
    for name in ("srun", "scontrol", "torchrun", "ray", "nvidia-smi"):
        (folder / name).write_text(NOTES.format(python=sys.executable, notes=notes))
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "scripts" / f"{script}.sh"), *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PATH": path} | environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    calls = Called(json.loads(line) for line in notes.read_text().splitlines())
    calls.code, calls.said = done.returncode, done.stdout + done.stderr
    return calls


def launched(arguments: list[str]) -> Any:
    parsed = get_args_parser().parse_args(arguments)
    assert (ROOT / parsed.training_script).is_file()
    option, config, *overrides = parsed.training_script_args
    assert option == "--config"
    assert load_config(ROOT / config, overrides).training["resume_from_checkpoint"] == "auto"
    return parsed
