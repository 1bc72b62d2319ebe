"""One real Slurm for all tests of this folder that a process runs."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from support import slurm_cluster


@pytest.fixture(scope="session")
def slurm():
    """A running cluster."""
    reason = slurm_cluster.missing()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)  # munged wants every folder above its socket to be open
    cluster = slurm_cluster.Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def scontrol(tmp_path_factory):
    """``scontrol show``; it needs a configuration but no cluster."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed; `apt-get install slurm-client` brings it")
    path = tmp_path_factory.mktemp("scontrol") / "slurm.conf"
    path.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=main Nodes=n1\n")

    def show(what, text):
        """Its output, or None if it refuses the text."""
        done = subprocess.run(
            ["scontrol", "show", what, text], env={"SLURM_CONF": str(path), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return None if done.stderr or "Invalid hostlist" in done.stdout else done.stdout.split()

    return show
