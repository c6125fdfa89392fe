"""scripts/torchrun.sh, slurm.sh and ray_cluster.sh: the command lines that they come to, read by the programs' own parsers.

srun, scontrol, torchrun and ray are programs of the test that write down how they were called: no cluster is here.
"""

import subprocess
from pathlib import Path

import pytest
from ray.scripts import scripts as ray_commands

from tests.builders.called_scripts import called, launched
from tests.worlds.launched import ROOT

pytestmark = pytest.mark.processes

SCRIPTS = ("torchrun", "slurm", "ray_cluster")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_valid_and_says_how_it_is_used(script: str, tmp_path: Path):
    file = ROOT / "scripts" / f"{script}.sh"
    checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    without = called(script, folder=tmp_path)
    assert without.code == 2
    assert not without
    assert f"scripts/{script}.sh" in without.said, "its first lines"
    assert without.said.strip().splitlines()[-1] in file.read_text()


def test_torchrun_on_one_machine_and_on_several(tmp_path: Path):
    [(_, arguments, environment)] = called("torchrun", "configs/tiny.yaml", folder=tmp_path, RANKS="2")
    alone = launched(arguments)
    assert (alone.standalone, alone.nnodes, alone.nproc_per_node, alone.max_restarts) == (True, "1", "2", 3)
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    [(_, arguments, _)] = called(
        "torchrun", "configs/tiny.yaml", "training.seed=4", folder=tmp_path, RANKS="8", NODES="4", HEAD="node7"
    )
    several = launched(arguments)
    assert (several.nnodes, several.nproc_per_node, several.rdzv_endpoint) == ("4", "8", "node7:29500")
    assert several.training_script_args[-1] == "training.seed=4"
    refused = called("torchrun", "configs/tiny.yaml", folder=tmp_path, RANKS="8", NODES="4")
    assert refused.code == 2
    assert "NODES=4 needs HEAD" in refused.said


@pytest.mark.parametrize(
    ("code", "fails_before", "restarts", "requeued"),
    [("0", "0", "0", False), ("1", "0", "0", True), ("1", "600", "0", False), ("1", "0", "20", False)],
    ids=["it ends well", "it fails", "it fails at once", "it has failed often"],
)
def test_slurm_starts_a_launcher_on_each_machine_and_queues_again_what_failed(
    code: str, fails_before: str, restarts: str, requeued: bool, tmp_path: Path
):
    job = {"SLURM_JOB_ID": "25001", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    machine = {
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_RESTART_COUNT": restarts,
    }
    how = {"TORCHRUN_CODE": code, "FAILS_BEFORE": fails_before}
    calls = called("slurm", "configs/tiny.yaml", "longctx.sharding=zero3", folder=tmp_path, **job, **machine, **how)
    assert calls.code == int(code)
    [(_, _, given)] = [call for call in calls if call[0] == "srun"]
    assert given["SRUN_CPUS_PER_TASK"] == "64", "srun takes none of sbatch's options"
    [(_, arguments, _)] = [call for call in calls if call[0] == "torchrun"]
    started = launched(arguments)
    assert (started.nnodes, started.nproc_per_node, started.rdzv_id) == ("2", "8", "25001")
    assert started.rdzv_endpoint == "node7:25001"
    assert ["requeue", "25001"] in [call[1] for call in calls if call[0] == "scontrol"] or not requeued
    assert (f"training ended with exit code {code}" in calls.said) == requeued


def test_a_ray_of_several_machines_has_a_token_and_no_dashboard(tmp_path: Path):
    [(_, token, _), (_, head, environment)] = called("ray_cluster", "head", "10.0.0.1", folder=tmp_path)
    assert token == ["get-auth-token", "--generate"]
    assert (environment["RAY_AUTH_MODE"], environment["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
    options = ray_commands.start.make_context("start", head[1:]).params
    assert (options["head"], options["node_ip_address"], options["port"]) == (True, "10.0.0.1", 6379)
    assert options["include_dashboard"] is False
    [(_, join, environment)] = called("ray_cluster", "join", "10.0.0.1", folder=tmp_path)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert ray_commands.start.make_context("start", join[1:]).params["address"] == "10.0.0.1:6379"
    [(_, stop, _)] = called("ray_cluster", "stop", folder=tmp_path)
    assert stop == ["stop"]
