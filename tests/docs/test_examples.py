"""Every example runs as its first lines say, and gives on two ranks what it gives in one process."""

import contextlib
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from tests.builders.training_runs import fresh_accelerator_state
from tests.worlds.launched import ROOT, accelerate_launch, torchrun
from tests.worlds.rank_pool import RankPool

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "stand_ins")


def run_example(path: Path, folder: Path) -> list[float]:
    """Return what an example's main() returns: its losses. Runs on this rank, alone or in a pool."""
    fresh_accelerator_state()
    before = dict(os.environ)
    os.environ |= {"ACCELERATE_USE_CPU": "true", "CI": "true"}  # TRL tells its makers nothing where it sees CI
    sys.path.insert(0, str(path.parent))
    try:
        with contextlib.chdir(folder):
            return runpy.run_path(str(path))["main"]()
    finally:
        sys.path.remove(str(path.parent))
        os.environ.clear()
        os.environ |= before


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_gives_the_same_on_two_ranks_as_in_one_process(path: Path, ranks2: RankPool, tmp_path: Path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    alone = run_example(path, tmp_path / "one")
    for losses in ranks2.run(run_example, path, tmp_path / "two"):
        assert losses == pytest.approx(alone, rel=1e-4)
    if path.stem != "score":
        assert alone[-1] < alone[0], "it has learned something"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_begins_with_the_commands_that_run_it(path: Path):
    lines = [line.partition("#")[0] for line in path.read_text().split('"""')[1].splitlines()]
    commands = [
        shlex.split(line) for line in lines if re.match(r" *([A-Z_]+=\S+ )*(python|torchrun|accelerate) ", line)
    ]
    assert commands
    for command in commands:
        words = [word for word in command if "=" not in word or word.startswith("-")]
        if words[:2] == ["accelerate", "launch"]:
            script = launch_command_parser().parse_args(words[2:]).training_script
        elif words[0] == "torchrun":
            script = get_args_parser().parse_args(words[1:]).training_script
        else:
            program, script = words
            assert program == "python"
        assert ROOT / script == path


@pytest.mark.processes
def test_documents_are_split_by_the_command_that_scores_them():
    """Only the first of several ranks prints; processes that did not find each other would all do so."""
    ended = torchrun("examples/score.py", ACCELERATE_USE_CPU="false", CUDA_VISIBLE_DEVICES="")
    assert ended.code == 0, ended.output
    assert ended.output.count("perplexity") == 8, ended.output


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_under_a_launcher(path: Path):
    ended = accelerate_launch(path)
    assert ended.code == 0, ended.output
