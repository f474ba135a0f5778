"""`andon gradient-server` on several machines, each a network namespace: who may connect, and a host that is gone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.kit.network import Host, network
from tests.kit.runs import end_started, events

WORKER = """
import sys, time
from tests.protocol2.plain_peers import PlainWorker
worker = PlainWorker((sys.argv[1], 29412), sys.argv[2])
print("joined", flush=True)
time.sleep(float(sys.argv[3]))
worker.sock.settimeout(200)
worker.send_gradient(0, [1.0, 2.0], 1.0, 1, 1)
print("mean", worker.averaged()[1].tolist(), flush=True)
"""


def work(host: Host, cwd: Path, seconds: float) -> subprocess.Popen[str]:
    """A worker that computes for so long before it sends."""
    command = (sys.executable, "-c", WORKER, "10.77.0.1", host.name, str(seconds))
    return host.popen(*command, cwd=cwd, more={"PYTHONPATH": str(ROOT)})


def line(process: subprocess.Popen[str], text: str) -> None:
    """Wait for a line of a process."""
    assert process.stdout
    seen = ""
    for each in process.stdout:
        seen += each
        if text in each:
            return
    raise AssertionError(f"it ended without {text!r}: {seen}")


def test_only_hosts_of_an_allowed_network_can_take_part(tmp_path: Path) -> None:
    with network("alpha", "beta", "gamma") as hosts:
        options = ["--bind=0.0.0.0", "--workers=1", "--steps=1", "--allow=10.77.0.2/32", "--run.dir=run"]
        server = hosts["alpha"].start("gradient-server", *options, cwd=tmp_path)
        line(server, "WARNING: There is no authentication: any host in 10.77.0.2/32")
        stranger = work(hosts["gamma"], tmp_path, 0.0)
        assert "joined" not in stranger.communicate(timeout=60)[0] and stranger.returncode
        friend = work(hosts["beta"], tmp_path, 0.0)
        assert "mean [1.0, 2.0]" in friend.communicate(timeout=60)[0]
        output = server.communicate(timeout=60)[0]
        end_started()
    assert server.returncode == 0, output
    assert "Refused a connection from 10.77.0.3: it is in no network that --allow names" in output


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_host_that_is_gone_is_found_while_one_that_computes_is_waited_for(tmp_path: Path) -> None:
    with network("alpha", "beta", "gamma") as hosts:
        options = ["--bind=0.0.0.0", "--workers=2", "--steps=1", "--allow=10.77.0.0/24", "--run.dir=run"]
        server = hosts["alpha"].start("gradient-server", *options, cwd=tmp_path)
        line(server, "WARNING")
        computing, gone = work(hosts["beta"], tmp_path, 100.0), work(hosts["gamma"], tmp_path, 1000.0)
        line(computing, "joined")
        line(gone, "joined")
        hosts["gamma"].cut()
        began = time.time()
        assert "mean [1.0, 2.0]" in computing.communicate(timeout=200)[0]
        assert server.communicate(timeout=60)[0] and server.returncode == 0
        end_started()
    lost = [each for each in events(tmp_path / "run", "lost") if each["host"] == "gamma"]
    print(f"found after {lost[0]['time'] - began:.1f} s")
    assert 10 < lost[0]["time"] - began < 75
