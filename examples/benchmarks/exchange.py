"""The part of the gradient exchange that is hidden behind backward, over a network instead of shared memory.

    python examples/benchmarks/exchange.py      unshaped, 1 and 4 Gbit/s; one and four backward calls
    python examples/benchmarks/exchange.py --calls 4 --over-steps    one update in four steps, of a backward call each
    python examples/benchmarks/exchange.py --timeline exchange.png

Two network namespaces, joined by a pair of virtual interfaces whose rate `tc` shapes, with one rank and one thread in
each: an MLP of 23.6 M parameters at batch 128, over gloo. Each host and bare ``DistributedDataParallel`` (with
``no_sync`` by hand if an update has several backward calls) take turns in the same two processes. Needs root,
iproute2 and two cores; the script removes everything at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ADDRESSES = ("10.213.77.1", "10.213.77.2")
RATES = ("unshaped", "1gbit", "4gbit")
LAYERS, WIDTH, ROWS = 6, 1984, 128


class Mlp:
    """The trainer class: an MLP, plain SGD, several backward calls before each update."""

    def __init__(
        self,
        calls: int,
        wrap: Callable[[Any], Any] = lambda model: model,
        *,
        over_steps: bool = False,
        width: int = WIDTH,
    ) -> None:
        self.calls = calls
        self.calls_of_step = 1 if over_steps else calls
        self.called = 0
        self.wrap = wrap
        self.width = width

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        import torch

        layers = [[torch.nn.Linear(self.width, self.width), torch.nn.ReLU()] for _ in range(LAYERS)]
        model = self.wrap(torch.nn.Sequential(*[part for layer in layers for part in layer]))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        from genlight.adapter import StepResult

        for _ in range(self.calls_of_step):
            if self.called == 0:
                state["optimizer"].zero_grad()
            self.called = (self.called + 1) % self.calls
            waits = getattr(state["model"], "no_sync", None)
            with contextlib.nullcontext() if waits is None or self.called == 0 else waits():
                state["model"](batch).square().mean().backward()
            if self.called == 0:
                state["optimizer"].step()
        return StepResult()

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


def measure(chosen: argparse.Namespace) -> None:
    """The program of one rank: every host takes turns with bare DDP."""
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist
    from lightning.pytorch.strategies import DDPStrategy
    from step_cost.alternating import Alternation, spread
    from step_cost.hosts import fit, hosted_as
    from step_cost.ranks import Environment
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=chosen.rank, world_size=2, init_method=f"tcp://{ADDRESSES[0]}:29400")
    batch = torch.randn(ROWS, WIDTH)

    def bare(wrap: Callable[[Any], Any] = DistributedDataParallel) -> Callable[[], None]:
        trainer = Mlp(chosen.calls, wrap, over_steps=chosen.over_steps)
        state = trainer.configure(None)
        return lambda: trainer.train_step(batch, state, None)

    class Automatic(pl.LightningModule):
        """The same in Lightning's automatic optimization."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Mlp(1).configure(None)["model"]

        def training_step(self, rows: Any, index: int) -> Any:
            return self.model(rows).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def ddp() -> dict[str, Any]:
        return {"strategy": DDPStrategy(cluster_environment=Environment(chosen.rank, 2)), "devices": 2}

    def by_hand(wrap: Callable[[Any], Any]) -> Callable[[Alternation], None]:
        def run(turns: Alternation) -> None:
            step = bare(wrap)
            for _, _ in zip(range(turns.steps), turns, strict=False):
                step()

        return run

    with tempfile.TemporaryDirectory() as temporary, torch.random.fork_rng():
        folder = Path(temporary)
        hosts: dict[str, Callable[[Alternation], None]] = {
            "bare DDP, once more": by_hand(DistributedDataParallel),
            "genlight": lambda turns: hosted_as(
                Mlp(chosen.calls, over_steps=chosen.over_steps), turns, folder, **ddp()
            ),
            "one rank alone": by_hand(lambda model: model),
        }
        if chosen.calls == 1:
            hosts["Lightning, automatic"] = lambda turns: fit(Automatic(), turns, folder, steps=turns.steps, **ddp())
        if chosen.timeline:
            hosts = {"genlight": hosts["genlight"]}
        rows = {}
        for name, run in hosts.items():
            turns = Alternation(bare(), blocks=chosen.rounds, block=chosen.block, meet=dist.barrier, batch=batch)
            with record(chosen) if chosen.timeline else contextlib.nullcontext():
                run(turns)
            rows[name] = {
                "floor_s": spread([pair.floor_wall_s / chosen.block for pair in turns.pairs]),
                "host_s": spread([pair.host_wall_s / chosen.block for pair in turns.pairs]),
                "ratio": spread([pair.host_wall_s / pair.floor_wall_s for pair in turns.pairs]),
            }
    if chosen.rank == 0:
        Path(chosen.results).write_text(json.dumps(rows))
    dist.destroy_process_group()


@contextlib.contextmanager
def record(chosen: argparse.Namespace) -> Iterator[None]:
    """Record the times of genlight's backward calls and of the transfer of each bucket."""
    import torch

    from genlight.adapter.gradients.ddp.buckets import Bucket
    from genlight.adapter.gradients.step import StepRouter

    spans: list[dict[str, Any]] = []
    send, backward = Bucket.send_unchanged, StepRouter.backward

    def sent(bucket: Bucket) -> None:
        span = {"what": id(bucket), "bytes": bucket._whole.nbytes, "begin": time.perf_counter()}
        send(bucket)
        bucket._work.get_future().then(lambda _: span.update(end=time.perf_counter()))
        spans.append(span)

    def called(router: StepRouter, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        backward(router, *args, **kwargs)
        spans.append({"what": "backward", "begin": begin, "end": time.perf_counter()})

    Bucket.send_unchanged, StepRouter.backward = sent, called  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bucket.send_unchanged, StepRouter.backward = send, backward  # type: ignore[method-assign]
        if chosen.rank == 0 and torch.distributed.is_initialized():
            Path(chosen.timeline).with_suffix(".json").write_text(json.dumps(spans[-40:]))


def draw(timeline: Path) -> None:
    """Draw the last steps of a recording."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    spans = [span for span in json.loads(timeline.with_suffix(".json").read_text()) if "end" in span]
    last = [span for span in spans if span["what"] == "backward"][-2:]
    spans = [span for span in spans if span["begin"] >= last[0]["begin"]]
    figure, axes = pyplot.subplots(figsize=(9, 3))
    lanes: dict[int, str] = {}
    for span in spans:
        lane = 0
        if span["what"] != "backward":
            lanes.setdefault(span["what"], f"bucket of {span['bytes'] / 2**20:.1f} MiB")
            lane = 1 + list(lanes).index(span["what"])
        axes.barh(
            -lane,
            span["end"] - span["begin"],
            left=span["begin"] - last[0]["begin"],
            color="tab:blue" if lane == 0 else "tab:orange",
        )
    names = ["backward", *lanes.values()]
    axes.set_yticks([-lane for lane in range(len(names))], names)
    axes.set_xlabel("seconds")
    axes.set_title("Two steps: backward, and each bucket on its way")
    figure.tight_layout()
    figure.savefig(timeline, dpi=120)


@contextlib.contextmanager
def network() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Make two connected namespaces; yield their names and the names of their interfaces."""
    spaces = (f"gl{os.getpid()}a", f"gl{os.getpid()}b")
    links = (f"v{os.getpid()}a", f"v{os.getpid()}b")
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", links[0], "netns", spaces[0], "type", "veth", "peer", "name", links[1], "netns", spaces[1])
        for space, link, address in zip(spaces, links, ADDRESSES, strict=True):
            _ip("-n", space, "address", "add", f"{address}/24", "dev", link)
            _ip("-n", space, "link", "set", link, "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield spaces, links
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def shape(spaces: tuple[str, str], links: tuple[str, str], rate: str) -> None:
    """Set the rate of both directions."""
    for space, link in zip(spaces, links, strict=True):
        where = ["tc", "-n", space, "qdisc"]
        subprocess.run([*where, "delete", "dev", link, "root"], check=False, capture_output=True)
        if rate != "unshaped":
            limits = ["burst", "1mb", "latency", "50ms"]
            subprocess.run([*where, "add", "dev", link, "root", "tbf", "rate", rate, *limits], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each host")
    parser.add_argument("--block", type=int, default=3, help="steps of a turn")
    parser.add_argument("--rate", action="append", choices=RATES, help="only this one; may be given several times")
    parser.add_argument("--calls", type=int, action="append", help="backward calls of a step; default: 1 and 4")
    parser.add_argument(
        "--over-steps", action="store_true", help="one backward call in each step; the update in the last of --calls"
    )
    parser.add_argument(
        "--timeline", help="draw backward and buckets of two steps at 4 Gbit/s (needs matplotlib), and measure nothing"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        chosen.calls = chosen.calls[0]
        chosen.block *= chosen.calls if chosen.over_steps else 1
        return measure(chosen)
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        sys.exit("exchange.py makes network namespaces: it needs root, and `ip` and `tc` of iproute2")
    rates = ["4gbit"] if chosen.timeline else chosen.rate or RATES
    every_calls = [1] if chosen.timeline else chosen.calls or [1, 4]
    print(f"{'':34}{'bare DDP, s':>12}{'host, s':>10}{'ratio':>8}  (quartiles)")
    with network() as (spaces, links), tempfile.TemporaryDirectory() as folder:
        for rate in rates:
            shape(spaces, links, rate)
            for calls in every_calls:
                results = Path(folder, "results.json")
                command = [sys.executable, __file__, "--calls", str(calls), "--results", str(results)]
                command += ["--rounds", str(chosen.rounds), "--block", str(chosen.block)]
                command += ["--over-steps"] if chosen.over_steps else []
                command += ["--timeline", str(Path(chosen.timeline).resolve())] if chosen.timeline else []
                ranks = [
                    subprocess.Popen(
                        ["ip", "netns", "exec", spaces[rank], *command, "--rank", str(rank)],
                        env={**os.environ, "GLOO_SOCKET_IFNAME": links[rank], "OMP_NUM_THREADS": "1"},
                    )
                    for rank in range(2)
                ]
                codes = [process.wait() for process in ranks]
                if any(codes):
                    sys.exit("a rank failed")
                of = "for an update, one in each step" if chosen.over_steps else "in a step"
                print(f"{rate}, backward calls {of}: {calls}")
                for name, row in json.loads(results.read_text()).items():
                    low, high = row["ratio"]["q1"], row["ratio"]["q3"]
                    print(
                        f"    {name:30}{row['floor_s']['median']:>12.3f}{row['host_s']['median']:>10.3f}"
                        f"{row['ratio']['median']:>8.3f}  ({low:.3f} to {high:.3f})",
                        flush=True,
                    )
    if chosen.timeline:
        draw(Path(chosen.timeline))
    return None


if __name__ == "__main__":
    main()
