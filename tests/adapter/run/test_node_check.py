"""The report about nodes that differ. ``tests/slurm`` runs two real nodes."""

from genlight.adapter.run.fit import node_faults

FACTS = {"the run's folder": "shared", "torch": "2.13", "numpy": "2.4", "t.py": "a"}


def test_equal_nodes_have_no_faults():
    assert node_faults([(host, FACTS) for host in ("n9", "n9", "n10", "n10")]) == []


def test_each_difference_is_named_once_with_its_host():
    other = FACTS | {"the run's folder": "another one (/runs/r)", "torch": "2.12", "t.py": "b"}
    assert node_faults([("n9", FACTS), ("n10", other), ("n10", other)]) == [
        "the run's folder is another one (/runs/r) on n10, and shared on n9",
        "torch is 2.12 on n10, and 2.13 on n9",
        "t.py is b on n10, and a on n9",
    ]
