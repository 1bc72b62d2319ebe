"""A real Slurm with two nodes, n9 and n10, on this machine; the daemons are this module's own and end by their ids.

A requeued job starts again when its old credential has expired, so that is a matter of seconds here.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time

from support.ports import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n9", "n10")
PATIENCE_S = 120
"""How long anything may take on a busy machine."""

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/%n.log
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=5
SlurmdTimeout=10
MinJobAge=7200
FirstJobId={first_job}
NodeName=n9 NodeHostname={host} NodeAddr=127.0.0.1 Port={n9_port} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n10 NodeHostname={host} NodeAddr=127.0.0.1 Port={n10_port} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
LaunchParameters=disable_send_gids
SwitchType=switch/none
"""


def missing():
    """Return why no Slurm can be started here, or None."""
    lacking = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if lacking:
        return f"{', '.join(lacking)} not installed; `apt-get install slurm-wlm munge` brings them"
    return None if os.geteuid() == 0 else "slurmd starts the steps of jobs as root only"


class Cluster:
    """Two nodes and their controller.

    Args:
        folder: For everything that it writes; its path must be short enough for a socket.
    """

    def __init__(self, folder):
        self.folder = folder
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.environ |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "MASTER_ADDR": "127.0.0.1",  # the nodes' names do not resolve
        }

    def start(self):
        for name in ("munge", "ctld", "log", *NODES):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "munge/key").write_bytes(os.urandom(1024))
        (self.folder / "munge/key").chmod(0o600)
        ports = [free_port() for _ in range(3)]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0], user="root", folder=self.folder,
                controller_port=ports[0], n9_port=ports[1], n10_port=ports[2],
                # Ranks meet at a port that follows from their job, so ids differ from those in other tests' clusters.
                first_job=1 + int.from_bytes(os.urandom(2), "big"),
            )
        )  # fmt: skip
        munge = {name: f"{self.folder}/munge/{name}" for name in ("socket", "log", "seed", "pid", "key")}
        self.call(
            "munged", "--force", f"--socket={munge['socket']}", f"--log-file={munge['log']}",
            f"--seed-file={munge['seed']}", f"--pid-file={munge['pid']}", f"--key-file={munge['key']}",
        )  # fmt: skip
        self.call("slurmctld", "-i", "-f", self.environ["SLURM_CONF"])
        for node in NODES:
            self.start_node(node)
        self.until(lambda: self.states_of_nodes() == {"idle"}, "the nodes are idle")

    def start_node(self, node):
        self.call("slurmd", "-N", node, "-f", self.environ["SLURM_CONF"])

    def states_of_nodes(self):
        return set(self.call("sinfo", "--noheader", "--Node", "--format=%T").split())

    def set_down(self, node):
        """Take a broken node down, as an administrator or a health check does: its jobs end."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def resume(self, node):
        """Have a node that was set down take jobs again; one that has registered since does so by itself."""
        if "down" in self.call("sinfo", "--noheader", f"--nodes={node}", "--format=%T"):
            self.call("scontrol", "update", f"nodename={node}", "state=resume")

    def kill_node(self, node):
        """End the daemon of a node; the processes that it started continue."""
        os.kill(self.daemon(node), signal.SIGKILL)

    def daemon(self, name):
        path = self.folder / (name if name.endswith("pid") else f"{name}.pid")
        return int(path.read_text())

    def stop(self):
        if (self.folder / "ctld.pid").exists():
            subprocess.run(["scancel", "--user=root"], env=self.environ, check=False, timeout=PATIENCE_S)
            self.until(lambda: not self.call("squeue", "--noheader"), "all jobs have ended")
        for name in (*NODES, "ctld", "munge/pid"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(
                    self.daemon(name), signal.SIGKILL
                )  # its files are thrown away, and an orderly end takes seconds

    def call(self, *command, **changes):
        """The output of a command that succeeds."""
        environ = self.environ | changes.pop("environ", {})
        done = subprocess.run(
            list(map(str, command)),
            env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S, **changes,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments, **changes):
        """The id of a new batch job."""
        return self.call("sbatch", "--parsable", *arguments, **changes).strip()

    def job(self, job_id, field):
        """Return one field of the controller's record of a job."""
        return self.fields(job_id, field)[0]

    def fields(self, job_id, field):
        """Return one field of each record of a job: an array has one for each task that has begun."""
        words = [word.partition("=") for word in self.call("scontrol", "show", "job", job_id).split()]
        return [value for name, _, value in words if name == field]

    def wait(self, job_id, *states):
        """Wait until a job has ended; return its state and exit code."""
        states = states or ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
        what = f"job {job_id} is {' or '.join(states)}"
        self.until(lambda: set(self.fields(job_id, "JobState")) <= set(states), what)
        return self.job(job_id, "JobState"), int(self.job(job_id, "ExitCode").partition(":")[0])

    def until(self, condition, what):
        """Wait for a condition that comes sooner or later."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self):
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted((self.folder / "log").glob("*")))
