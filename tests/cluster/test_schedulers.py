"""`andon launch`: the job script and the manifest say what they must."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from andon.commands.schedulers import run_name
from andon.config.load import build
from tests.kit.runs import SMALL, andon


def test_the_job_script_is_a_valid_script_with_the_configuration(tmp_path: Path) -> None:
    options = ["--workers=3", "--threads=2", "--run.dir=runs/My run"]
    code, text = andon("launch", "slurm", *SMALL, *options, cwd=tmp_path)
    assert code == 0, text
    for line in ("--ntasks=3", "--cpus-per-task=2", "--requeue", "--job-name=my-run", "--signal=B:USR1@120"):
        assert f"#SBATCH {line}\n" in text
    runs = tmp_path / "runs"
    assert f"\"$(hostname):$port\" {runs} '{runs}/My run'/token &" in text and "'--run.dir=runs/My run'" in text
    assert "gpus" not in text and "unset ANDON_TOKEN" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize(
    ("folder", "name"), [("2026-exp", "run-2026-exp"), ("a" * 39 + "-b", "a" * 39), ("_", "run"), ("Mine", "mine")]
)
def test_names_are_those_that_schedulers_take(folder: str, name: str) -> None:
    assert run_name(build({}, {"run.dir": folder})) == name


def test_the_manifest_has_a_coordinator_workers_and_no_secret_in_it(tmp_path: Path) -> None:
    code, text = andon("launch", "k8s", *SMALL, "--workers=4", "--run.dir=runs/mine", "--image=mine:1", cwd=tmp_path)
    assert code == 0, text
    config, service, coordinator, workers = yaml.safe_load_all(text)
    assert [each["kind"] for each in (config, service, coordinator, workers)] == ["ConfigMap", "Service", "Job", "Job"]
    assert "dir: /runs/mine" in config["data"]["config.yaml"]
    assert workers["spec"]["completions"] == workers["spec"]["parallelism"] == 4
    labels = coordinator["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items() and service["spec"]["clusterIP"] == "None"
    for job in (coordinator, workers):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "mine:1"
        assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "token"}
        assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3]
