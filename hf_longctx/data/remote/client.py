"""The side of a rank: RemoteSteps, PlannedSteps whose planning and reading are done elsewhere.

A rank asks its server for 1 + `ahead` steps, copies what comes into tensors, and lets go of it: so many of its parts lie
in the object store at most, however far the servers could run ahead. The rest is PlannedSteps: the same global batches,
orders and adjustments, hence the same plans, tensors and fingerprints.

Rank 0 creates the actors, under names that the other ranks look up; they end with rank 0's process. An actor whose process
dies is started again by Ray, and Ray asks it again. Whatever else fails, or takes too long, is an error that names what did
not answer.
"""

import time
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from hf_longctx.data.ahead import Ahead
from hf_longctx.data.collator import LengthAwareCollator, RankStep, rank_step
from hf_longctx.data.loader import AHEAD, PlannedSteps
from hf_longctx.data.long_documents import Pieces
from hf_longctx.data.remote.cluster import RemoteError, cause_of, total_store_bytes
from hf_longctx.data.remote.planner import Planner, PlannerReport
from hf_longctx.data.remote.server import REQUESTS_AT_ONCE, DocumentServer, ServerReport
from hf_longctx.data.remote.wire import TOKEN_BYTES, Part, store_bytes
from hf_longctx.planner import GlobalBatches
from hf_longctx.planner.cost.adjustment import Adjustment

TIMEOUT_SECONDS = 120.0
"""Starting an actor takes 2 to 10 s on two busy cores, planning and reading less than one."""
RESTARTED = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "get_if_exists": True}
"""Actors wait for others most of the time: they reserve no core."""
ALIVE_SECONDS = 2.0
"""How long an actor may take to say that it is there."""
POLL_SECONDS = 0.1


class RemoteSteps(PlannedSteps):
    """(epoch, step, adjustment) -> RankStep, through Ray. `connect` (cluster.py) comes before.

    Args:
        dataset, pieces, batches, collator: as for PlannedSteps, the same on every rank but for the collator's rank. Rank 0's
            data set is the one that servers open: a `datasets.Dataset` travels as paths of files, which every machine with
            a server must see; anything else is pickled.
        job: what tells this run from others on the same Ray; the same on all ranks.
        name: what tells these steps from others of the run; the same on all ranks.
        servers: how many document servers.
        ahead: steps that are asked for in advance.
        creates: whether this process creates the actors; default: if its rank is 0. Stages of a pipeline and tensor parallelism
            have several processes of rank 0.
        timeout_seconds: how long an answer may take.

    Raises:
        PlanError: a piece is longer than all ranks together can hold.
        ValueError: fewer than one server, or fewer than 0 steps in advance.
        TypeError: the data set cannot be pickled.
        RemoteError: the object store is too small, the actors cannot be started or found, or rank 0 plans something else.
    """

    in_workers = False

    def __init__(
        self,
        dataset: Any,
        pieces: Pieces,
        batches: GlobalBatches,
        collator: LengthAwareCollator,
        *,
        job: str,
        name: str = "train",
        servers: int = 1,
        ahead: int = AHEAD,
        creates: bool | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(dataset, pieces, batches, collator)
        for setting, value, least in (("servers", servers, 1), ("ahead", ahead, 0)):
            if value < least:
                raise ValueError(f"{setting} is {value}; it must be >= {least}")
        self.ahead, self.timeout_seconds, self.servers = ahead, timeout_seconds, servers
        self._job, self._name = job, name
        self._kept: tuple[Any, ...] = ()
        """What actors are created with: one that restarts reads it again."""
        refuse_small_store(self.largest_step(), ahead, total_store_bytes())
        rank = collator.rank
        self._served_by = rank * servers // collator.topology.world_size
        self._actors = self._created() if (rank == 0 if creates is None else creates) else {}
        self._planner = self._find("planner")
        self._server = self._find(f"server {self._served_by}")
        own, planned = self.plans.fingerprint(), self._answer(self._planner.fingerprint.remote(), "planner")
        if own != planned:
            raise RemoteError(
                f"rank {rank} would plan {name!r} of {job!r} from other documents or settings (fingerprint {own:x}) than rank "
                f"0 ({planned:x}). Valid: the same data set, global batches, topology, cost model and planner on all ranks, and "
                "another name for other steps"
            )

    def largest_step(self) -> int:
        """Tokens of the largest global batch of the first epoch."""
        return max(int(self.pieces.lengths[batch].sum()) for batch in self.plans.epoch(0))

    def store_bytes(self, plan_bytes: int) -> int:
        """Most bytes of the object store that steps take at any time, with plans of so many bytes (wire.py)."""
        return store_bytes(self.largest_step(), self.ahead, plan_bytes, self.servers, self.collator.topology.world_size)

    def prepare(self, epoch: int, step: int, adjustment: Adjustment) -> RankStep:
        """Asks for one step and copies this rank's part of it."""
        part = self._ask(epoch, step, adjustment)
        planned, rank = part.step.unpack(), self.collator.rank
        columns = part.tokens.astype(np.int64), part.labels.astype(np.int64)
        return self.collator.ordered(rank_step(planned, planned.plan.layouts(rank), rank, *columns, (epoch, step)))

    def planner_report(self) -> PlannerReport:
        """Report of the one planner: certificates of the steps planned last."""
        return self._answer(self._planner.report.remote(), "planner")

    def server_report(self) -> ServerReport:
        """Report of the server that this rank asks."""
        return self._answer(self._server.report.remote(), f"server {self._served_by}")

    def close(self) -> None:
        """Asks for nothing more. On rank 0: ends the actors."""
        if self._threads is not None:
            self._threads.end()
        for actor in self._actors.values():
            ray.kill(actor)

    def _created(self) -> dict[str, Any]:
        """The actors; their handles keep them alive."""
        try:
            self._kept = dataset, plans = ray.put(self.dataset), ray.put(self.plans)
        except TypeError as error:
            raise TypeError(
                f"{type(self.dataset).__name__} cannot be sent to document servers: {error.__cause__ or error}. Valid: a "
                "datasets.Dataset, or a data set that pickle takes"
            ) from error
        keep = 2 + self.ahead  # ranks are in the same step, or one apart
        planner = self._actor(Planner, "planner").remote(plans, keep)
        actors = {"planner": planner}
        for number in range(self.servers):
            server = self._actor(DocumentServer, f"server {number}", max_concurrency=REQUESTS_AT_ONCE)
            actors[f"server {number}"] = server.remote(dataset, plans, planner, keep)
        return actors

    def _actor(self, kind: type, role: str, **options: Any) -> Any:
        named = {"name": f"{self._name}/{role}", "namespace": self._job}
        return ray.remote(kind).options(**RESTARTED, **named, scheduling_strategy="SPREAD", **options)

    def _find(self, role: str) -> Any:
        """Handle of an actor, once rank 0 has created it."""
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            try:
                return ray.get_actor(f"{self._name}/{role}", namespace=self._job)
            except ValueError as error:
                if time.monotonic() > deadline:
                    raise RemoteError(
                        f"rank 0 has not created the {role} of {self._name!r} of {self._job!r} within {self.timeout_seconds:g} s"
                    ) from error
            time.sleep(POLL_SECONDS)

    def _ask(self, epoch: int, step: int, adjustment: Adjustment) -> Part:
        """Ask for a part. It belongs to this process, so that it survives its server."""
        reference = self._server.part.remote(epoch, step, adjustment, self.collator.rank)
        return self._answer(reference, f"step {step} of epoch {epoch}")

    def _answer(self, reference: Any, asked: str) -> Any:
        """Return what a reference stands for; errors of planning and reading as they were raised there."""
        try:
            return ray.get(reference, timeout=self.timeout_seconds)
        except RayError as error:
            cause = cause_of(error)
            if isinstance(cause, RayError):
                raise self._failure(asked, cause) from error
            raise cause from error

    def _failure(self, asked: str, error: BaseException) -> RemoteError:
        """Return which actors do not answer."""
        silent = []
        for role, actor in (("planner", self._planner), (f"server {self._served_by}", self._server)):
            try:
                ray.get(actor.report.remote(), timeout=ALIVE_SECONDS)
            except RayError as reason:
                silent.append(f"{role} ({type(reason).__name__})")
        late = isinstance(error, GetTimeoutError)
        what = f"did not come within {self.timeout_seconds:g} s" if late else "cannot come"
        who = f"without an answer: {', '.join(silent)}" if silent else "all actors answer"
        return RemoteError(f"{asked} {what}; {who}. Ray says: {error}")

    def _new_threads(self) -> Ahead:
        """Threads, one for each step that is asked for: they wait."""
        return Ahead(1 + self.ahead, "hf_longctx-remote")


def refuse_small_store(step_tokens: int, ahead: int, store_bytes: int) -> None:
    """Raises RemoteError where the parts of 1 + `ahead` steps do not fit into object stores of `store_bytes` bytes."""
    of_step = step_tokens * TOKEN_BYTES
    needed = (1 + ahead) * of_step
    if needed > store_bytes:
        raise RemoteError(
            f"the object stores hold {store_bytes} bytes, but a step and {ahead} in advance take (1 + {ahead}) * {step_tokens} "
            f"tokens * {TOKEN_BYTES} bytes = {needed}. Valid: stores of >= {needed} bytes, or "
            + (f"ahead <= {store_bytes // of_step - 1}, or " if store_bytes >= of_step else "")
            + f"global batches of <= {store_bytes // ((1 + ahead) * TOKEN_BYTES)} tokens"
        )
