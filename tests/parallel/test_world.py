"""How processes are arranged: every process has one place, and what cannot be arranged is refused with the arithmetic."""

import itertools
import re

import pytest

from hf_longctx.parallel.world import World, resolved_sharding


@pytest.mark.parametrize(
    ("stages", "ranks", "degree"), [*itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 4)), (4, 3, 2)]
)
def test_every_process_has_one_place(stages: int, ranks: int, degree: int):
    world = World(stages * ranks * degree, stages=stages, tensor_parallel=degree)
    everyone = set(range(world.processes))
    assert (world.ranks, world.processes_of_stage) == (ranks, ranks * degree)
    places = {(world.stage_of(process), world.rank_of(process), process % degree) for process in everyone}
    assert places == set(itertools.product(range(stages), range(ranks), range(degree)))
    for groups in (world.stage_groups, world.pipelines, world.exchange_groups):
        assert sorted(process for group in groups for process in group) == sorted(everyone)
    for group in world.stage_groups:
        assert {world.stage_of(process) for process in group} == {world.stage_of(group[0])}
    for group in world.pipelines:
        assert [world.stage_of(process) for process in group] == list(range(stages))
        assert len({(world.rank_of(process), process % degree) for process in group}) == 1
    for group in world.exchange_groups:
        assert [world.rank_of(process) for process in group] == list(range(ranks))
        assert len({(world.stage_of(process), process % degree) for process in group}) == 1


@pytest.mark.parametrize(
    ("world", "mode"),
    [
        (World(4), "async"),
        (World(4, "zero1"), "async"),
        (World(4, "zero2"), "lockstep"),
        (World(4, "zero3"), "lockstep"),
        (World(4, expert_parallel=2), "lockstep"),
        (World(4, stages=2), "pipeline"),
        (World(4, "zero1", stages=2), "pipeline"),
    ],
)
def test_where_ranks_meet(world: World, mode: str):
    assert world.mode == mode


@pytest.mark.parametrize(
    ("arrangement", "rule"),
    [
        (
            {"processes": 7, "stages": 2},
            "pipeline_stages=2: it must divide the 7 processes (7 = 3 * 2 + 1); valid: [1, 7]",
        ),
        ({"processes": 6, "tensor_parallel": 4}, "tp_size=4: it must divide the 6 processes (6 = 1 * 4 + 2)"),
        (
            {"processes": 12, "stages": 2, "tensor_parallel": 4},
            "tp_size=4: it must divide the 6 processes of a stage (12 in 2 stages) (6 = 1 * 4 + 2)",
        ),
        (
            {"processes": 4, "stages": 2, "sharding": "zero3"},
            "pipeline_stages=2: ranks of zero2, zero3 and expert parallelism",
        ),
        (
            {"processes": 4, "stages": 2, "expert_parallel": 2},
            "pipeline_stages=2: ranks of zero2, zero3 and expert parallelism",
        ),
    ],
)
def test_what_cannot_be_arranged_is_refused_with_the_arithmetic(arrangement: dict, rule: str):
    with pytest.raises(ValueError, match=re.escape(rule)):
        World(**arrangement)


def test_a_sharding_is_resolved_by_what_accelerate_and_the_model_say():
    def resolved(setting: str, processes: int = 4, reshards: bool | None = None, loaded: bool = False) -> str:
        return resolved_sharding(setting, processes, reshards=reshards, loaded=loaded, launched="MULTI_CPU")

    assert (resolved("auto"), resolved("ddp"), resolved("zero3", processes=1)) == ("ddp", "ddp", "ddp")
    assert (resolved("auto", reshards=True), resolved("auto", reshards=False)) == ("zero3", "zero2")
    assert (resolved("auto", loaded=True), resolved("zero1", loaded=True)) == ("zero3", "zero1")
    with pytest.raises(ValueError, match="sharding='zero3' needs FSDP2, and accelerate uses MULTI_CPU"):
        resolved("zero3")
    with pytest.raises(ValueError, match="but accelerate's configuration sets FSDP"):
        resolved("ddp", reshards=True)
    with pytest.raises(ValueError, match="but the model was sharded when it was loaded"):
        resolved("ddp", loaded=True)
