"""Plans change at the same step on every rank, in threads and in worker processes, and go on after a checkpoint.

In training runs of this file, clocks are replaced: a micro-batch takes what a cost model says that the planner does not
know, times how slow its slowest rank is. So what is learned is the same on every machine.
"""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import skip_first_batches

from hf_longctx import LengthAwareCollator
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import cut_documents
from hf_longctx.planner import PLANNERS, CostModel, GlobalBatches, StepPlan, Topology
from hf_longctx.planner.cost.adjustment import Adjustment, Adjustments, Sample
from hf_longctx.training import trainer as trainer_module
from hf_longctx.training.measuring.recalibration import Recalibration, Stopwatch, effective_from, fingerprint, restored
from hf_longctx.training.measuring.step_costs import cost_model
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import RecordingTrainer, Run, arguments, documents, reference, train
from tests.worlds import fork_server

COST = CostModel(attention_ps=10**5, linear_ps=10**7, inside_ps=10**5, message_ns=10**4, document_ns=10**5)
"""A document of 100 tokens takes 1 ms for attention, 1 ms for all that is linear."""
TRUE = COST.scaled(3.0, 2.0)
LENGTHS = np.random.default_rng(0).integers(2, 120, 300).tolist()


# Which step it holds from


@pytest.mark.parametrize(
    ("agreed", "ahead", "expected"),
    [
        ((0, 0), 2, (0, 3)),
        ((0, 6), 2, (0, 9)),
        ((0, 7), 2, (1, 0)),
        ((0, 9), 0, (1, 0)),
        ((1, 3), 8, (3, 0)),
        ((0, 9), 30, (5, 2)),
    ],
)
def test_it_holds_after_what_may_be_prepared_by_then(agreed, ahead, expected):
    steps = {0: 10, 1: 7, 2: 5}
    assert effective_from(*agreed, ahead, lambda epoch: steps.get(epoch, 8)) == expected


def planned(rank: int = 0, world_size: int = 2) -> PlannedSteps:
    rows = documents(LENGTHS)
    pieces = cut_documents(rows, LengthIndex.from_dataset(rows), "error", None)
    collator = LengthAwareCollator(Topology(world_size, 200), COST, rank)
    return PlannedSteps(rows, pieces, GlobalBatches(pieces.lengths, 3, documents=15), collator)


def consumed(loader: PlannedDataLoader, ahead: int, skip: int = 0) -> list[tuple[tuple[int, int], int]]:
    """Consume as the trainer does, two epochs of 20 steps: after each third step, ranks agree that rank 1 is slower still.

    Returns (position, digest of the plan) of each step.
    """
    steps: Any = loader.dataset
    digests = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for step in skip_first_batches(loader, skip) if skip and epoch == 0 else loader:
            digests.append((step.position, step.plan.digest()))
            count = steps.steps(0) * epoch + step.position[1] + 1
            if count % 3 == 0 and count < 30:
                adjustment = Adjustment(speed=(1000, 1000 - 20 * count))
                steps.adjustments.add(*effective_from(*step.position, ahead, steps.steps), adjustment)
    return digests


@pytest.mark.processes
def test_ranks_with_threads_and_with_worker_processes_switch_at_the_same_steps():
    """A rank with a thread, and others with workers and prefetching of their own: they plan alike."""
    fork_server.start()
    workers = {"multiprocessing_context": "forkserver", "persistent_workers": True}  # spawned: test_loader
    settings: list[dict[str, Any]] = [
        {},
        {"num_workers": 1, "prefetch_factor": 2, **workers},
        {"num_workers": 2, "prefetch_factor": 3, **workers},
    ]
    loaders = [PlannedDataLoader(planned(rank % 2), **options) for rank, options in enumerate(settings)]
    assert [loader.ahead for loader in loaders] == [2, 2, 6]
    first, *others = [consumed(loader, max(one.ahead for one in loaders)) for loader in loaders]
    assert all(other == first for other in others)
    digests = dict(first)
    steps: Any = loaders[0].dataset
    for (epoch, step), digest in digests.items():
        assert digest == steps.plan(epoch, step).digest(), "planned later, with all known, the step is the same"
        if (epoch, step) >= (0, 2 + 7):
            assert digest != planned().plan(epoch, step).digest(), "the first agreement holds from here on"
        else:
            assert digest == planned().plan(epoch, step).digest()


def test_steps_that_are_skipped_in_resuming_change_nothing():
    loaders = [PlannedDataLoader(planned()), PlannedDataLoader(planned())]
    whole = consumed(loaders[0], 2)
    steps: Any = loaders[1].dataset
    for count in (3, 6):
        steps.adjustments.add(0, count + 2, Adjustment(speed=(1000, 1000 - 20 * count)))
    assert consumed(loaders[1], 2, skip=8) == whole[8:]


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_every_planner_takes_what_was_learned(planner):
    """Ours also the speeds of ranks; the others, which know equal ranks only, plan for those."""
    lengths = np.array([200, 90, 60, 30, 150, 7])
    collator = LengthAwareCollator(Topology(4, 200), COST, planner=planner)
    learned = Adjustment(attention=3000, linear=2000, speed=(1000, 400, 1000, 1000))
    plan = collator.plan(lengths, learned)
    plan.check(lengths)
    assert plan.topology.speed == (learned.speed if planner == "hdp" else None)
    assert plan.cost.sum() > collator.plan(lengths).cost.sum()


# What is measured


def test_a_stopwatch_tells_what_lies_between_marks():
    stopwatch = Stopwatch(torch.device("cpu"))
    assert stopwatch.seconds() == []
    for _ in range(3):
        stopwatch.mark()
        torch.randn(200, 200) @ torch.randn(200, 200)
    seconds = stopwatch.seconds()
    assert len(seconds) == 2
    assert min(seconds) > 0


# Training


class Fabricated:
    """In place of a stopwatch: seconds that are known beforehand."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def seconds(self) -> list[float]:
        return self._seconds


class FabricatedTimes(Recalibration):
    """Rank 1 is three times as slow as the others, and the eleventh step takes 50 times as long."""

    seen = 0

    def begin_step(self, plan: StepPlan) -> Any:
        mark = super().begin_step(plan)
        if self._unread is not None:
            self._unread = (plan, Fabricated(self._times(plan)))  # type: ignore[assignment]
        self.seen += 1
        return mark

    def _times(self, plan: StepPlan) -> list[float]:
        times = []
        for micro_batch, layout in plan.layouts(self.rank):
            lengths = plan.length[slice(*plan.first_document[micro_batch : micro_batch + 2])]
            seconds = int(TRUE.time(lengths, len(layout.ranks)).sum()) / 1e9
            times.append(seconds * (3 if 1 in layout.ranks else 1) * (50 if self.seen == 10 else 1))
        return times


class PlansWritten(RecordingTrainer):
    """Writes down the digest and the speeds of each step's plan, where this rank's clock is not one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        multiprocessing.current_process()._config["daemon"] = False  # ranks of the pool may start workers, too
        self.plans: list[tuple[int, Any, int]] = []
        trainer_module.Recalibration = FabricatedTimes  # type: ignore[misc]
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        self.plans.append((inputs.plan.digest(), inputs.plan.topology.speed, inputs.plan.lower_bound))
        return super().training_step(model, inputs, *args)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            trainer_module.Recalibration = Recalibration  # type: ignore[misc]
            rank = self.args.process_index
            Path(self.args.output_dir, f"plans{rank}.json").write_text(json.dumps(self.plans))


EVERY = 6
SETTINGS: dict[str, Any] = {"num_train_epochs": 1, "max_steps": 20, "save_strategy": "steps", "save_steps": 7}
PLUGIN: dict[str, Any] = {"global_batch_documents": 15, "recalibrate_steps": EVERY, "cost": COST}


def run_on(ranks: Any, folder: Path, world_size: int = 2, **kwargs: Any) -> tuple[list[Run], list[list[Any]]]:
    """Return what each rank saw, and the plans of all steps, which were the same on all ranks."""
    folder.mkdir(exist_ok=True)
    settings = SETTINGS | {"output_dir": folder} | kwargs.pop("settings", {})
    runs = ranks.run(
        train,
        "llama",
        documents(LENGTHS),
        PLUGIN | {"capacity": 400 // world_size} | kwargs.pop("plugin", {}),
        settings,
        trainer_class=kwargs.pop("trainer_class", PlansWritten),
        **kwargs,
    )
    plans = [json.loads((folder / f"plans{rank}.json").read_text()) for rank in range(world_size)]
    assert all(digests == plans[0] for digests in plans)
    return runs, plans[0]


@pytest.fixture(scope="module")
def recalibrated(ranks2, tmp_path_factory) -> tuple[Path, list[Run], list[list[Any]]]:
    folder = tmp_path_factory.mktemp("recalibrated")
    return folder, *run_on(ranks2, folder, in_order=True)


def test_all_ranks_learn_that_one_is_slow_and_plan_for_it_from_the_same_step_on(recalibrated):
    _, runs, plans = recalibrated
    speeds = [speed for _, speed, _ in plans]
    switch = EVERY + 2  # agreed on in step 5, counted from 0; 2 steps are prepared ahead
    assert speeds[:switch] == [None] * switch
    assert all(speed == [1000, pytest.approx(333, abs=3)] for speed in speeds[switch:])
    assert runs[0].series("recalibrations") == [0] * (EVERY - 1) + [1] * (len(plans) - EVERY + 1)


def test_training_stays_what_it_is(recalibrated, tmp_path):
    """Whatever is learned, losses and weights are those of a loop over documents."""
    _, runs, _ = recalibrated
    batches = GlobalBatches(np.array(LENGTHS), 3, documents=15)
    settings = {"output_dir": tmp_path, "num_train_epochs": 1}
    losses, _, weights = reference("llama", documents(LENGTHS), batches, 1, settings)
    for run in runs:
        np.testing.assert_allclose(run.series("loss"), losses, rtol=1e-5)
        torch.testing.assert_close(run.weights, weights, rtol=0, atol=2e-5)


@pytest.mark.parametrize("after", [7, 14])
def test_a_resumed_run_makes_the_same_plans(after, recalibrated, ranks2, tmp_path):
    """Step 7 lies between agreement and switch: what is agreed but does not hold yet is kept too."""
    folder, runs, plans = recalibrated
    resumed, again = run_on(ranks2, tmp_path, resume=str(folder / f"checkpoint-{after}"))
    assert again == plans[after:]
    np.testing.assert_allclose(resumed[0].series("loss"), runs[0].series("loss"), rtol=1e-5)


def test_on_another_number_of_ranks_costs_are_kept_and_speeds_dropped(recalibrated, ranks4, tmp_path):
    folder, runs, _ = recalibrated
    state = json.loads((folder / "checkpoint-14" / "trainer_state.json").read_text())
    [[epoch, step, attention, linear, *_, speed]] = state["stateful_callbacks"]["RunState"]["args"]["calibration"][
        "adjustments"
    ]
    assert (epoch, step) == (0, EVERY + 2)
    assert attention == pytest.approx(3000, rel=0.01)
    assert linear == pytest.approx(2000, rel=0.01)
    assert speed[0] == 1000
    checkpoint = str(folder / "checkpoint-14")
    resumed, again = run_on(ranks4, tmp_path, 4, resume=checkpoint, plugin={"recalibrate_steps": 0})
    assert [speed for _, speed, _ in again] == [None] * 6
    np.testing.assert_allclose(resumed[0].series("loss"), runs[0].series("loss"), rtol=1e-5)
    cost = COST.scaled(attention / 1000, linear / 1000)
    steps = planned(world_size=4)
    steps.collator = LengthAwareCollator(Topology(4, 100), cost, 0)
    assert [steps.plan(0, step).lower_bound for step in range(14, 20)] == [bound for *_, bound in again]


def test_another_cost_model_begins_anew(recalibrated, ranks2, tmp_path):
    folder, _, _ = recalibrated
    other = {"cost": TRUE, "recalibrate_steps": 0}
    runs, again = run_on(ranks2, tmp_path, resume=str(folder / "checkpoint-14"), plugin=other)
    assert [speed for _, speed, _ in again] == [None] * 6
    assert any("what was measured then is dropped" in message for message in runs[0].messages)


def test_a_checkpoint_of_before_there_were_more_coefficients_is_kept(caplog):
    adjustments = Adjustments([(0, 5, Adjustment(linear=1500))])
    state = {"cost": fingerprint(COST)[:8], "adjustments": adjustments.state(0, 0)}
    assert restored(state, COST, 2).at(0, 5) == Adjustment(linear=1500)
    state["cost"][1] += 1
    assert restored(state, COST, 2).at(0, 5) == Adjustment()
    assert "what was measured then is dropped" in caplog.text


@pytest.mark.nightly
def test_worker_processes_hear_of_it(recalibrated, ranks2, tmp_path):
    _, _, plans = recalibrated
    settings = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, "max_steps": 12}
    _, again = run_on(ranks2, tmp_path, settings=settings)
    switch = EVERY + 3
    assert [speed for _, speed, _ in again[:switch]] == [None] * switch
    assert [plan for plan, *_ in again[switch:]] == [plan for plan, *_ in plans[switch:12]]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_with_real_clocks_in_the_order_of_nccl(world_size, tmp_path, request):
    """Plans that differed between ranks would be an error of the step."""
    arguments_ = (
        "llama",
        documents(LENGTHS),
        {"capacity": 400 // world_size, "global_batch_documents": 15, "recalibrate_steps": 3},
        {"output_dir": tmp_path, "num_train_epochs": 1},
    )
    if world_size == 1:
        runs = [train(*arguments_)]
    else:
        runs = request.getfixturevalue(f"ranks{world_size}").run(train, *arguments_, in_order=True)
    for run in runs:
        assert run.series("recalibrations")[-1] >= 1, "the preset knows nothing of so small a model"
        predicted, measured, error = (
            np.array(run.series(name))
            for name in ("predicted_step_seconds", "measured_step_seconds", "prediction_error")
        )
        assert (measured > 0).all()
        np.testing.assert_allclose(measured / predicted - 1, error, atol=2e-3, rtol=2e-3)


def test_where_ranks_wait_for_each_other_nothing_is_learned(ranks2, tmp_path):
    """Equal ranks were given other speeds, since each micro-batch takes as long as the slowest of its round."""
    runs, plans = run_on(
        ranks2, tmp_path, plugin={"sharding": "zero2"}, settings={"max_steps": EVERY + 4}, in_order=True
    )
    assert runs[0].series("recalibrations") == [0] * (EVERY + 4)
    assert [speed for _, speed, _ in plans] == [None] * (EVERY + 4)


def test_evaluation_plans_with_what_training_learned(ranks2, tmp_path):
    runs, _ = run_on(ranks2, tmp_path, eval_rows=documents([150, 20, 9, 60] * 9, seed=1), settings={"max_steps": 12})
    assert runs[0].evaluation["eval_loss"] == runs[1].evaluation["eval_loss"]


def agreements(world_size: int) -> tuple[int, int]:
    """How many collectives an agreement takes on this rank, and of how many bytes at most."""
    sizes: list[int] = []
    steps = planned(dist.get_rank(), world_size)
    recalibration = Recalibration(steps, dist.get_rank(), 50, 2, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_reduce"):
            original = getattr(dist, name)

            def counted(first: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                sizes.append((first if isinstance(first, torch.Tensor) else args[0]).nbytes)
                return original(first, *args, **kwargs)

            patch.setattr(dist, name, counted)
        for step in range(steps.steps(0)):
            plan = steps.plan(0, step)
            mark = recalibration.begin_step(plan)
            for _ in range(len(plan.layouts(dist.get_rank())) + 1):
                mark()
        recalibration.agree((0, steps.steps(0) - 1))
    return len(sizes), max(sizes)


def speeds_if_slow(slow: int, ranks: int) -> tuple[int, ...] | None:
    """Return the speeds that processes agree on where one takes three times as long, of which several are a rank."""
    steps = planned(dist.get_rank() * ranks // dist.get_world_size(), ranks)
    recalibration = Recalibration(steps, 0, 50, 2, torch.device("cpu"))
    times = 3.0 if dist.get_rank() == slow else 1.0
    recalibration._samples = [Sample(attention, 100.0, times * (attention + 100)) for attention in (10.0, 40, 90, 160)]
    recalibration.agree((0, 0))
    return steps.adjustments.latest.speed


@pytest.mark.parametrize(("slow", "expected"), [(1, (333, 1000)), (2, (1000, 333)), (3, (1000, 333))])
def test_processes_of_tensor_parallelism_are_one_rank(slow, expected, ranks4):
    assert ranks4.run(speeds_if_slow, slow, 2) == [expected] * 4


def test_a_step_far_longer_than_planned_is_said_once(caplog, monkeypatch):
    steps = planned(0, 1)
    plan, seconds = steps.plan(0, 0), 0.0
    recalibration = Recalibration(steps, 0, 50, 2, torch.device("cpu"))
    due = (plan.timeline().makespan + recalibration.cost.step_ns) / 1e9
    monkeypatch.setattr(Stopwatch, "seconds", lambda self: [seconds])
    monkeypatch.setattr(Recalibration, "_read", lambda self: None)
    # The first step of a process compiles, whatever it takes; 2.9 times is not yet worth a word; later ones add nothing.
    for times, warnings in ((100.0, 0), (2.9, 0), (4.5, 1), (12.9, 1)):
        recalibration.begin_step(plan)
        seconds = times * due
        recalibration.end_step()
        if times != 100.0:
            recalibration.begin_step(plan)
        assert len(caplog.messages) == warnings
    (message,) = caplog.messages
    assert f"a step took {4.5 * due:.3g} s, and {due:.3g} s were planned: 4.5 times as long" in message
    assert "`hf-longctx profile` measures this machine" in message
    assert "corrected by what is measured every 50 steps" in message


def test_an_agreement_is_three_small_collectives(ranks2):
    for count, largest in ranks2.run(agreements, 2):
        assert count <= 3
        assert largest <= 8 * 20, "one integer for each step"


@pytest.mark.parametrize("value", [-1, 1.5, "x"])
def test_steps_between_agreements_are_a_count(value):
    from hf_longctx import LongContextPlugin

    with pytest.raises(ValueError, match=f"recalibrate_steps: must be .*, got {value!r}"):
        LongContextPlugin(capacity=100, recalibrate_steps=value)


def test_a_profile_gives_the_costs(tmp_path, caplog):
    from hf_longctx import LongContextPlugin
    from tests.builders.known_speeds import TRUTH, profile

    file = tmp_path / "profile.json"
    profile().save(file)
    model, topology = tiny_llama(), Topology(2, 100)
    cost = cost_model(LongContextPlugin(capacity=100, profile=str(file)), model, topology, torch.device("cpu"))
    assert cost.attention_ps == CostModel.from_config(model.config, TRUTH).attention_ps
    assert not [record for record in caplog.records if "was measured in" in record.getMessage()]
    half = tiny_llama(torch.bfloat16)
    half.model.embed_tokens.weight = torch.nn.Parameter(
        torch.zeros(4, dtype=torch.uint8), requires_grad=False
    )  # packed
    cost_model(LongContextPlugin(capacity=100, profile=str(file)), half, topology, torch.device("cpu"))
    assert (
        f"profile={str(file)!r} was measured in float32, and this run computes in half precision: seconds"
        in caplog.text
    )
    for name in ("embed_tokens", "lm_head"):
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in parameter_name and parameter.requires_grad)
    less = cost_model(LongContextPlugin(capacity=100, profile=str(file)), model, topology, torch.device("cpu"))
    assert 0 < less.step_ns < cost.step_ns, "what is not trained is neither summed nor updated"
    with pytest.raises(ValueError, match=r"profile: must be a file that .*got 'nothing.json'"):
        LongContextPlugin(capacity=100, profile="nothing.json")
    with pytest.raises(ValueError, match=r"profile: .* and cost both say how long things take"):
        LongContextPlugin(capacity=100, profile=str(file), cost=COST)
    assert arguments(tmp_path).use_cpu
