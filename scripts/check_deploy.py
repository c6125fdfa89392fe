"""Compares what examples/deploy/ holds with the packages that read it: SkyPilot's task and Kubeflow Trainer's TrainJob.

Neither package is among hf_longctx's requirements: put them into a folder of their own.
pip install --target DIR skypilot kubeflow-trainer-api && PYTHONPATH=DIR python scripts/check_deploy.py
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent / "examples" / "deploy"


def check_skypilot() -> str:
    """Fails with SkyPilot's own words unless it makes a task of the file."""
    import sky

    task = sky.Task.from_yaml(str(DEPLOY / "skypilot.yaml"))
    [resources] = task.resources
    return f"SkyPilot: {task.name}, {task.num_nodes} x {resources.accelerators}"


def check_train_job() -> str:
    """Fails unless Kubeflow Trainer's model holds all that the file says: it passes over keys that it does not know."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    written = yaml.safe_load((DEPLOY / "trainjob.yaml").read_text(encoding="utf-8"))
    job = TrainerV1alpha1TrainJob.from_dict(written)
    if lost := sorted(_lost(written, job.to_dict())):
        raise ValueError(f"trainjob.yaml: Kubeflow Trainer knows nothing of {', '.join(lost)}")
    return f"Kubeflow Trainer: {job.metadata.name}, {job.spec.trainer.num_nodes} x {job.spec.trainer.num_proc_per_node}"


def _lost(written: Any, kept: Any, place: str = "") -> list[str]:
    """Keys and values that are written and not kept."""
    if isinstance(written, dict):
        values = kept if isinstance(kept, dict) else {}
        return [lost for key in written for lost in _lost(written[key], values.get(key), f"{place}.{key}".strip("."))]
    if isinstance(written, list):
        values = kept if isinstance(kept, list) and len(kept) == len(written) else [None] * len(written)
        return [
            lost for number, value in enumerate(written) for lost in _lost(value, values[number], f"{place}[{number}]")
        ]
    return [] if written == kept else [f"{place} ({written!r}, kept: {kept!r})"]


CHECKS: dict[str, Callable[[], str]] = {"sky": check_skypilot, "kubeflow_trainer_api": check_train_job}


def main() -> None:
    if missing := [name for name in CHECKS if importlib.util.find_spec(name) is None]:
        sys.exit(
            f"check_deploy: there is no {' and no '.join(missing)}; the first lines of this file say how they are installed"
        )
    for check in CHECKS.values():
        print(check())


if __name__ == "__main__":
    main()
