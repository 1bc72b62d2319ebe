"""What is told of nodes that differ; ``tests/slurm`` has two of them."""

import dataclasses
from pathlib import Path

from genlight.adapter.run.ranks.node_check import NodeFacts, node_faults

HERE = NodeFacts("n9", sees_folder=True, versions={"torch": "2.13", "numpy": "2.4"}, code={"t.py": "a"})
THERE = dataclasses.replace(HERE, host="n10")


def faults(*facts):
    return node_faults(facts, Path("/runs/r"))


def test_nodes_that_are_alike_have_no_faults():
    assert faults(HERE, HERE, THERE, THERE) == []


def test_a_folder_that_is_not_shared_is_told_with_each_host_once():
    blind = [dataclasses.replace(THERE, host=host, sees_folder=False) for host in ("n10", "n10", "n11")]
    (fault,) = faults(HERE, *blind)
    assert fault.startswith("n10, n11 and n9 do not share the run's folder '/runs/r'.")


def test_packages_and_code_that_differ_are_named():
    other = dataclasses.replace(THERE, versions={"torch": "2.12", "numpy": "2.4"}, code={"t.py": "b"})
    assert faults(HERE, other) == [
        "n10 has torch 2.12, and n9 has 2.13. Install the same on all nodes",
        "t.py on n10 is not the file that n9 has. Give all nodes the same code",
    ]
