"""`andon launch`: a SLURM job script or a Kubernetes manifest that runs a configuration and continues after failures.

Both start a coordinator and one worker per task or pod. A lost worker is started again and joins the others, which have
continued without it. If the coordinator fails, the whole run is started again and resumes from the newest checkpoint,
unless its exit code says that it is done (0), was called wrongly (2) or was halted (3).
"""

import re
import shlex
from collections.abc import Sequence
from typing import Any, Final

import yaml

from andon.cluster.launch import PORT
from andon.config.schema import RunSettings
from andon.files import expand

ATTEMPTS: Final = 20
SAVE_SECONDS: Final = 120
"""Time to save before the scheduler ends the run."""

SLURM: Final = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --ntasks={workers}
#SBATCH --cpus-per-task={threads}
{gpus}#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{seconds}
# Submit with `sbatch` from a folder that all nodes see. The nodes need `andon` in their PATH.

port=$((20000 + SLURM_JOB_ID % 20000))
coordinator=
unset ANDON_TOKEN  # the run's folder has the token

# USR1: the time limit is near; save and requeue. TERM: the job is cancelled; save.
stop() {{ stopping=$1; [ -n "$coordinator" ] && kill -TERM "$coordinator" 2>/dev/null; }}
trap 'stop requeue' USR1
trap 'stop cancelled' TERM

# A task: a lost worker is started again and joins the others.
task='trap "exit 143" TERM
for try in $(seq {attempts}); do
    andon worker "$0" --folder "$1" --token-file "$2"; code=$?
    case $code in 0|2|3|4) exit "$code" ;; esac
    sleep 3
done
exit "$code"'

for attempt in $(seq {attempts}); do
    andon coordinator {arguments} --bind "[::]:$port" &
    coordinator=$!
    srun --kill-on-bad-exit=0 bash -c "$task" "$(hostname):$port" {parent} {folder}/token &
    workers=$!
    wait "$coordinator"; code=$?
    while kill -0 "$coordinator" 2>/dev/null; do wait "$coordinator"; code=$?; done
    for second in $(seq 10); do kill -0 "$workers" 2>/dev/null || break; sleep 1; done  # workers end by themselves
    kill "$workers" 2>/dev/null; wait "$workers" 2>/dev/null
    case $code in
        0|2|3) exit "$code" ;;
    esac
    case $stopping in
        requeue) scontrol requeue "$SLURM_JOB_ID"; exit 0 ;;
        cancelled) exit "$code" ;;
    esac
    echo "attempt $attempt ended with $code; starting again from the newest checkpoint"
done
exit 1
"""


def slurm_script(config: RunSettings, arguments: Sequence[str]) -> str:
    """A job script: the batch step runs the coordinator, and each task of one `srun` runs a worker."""
    folder = expand(config.run.dir).resolve()
    return SLURM.format(
        name=run_name(config),
        workers=config.workers,
        threads=config.threads,
        gpus="#SBATCH --gpus-per-task=1\n" if config.device == "cuda" else "",
        seconds=SAVE_SECONDS,
        attempts=ATTEMPTS,
        arguments=shlex.join(arguments),
        folder=shlex.quote(str(folder)),
        parent=shlex.quote(str(folder.parent)),
    )


def kubernetes_manifest(config: RunSettings, image: str, claim: str) -> str:
    """A service and two jobs, the coordinator and the workers, which share a volume with the run's folder."""
    name = run_name(config)
    run = config.run.model_copy(update={"dir": f"/runs/{name}"})
    data = config.data.model_copy(update={"cache": "/runs/.cache"})
    config = config.model_copy(update={"run": run, "data": data})
    text = config.to_yaml()
    objects = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"config.yaml": text}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            # A headless service: the name resolves to the pod itself, so every port works.
            "spec": {"clusterIP": "None", "selector": {"andon": name, "role": "coordinator"}},
        },
        _job(config, name, image, claim, "coordinator"),
        _job(config, name, image, claim, "worker"),
    ]
    head = (
        "# Create the run's token once, in a file that only you can read:\n"
        "#   (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > token)\n"
        f"#   kubectl create secret generic {name} --from-file=token\n"
    )
    return head + "---\n".join(yaml.safe_dump(each, sort_keys=False) for each in objects)


def _job(config: RunSettings, name: str, image: str, claim: str, role: str) -> dict[str, Any]:
    count = config.workers if role == "worker" else 1
    coordinator = ["andon", "coordinator", "/config/config.yaml", "--bind", f"0.0.0.0:{PORT}"]
    worker = ["andon", "worker", f"{name}:{PORT}", "--folder", "/runs"]
    gpus = {"nvidia.com/gpu": 1} if config.device == "cuda" and role == "worker" else {}
    container = {
        "name": role,
        "image": image,
        "command": coordinator if role == "coordinator" else worker,
        "workingDir": "/runs",
        "env": [{"name": "ANDON_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}}],
        "resources": {"requests": {"cpu": str(config.threads)}, "limits": gpus},
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "config", "mountPath": "/config"}],
    }
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "config", "configMap": {"name": name}},
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    give_up = {"action": "FailJob", "onExitCodes": {"containerName": role, "operator": "In", "values": [2, 3]}}
    spec = {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimit": ATTEMPTS * count,
        "podFailurePolicy": {"rules": [give_up]},
        "template": {"metadata": {"labels": {"andon": name, "role": role}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{name}-{role}"}, "spec": spec}


def run_name(config: RunSettings) -> str:
    """The name of the run's folder, in characters that schedulers accept."""
    name = re.sub("[^a-z0-9-]+", "-", config.run.dir.name.lower())[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")
