"""Someone who takes it to another machine: images, manifests, jobs, workflow, forms, a notebook. They name what exists, and keep
rules that a linter and the packages of scripts/check_deploy.py would also look at."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.dashboard.modules.job.cli import submit
from ray.runtime_env import RuntimeEnv
from torch.distributed.run import get_args_parser

from hf_longctx.config import load_config
from tests.builders.called_scripts import called, launched
from tests.worlds.launched import ROOT

DEPLOY = ROOT / "examples" / "deploy"
NOTEBOOK = ROOT / "examples" / "demo.ipynb"
FOLDER = "/opt/hf_longctx/"
"""Of the repository in an image."""


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, without comments, in their order."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in whole.splitlines() if line.strip()]


def shell_is_valid(text: str) -> bool:
    return subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False).returncode == 0


def copied() -> set[str]:
    """Return what of the repository the Dockerfile puts into an image."""
    words = [shlex.split(rest) for name, rest in instructions() if name == "COPY"]
    return {word for copy in words for word in copy[:-1] if not word.startswith("--")}


@pytest.mark.processes
def test_an_image_has_a_pinned_base_a_user_without_rights_and_no_secret():
    lines = instructions()
    [base] = [rest for name, rest in lines if name == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.1[12]\.\d+-slim-\w+", base)
    assert [rest for name, rest in lines if name == "FROM"] == ["${PYTHON_IMAGE}"]
    users = [rest for name, rest in lines if name == "USER"]
    assert users == ["1000"]
    after = [name for name, _ in lines][[name for name, _ in lines].index("USER") :]
    assert after.count("RUN") == 2, "what pip installs, it installs without rights"
    runs = [rest for name, rest in lines if name == "RUN"]
    assert all(shell_is_valid(run) for run in runs)
    assert all("--constraint scripts/constraints.txt" in run for run in runs if "pip install" in run)
    assert "PIP_NO_CACHE_DIR=1" in " ".join(rest for name, rest in lines if name == "ENV")
    assert not [rest for name, rest in lines if name == "ADD" or re.search(r"TOKEN|SECRET|PASSWORD|KEY=", rest)]
    assert {name for name, _ in lines} <= {"ARG", "FROM", "ENV", "RUN", "USER", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    [entry] = [json.loads(rest) for name, rest in lines if name == "ENTRYPOINT"]
    assert entry == ["hf-longctx"]


def test_what_an_image_copies_is_there_and_is_all_that_a_builder_is_sent():
    assert all((ROOT / name).exists() for name in copied())
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*", "what is not named stays here"
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert {name.split("/")[0] for name in copied()} == sent


@pytest.mark.processes
def test_a_skypilot_task_runs_scripts_that_exist(tmp_path: Path):
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert all(shell_is_valid(task[name]) for name in ("setup", "run"))
    assert (ROOT / "scripts" / "setup.sh").is_file()
    assert "bash scripts/setup.sh" in task["setup"]
    *exports, command = task["run"].strip().splitlines()
    assert all(line.startswith("export ") for line in exports)
    cluster = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-7"}
    given = task["envs"] | cluster | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "DATA": str(tmp_path)}
    script = "\n".join([*exports, 'printf "%s\\n" "$NODES" "$RANKS" "$JOB" "$HEAD"', f'printf "%s\\n" {command}'])
    shown = subprocess.run(["sh", "-ec", script], env=given, text=True, capture_output=True, check=True)
    nodes, ranks, job, head, *words = shown.stdout.splitlines()
    assert words[:2] == ["bash", "scripts/torchrun.sh"]
    [(_, arguments, _)] = called("torchrun", *words[2:], folder=tmp_path, NODES=nodes, RANKS=ranks, JOB=job, HEAD=head)
    started = launched(arguments)
    assert (started.nnodes, started.nproc_per_node, started.rdzv_id) == ("4", "8", "sky-7")
    assert started.rdzv_endpoint.startswith("10.0.0.1:")


def test_a_train_job_runs_a_script_and_a_configuration_that_an_image_holds(tmp_path: Path):
    job = yaml.safe_load((DEPLOY / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    started = get_args_parser().parse_args(trainer["args"])
    option, config, *overrides = started.training_script_args
    for path in (started.training_script, config):
        name = path.removeprefix(FOLDER)
        assert (ROOT / name).is_file()
        assert name.split("/")[0] in copied()
    assert option == "--config"
    overrides = [word.replace("/data/documents.jsonl", str(tmp_path)) for word in overrides]
    settings = load_config(ROOT / config.removeprefix(FOLDER), overrides)
    assert settings.training["resume_from_checkpoint"] == "auto"
    [patch] = job["spec"]["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert {volume["name"] for volume in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"useradd --create-home --uid {pod['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


@pytest.mark.processes
def test_a_ray_job_is_submitted_with_options_that_ray_has(tmp_path: Path):
    (tmp_path / "ray").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    (tmp_path / "ray").chmod(0o755)
    script = ["bash", str(DEPLOY / "ray_job.sh")]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GPUS": "4"}
    without = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert (without.returncode, "RAY_API_SERVER_ADDRESS=" in without.stderr) == (2, True)
    given = ["configs/tiny.yaml", "training.seed=4"]
    done = subprocess.run([*script, *given], env=environment, capture_output=True, text=True, check=True)
    job, verb, *words = done.stdout.splitlines()
    assert (job, verb) == ("job", "submit")
    options: dict[str, Any] = submit.make_context("submit", words).params
    assert options["address"] == "http://127.0.0.1:8265"
    assert (ROOT / options["working_dir"], options["entrypoint_num_gpus"]) == (ROOT, 4)
    assert list(options["entrypoint"]) == ["env", "RANKS=4", "bash", "scripts/torchrun.sh", *given]
    assert (ROOT / options["runtime_env"]) == DEPLOY / "ray_runtime.yaml"
    runtime = RuntimeEnv(**yaml.safe_load((DEPLOY / "ray_runtime.yaml").read_text()))
    assert {".git", ".venv", "runs"} <= set(runtime["excludes"])


def test_the_workflow_runs_what_a_contributor_runs_and_may_only_read():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert "bash scripts/test.sh" in [step.get("run") for step in steps]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    assert not [step for step in steps if "${{" in step.get("run", "")], "nothing of a stranger's goes into a shell"
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12"], "as scripts/setup.sh takes them"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[bf]*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_ones(path: Path):
    form = yaml.safe_load(path.read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]
        assert field["type"] == "markdown" or re.fullmatch(r"[a-z]+", field["id"])
    labels = [field["id"] for field in form["body"] if "id" in field]
    assert len(labels) == len(set(labels))
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def cells(kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_one_without_outputs_and_its_links_lead_somewhere():
    assert not [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell.get("outputs")]
    assert [ast.parse(source) for source in cells("code")]
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(cells("markdown")))
    assert links
    assert all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.processes
@pytest.mark.nightly
def test_the_notebook_learns(tmp_path: Path):
    """Its cells, one after the other, in a process of their own."""
    program = "\n".join([*cells("code"), "assert after < before, (before, after)"])
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "def loads" in ran.stdout
