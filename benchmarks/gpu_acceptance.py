"""One hour on a machine with GPUs: what holds there of all that was written without one, as records and one page.

    bash scripts/gpu_acceptance.sh                                   # sets up, then runs this
    python benchmarks/gpu_acceptance.py --minutes 60                 # stop it when you like: the same command goes on
    python benchmarks/gpu_acceptance.py --device cpu --tiny          # all of it without a GPU: minutes

Parts (acceptance/catalogue.py) run one after another, most telling first, each in a process of its own with a share of the
time. Each result is written as soon as it is there, and the page after each part: --output, default runs/gpu_acceptance. A part
that fails is recorded with its last lines, one for which the machine lacks something with what it lacks, and the others go on.
--parts takes some of them, --again runs these anew. Without a GPU it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from acceptance.catalogue import PARTS, Part
from acceptance.flow import Folder, in_process_of_its_own, run_parts
from acceptance.record import DONE, NOT_POSSIBLE, Bench, NotPossibleError, Record

NO_GPU = 2
"""Exit status where there is nothing to measure on."""
ROOT = Path(__file__).parents[1]
NAMES = [part.name for part in PARTS]


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=60.0, help="end after so many minutes (default: %(default)s)")
    made.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="measure on this device (default: %(default)s)"
    )
    made.add_argument("--tiny", action="store_true", help="use small shapes, to try this without a GPU")
    made.add_argument("--output", type=Path, help="write to this folder (default: runs/gpu_acceptance)")
    made.add_argument(
        "--parts", nargs="+", choices=NAMES, default=NAMES, metavar="PART", help=f"run these parts: {', '.join(NAMES)}"
    )
    made.add_argument("--again", action="store_true", help="run the parts anew that have a record already")
    made.add_argument("--run", choices=NAMES, help=argparse.SUPPRESS)  # one part, in this process
    made.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return made


def measure_part(part: Part, device: str, tiny: bool, seconds: float, path: Path) -> None:
    """Run one part in this process, and write its record."""
    from hf_longctx.settings.gpu_environment import set_for_gpus

    if device == "cuda":
        set_for_gpus(os.environ)  # as a run does, and before torch may read them
    import torch

    record = Record(part.name, device, tiny)
    bench = Bench(torch.device(device), tiny, seconds, path, record)
    module, function = part.run.split(":")
    try:
        getattr(import_module(f"acceptance.{module}"), function)(bench)
        record.status = DONE
    except NotPossibleError as error:
        record.status, record.why = NOT_POSSIBLE, str(error)
    record.write(path)


def command(device: str, tiny: bool, part: Part, seconds: float, path: Path) -> Sequence[str]:
    """The command that measures one part."""
    asked = ["--run", part.name, "--record", str(path), "--seconds", f"{seconds:.0f}", "--device", device]
    return [sys.executable, str(Path(__file__).resolve()), *asked, *["--tiny"] * tiny]


def main() -> int:
    arguments = options().parse_args()
    if arguments.run:
        sys.path.append(str(ROOT))  # tests/ are no installed package
        part = PARTS[NAMES.index(arguments.run)]
        measure_part(part, arguments.device, arguments.tiny, arguments.seconds, arguments.record)
        return 0
    if arguments.device == "cuda" and not gpu_seen():
        print(
            "gpu_acceptance.py measures on CUDA GPUs, and torch sees none; --device cpu --tiny shows all of it",
            file=sys.stderr,
        )
        return NO_GPU
    from acceptance.page import write_page

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Folder(arguments.output or ROOT / "runs" / "gpu_acceptance")
    setting = {"device": arguments.device, "tiny": arguments.tiny}
    try:
        folder.claim(setting)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    parts = [part for part in PARTS if part.name in arguments.parts]
    if arguments.again:
        for part in parts:
            folder.record_path(part).unlink(missing_ok=True)
    start = in_process_of_its_own(partial(command, arguments.device, arguments.tiny), arguments.device == "cuda")
    page = partial(write_page, PARTS, folder, setting)
    try:
        run_parts(parts, folder, arguments.device, 60 * arguments.minutes, start, page)
    except KeyboardInterrupt:
        page()
        print("stopped: the same command goes on")
    print(f"page      {folder.page}\nrecords   {folder.path / 'records'}")
    return 0


def gpu_seen() -> bool:
    """Whether torch sees a GPU; asked in another process, since this one is to hold nothing of it."""
    import subprocess

    asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
