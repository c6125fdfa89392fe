"""The view of a person at a terminal while training runs, in place of Trainer's progress bar.

    step 12/70  loss 1.932  held out 2.011  4,512 tokens/s  MFU 41.2 %  planned: ranks idle 2.1 %  one such line a log
    ------------------------------------------------------------------------------------------------------------
    training ━━━━━━━━━━━╺━━━━━━━━━  12 of 70 steps, 17 %, 1 min 23 s gone, about 6 min 44 s to go
    rank 0   ━━━━━━━━━━━━━━━━━━━━━  planned: busy 100 % of the step  its load as this step's plan predicts it, which
    rank 1   ━━━━━━━━━━━━━━━━━━╸    planned: busy 93 % of the step   contains what ranks have measured (recalibration)
    slowest  row 17 of the data set, 131,072 tokens on 4 ranks, 12.3 s of 14 s

The lower part is drawn again and again where stderr is a terminal; elsewhere only lines are written. `disable_tqdm` of
TrainingArguments switches both off, as it does Trainer's bar. `doing` shows what happens before and after training in the same
way. Only rank 0 speaks, and nothing is sent.
"""

import atexit
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import ProgressCallback, TrainerCallback

from hf_longctx.report.plans.rank_load import over_ranks
from hf_longctx.report.training_runs.run_log import duration

SHOWN: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4g}".format,
    "eval_loss": "held-out loss {:.4g}".format,
    "tokens_per_second": "{:,.4g} tokens/s".format,
    "mfu": "MFU {:.1%}".format,
    "plan_idle": "planned: ranks idle {:.1%}".format,
    "stage_wait": "stages wait {:.1%}".format,
    "plan_balance": "planned: {:.3f} x bound".format,
    "peak_memory_gib": "{:.3g} GiB".format,
    "grad_norm": "gradient norm {:.3g}".format,
    "learning_rate": "rate {:.3g}".format,
    "train_runtime": lambda seconds: f"trained for {duration(seconds)}",
    "train_loss": "mean loss {:.4g}".format,
}
"""Values of a log that its line shows, beside other losses and accuracies; the rest is in the report."""
MOST_BARS = 8
"""Ranks with a bar each; of more, a row of small columns shows the busiest of each few."""
COLUMNS = "▁▂▃▄▅▆▇█"
MOST_COLUMNS = 64


class LiveView(TrainerCallback):
    """Shows one run.

    Args:
        trainer: a LongContextTrainer.
        console: to write to; default: stderr.
    """

    def __init__(self, trainer: Any, console: Console | None = None) -> None:
        self._trainer = trainer
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._progress: tuple[str, int, int] = ("training", 0, 0)
        """What is done, how much of it, and of how much."""
        self._began, self._first = time.monotonic(), 0
        self._plan_rows: list[tuple[str, Any, str]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._began, self._first = time.monotonic(), state.global_step
        self._progress = ("training", state.global_step, state.max_steps)
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            # Trainer tells nobody of an error, and a terminal would be left without a cursor.
            atexit.register(self.stop)
            self._live.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress = ("training", state.global_step, state.max_steps)
        if self._live is not None and (step := self._trainer.measurements.step) is not None:
            self._plan_rows = list(self._of_plan(step))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        name, done, _ = self._progress
        done = done + 1 if name == "evaluating" else 1
        self._progress = ("evaluating", done, len(kwargs["eval_dataloader"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress = ("training", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            self._progress = ("training", state.global_step, state.max_steps)
            self._console.print(line(logs, state.global_step, state.max_steps), markup=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Draw no more, and give the terminal its cursor back; again: does nothing."""
        if self._live is not None:
            atexit.unregister(self.stop)
            self._live.stop()
            self._live = None

    def __rich__(self) -> Group:
        """The part that is drawn again and again."""
        name, done, of = self._progress
        gone = time.monotonic() - self._began
        status = f"{done:,} of {of:,} steps, {done / max(of, 1):.0%}, {duration(gone)} gone"
        if name == "training" and self._first < done < of:
            status += f", about {duration(gone * (of - done) / (done - self._first))} to go"
        rows = [(name, ProgressBar(total=max(of, 1), completed=done, width=40), status), *self._plan_rows]
        table = Table.grid(padding=(0, 1))
        for label, bar, text in rows:
            table.add_row(label, bar, Text(text, overflow="ellipsis", no_wrap=True))
        return Group(table)

    def _of_plan(self, step: Any) -> Iterable[tuple[str, Any, str]]:
        """Load of the ranks, and the document that takes longest: name, picture, words."""
        plan = step.plan
        timeline = plan.timeline()
        busy = timeline.rank_busy / timeline.makespan
        if len(busy) <= MOST_BARS:
            for rank, share in enumerate(busy.tolist()):
                yield (
                    f"rank {rank}",
                    ProgressBar(total=1.0, completed=share, width=40),
                    f"planned: busy {share:.0%} of the step",
                )
        else:
            bins = over_ranks(busy, MOST_COLUMNS)
            columns = "".join(COLUMNS[min(7, int(8 * share))] for share in bins.most.tolist())
            least = int(busy.argmin())
            yield (
                "load",
                Text(columns),
                f"planned: rank {least:,} is busy least, {busy[least]:.0%} of the step; {busy.mean():.0%} on average",
            )
        steps = self._trainer.training_steps()
        seconds = plan.document_times(steps.collator.cost) / 1e9
        longest = int(np.argmax(seconds))
        row = int(steps.documents(*step.position)[plan.doc[longest]])
        ranks = int(plan.ranks_of_document[longest])
        yield (
            "slowest",
            Text(f"row {row:,} of the data set"),
            f"{plan.length[longest]:,} tokens on {ranks:,} rank{'' if ranks == 1 else 's'}, "
            f"planned {duration(seconds[longest])} of {duration(timeline.makespan / 1e9)}",
        )


@contextmanager
def doing(what: str, console: Console | None, detail: Callable[[], str] = str) -> Iterator[None]:
    """Shows what is done while the block runs: on a terminal with the time gone, in a line that vanishes; elsewhere as one line.

    Args:
        what: in words.
        console: to write to; None: nothing is shown.
        detail: asked again and again on a terminal; "": there is none.
    """
    if console is None:
        yield
    elif console.is_terminal:
        began = time.monotonic()

        def shown() -> Text:
            words = ": ".join(filter(None, (what, detail())))
            return Text(f"{words}, {duration(time.monotonic() - began)} gone", overflow="ellipsis", no_wrap=True)

        with Live(get_renderable=shown, console=console, refresh_per_second=4, transient=True):
            yield
    else:
        console.print(what, markup=False)
        yield


@contextmanager
def preparing(trainer: Any, console: Console | None, detail: Callable[[], str] = str) -> Iterator[None]:
    """Shows around `trainer.train()` that it prepares, as `doing` does, until training begins: checkpoints are looked at, the
    model is distributed, the first step is planned. However training ends, nothing is drawn any more then."""
    with ExitStack() as shown:
        shown.enter_context(doing("preparing to train", console, detail))
        until = _UntilTraining(shown)
        trainer.callback_handler.callbacks.insert(0, until)  # before LiveView, which draws in the same place
        try:
            yield
        finally:
            trainer.remove_callback(until)
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, LiveView):
                    callback.stop()


class _UntilTraining(TrainerCallback):
    """Ends what is shown when training begins."""

    def __init__(self, shown: ExitStack) -> None:
        self._shown = shown

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shown.close()


def line(logs: Mapping[str, Any], step: int, of: int) -> str:
    """Return what Trainer logs, in one line."""
    known = [show(logs[key]) for key, show in SHOWN.items() if isinstance(logs.get(key), (int, float))]
    others = [
        f"{key} {value:.4g}"
        for key, value in logs.items()
        if key not in SHOWN and key.endswith(("_loss", "_accuracy")) and isinstance(value, (int, float))
    ]
    return "  ".join([f"step {step:,}/{of:,}" if of else "before training", *known, *others])


def show_live(trainer: Any, console: Console | None = None) -> None:
    """Puts the view in the place of Trainer's progress bar; where that is switched off, or is a notebook's, nothing changes."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(LiveView(trainer, console))
