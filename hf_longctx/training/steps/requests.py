"""Lets all ranks do what a callback of any rank asks for after a step, to evaluate, to save or to stop: one that did it alone
would wait for the others.

Trainer logs a step, evaluates, and saves, and calls back after each of these, when others may be asked for. So ranks agree once
more after each; and a step is logged by itself first, for Trainer evaluates in the same breath:

    agree   log, what is asked for meanwhile is put aside   agree   evaluate, save   agree

What travels is a few numbers (parallel/reduction.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_longctx.parallel.reduction import agree_on_requests

AFTER_LOGGING = ("should_evaluate", "should_save")
"""Fields of TrainerControl that Trainer looks at once it has logged a step."""


class CallbackRequests:
    """The requests in a trainer's control, which all ranks agree on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._aside: dict[str, bool] | None = None

    def agree(self, memory_mib: int = 0) -> int:
        """Let all ranks do what callbacks of any have asked for. Collective.

        Args:
            memory_mib: of this rank.

        Returns:
            The fullest rank's memory, MiB.
        """
        trainer = self._trainer
        trainer.progress.begin("agreeing on what callbacks asked for", collective=True)
        fullest = agree_on_requests(trainer.control, memory_mib, trainer.args)
        trainer.progress.begin("callbacks")
        return fullest

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Let a step be logged by itself inside; then agree on what has been asked for before it and meanwhile."""
        self._aside = dict.fromkeys(AFTER_LOGGING, False)
        try:
            self.put_aside()
            yield
            self.put_aside()
            vars(self._trainer.control).update(self._aside)
        finally:
            self._aside = None
        self.agree()

    def put_aside(self) -> None:
        """Take what is asked for out of the control while a step is logged by itself; otherwise do nothing."""
        if self._aside is not None:
            control = self._trainer.control
            for name in AFTER_LOGGING:
                self._aside[name] |= getattr(control, name)
                setattr(control, name, False)
