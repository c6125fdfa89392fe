"""The live view: what it draws on a terminal, what it writes elsewhere, and when it stays away."""

import atexit
import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import ProgressCallback

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.planner import Topology, plan_step
from hf_longctx.report.training_runs.live_view import LiveView, doing, line, preparing, show_live
from tests.builders.plans.random_plans import GPU_COST
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]


def trainer(folder: Any, **settings: Any) -> LongContextTrainer:
    fresh_accelerator_state()
    chosen = arguments(folder, max_steps=3, eval_strategy="steps", eval_steps=2, **settings)
    rows = documents(LENGTHS)
    plugin = LongContextPlugin(capacity=600, global_batch_documents=4)
    return LongContextTrainer(tiny_llama(), chosen, train_dataset=rows, eval_dataset=rows, plugin=plugin)


def trained(folder: Any, terminal: bool) -> str:
    """Return what is written during a run."""
    written = io.StringIO()
    run = trainer(folder)
    run.add_callback(LiveView(run, Console(file=written, force_terminal=terminal, width=160, highlight=False)))
    run.train()
    return written.getvalue()


def test_on_a_terminal_it_shows_progress_load_and_the_slowest_document(tmp_path):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", trained(tmp_path, terminal=True))
    assert "training" in text
    assert "of 3 steps" in text
    assert "planned: busy 100% of the step" in text
    row = max(range(len(LENGTHS)), key=LENGTHS.__getitem__)
    assert f"row {row} of the data set" in text
    assert f"{max(LENGTHS)} tokens on 1 rank" in text
    assert "step 3/3  loss " in text


def test_what_comes_before_the_first_step_is_shown_until_then(tmp_path):
    drawn = {}
    for terminal in (True, False):
        written = io.StringIO()
        run, console = trainer(tmp_path), Console(file=written, force_terminal=terminal, width=160, highlight=False)
        run.add_callback(LiveView(run, console))
        callbacks = list(run.callback_handler.callbacks)
        with preparing(run, console, lambda run=run: run.progress.activity):
            run.train()
        assert [callback for callback in run.callback_handler.callbacks if callback is not run.run_state] == callbacks
        drawn[terminal] = written.getvalue()
    assert re.search(r"preparing to train: [a-z ]+, [\d.]+ m?s gone", drawn[True])
    assert drawn[True].rindex("preparing to train") < drawn[True].index("of 3 steps")
    assert drawn[False].startswith("preparing to train\nstep 1/3  loss ")


def test_what_prepares_in_vain_is_shown_no_longer(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with pytest.raises(ValueError, match="holds no checkpoint"), preparing(run := trainer(tmp_path), console):
        run.train(resume_from_checkpoint=True)
    drawn = console.file.getvalue()
    assert drawn.rindex("preparing to train") < drawn.rindex("\x1b[?25h"), "the cursor is there again"


@pytest.mark.parametrize("around", [True, False], ids=["around training", "at exit"])
def test_the_cursor_is_there_again_after_an_error_in_training(around: bool, tmp_path: Path, monkeypatch: Any):
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    run = trainer(tmp_path)
    run.add_callback(LiveView(run, console))
    monkeypatch.setattr(run, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt), preparing(run, console) if around else nullcontext():
        run.train()
    if not around:
        [stop] = at_exit
        stop()
    drawn = console.file.getvalue()
    assert drawn.rindex("\x1b[?25l") < drawn.rindex("\x1b[?25h")


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_elsewhere_it_writes_a_line_for_each_log(tmp_path):
    lines = trained(tmp_path, terminal=False).splitlines()
    assert [text.split("  ")[0] for text in lines] == [f"step {step}/3" for step in (1, 2, 2, 3, 3, 3)]
    assert re.search(
        r"loss [\d.]+  [\d,.e+]+ tokens/s  planned: ranks idle 0.0%  planned: 1.0\d\d x bound  [\d.]+ GiB", lines[0]
    )
    assert "held-out loss" in lines[2]
    assert "trained for" in lines[5]


def test_it_takes_the_place_of_trainers_bar_and_of_nothing_else(tmp_path):
    run = trainer(tmp_path)
    before = list(run.callback_handler.callbacks)
    show_live(run)  # disable_tqdm: no bar
    assert run.callback_handler.callbacks == before
    run.add_callback(ProgressCallback)
    show_live(run)
    kinds = [type(callback) for callback in run.callback_handler.callbacks]
    assert LiveView in kinds
    assert ProgressCallback not in kinds


def test_many_ranks_share_a_row(tmp_path):
    plan = plan_step(np.array([4000, *[100] * 700]), Topology(200, 4096), GPU_COST)
    steps = SimpleNamespace(collator=SimpleNamespace(cost=GPU_COST), documents=lambda *_: np.arange(701))
    step = SimpleNamespace(plan=plan, position=(0, 0))
    run: Any = SimpleNamespace(measurements=SimpleNamespace(step=step), training_steps=lambda: steps)
    view = LiveView(run, Console(file=io.StringIO(), force_terminal=True, width=200))
    state = SimpleNamespace(is_world_process_zero=True, global_step=4, max_steps=9)
    view.on_train_begin(None, state, None)
    view.on_step_begin(None, state, None)
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    view.on_train_end(None, state, None)
    progress, load, slowest = console.file.getvalue().splitlines()
    assert "4 of 9 steps" in progress
    busy = plan.timeline().rank_busy / plan.timeline().makespan
    assert f"planned: rank {busy.argmin()} is busy least, {busy.min():.0%} of the step" in load
    assert len(re.findall("[▁-█]", load)) == 50, "four ranks a column"
    assert "row 0 of the data set" in slowest


def test_a_line_leaves_out_what_the_report_has():
    logs = {"loss": 1.23456, "eval_two_loss": 2.0, "documents": 7, "loss_by_length/to_256": 1.0, "mfu": 0.412}
    assert line(logs, 1200, 7000) == "step 1,200/7,000  loss 1.235  MFU 41.2%  eval_two_loss 2"
    assert line({"loss": 1.0, "stage_wait": 0.0486}, 1, 7) == "step 1/7  loss 1  stages wait 4.9%"


def shown_while(console: Console | None) -> None:
    with doing("setting up", console, lambda: "loading the model"):
        if console is not None:
            console.print("a line in between")


def test_what_is_done_before_training_is_one_line_that_vanishes_on_a_terminal_and_stays_elsewhere():
    terminal, file = (Console(file=io.StringIO(), force_terminal=forced, width=80) for forced in (True, False))
    for console in (terminal, file, None):
        shown_while(console)
    drawn = terminal.file.getvalue()
    assert re.search(r"setting up: loading the model, [\d.]+ m?s gone", drawn)
    assert drawn.rindex("a line in between") < drawn.rindex("\x1b[2K"), "the line is erased at the end"
    assert file.file.getvalue() == "setting up\na line in between\n"
