"""Hostlist expressions, as ``scontrol`` expands them; ``tests/slurm`` asks the real one."""

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.cluster.job_context import expand_hostlist
from support.messages import refusal

EXPANDED = {
    "n[9-11]": "n9 n10 n11",
    "n[009-011]": "n009 n010 n011",
    "n[9-010]": "n9 n10",
    "n[99-101]": "n99 n100 n101",
    "rack[1-2]n[3-4]": "rack1n3 rack1n4 rack2n3 rack2n4",
    "a[1-2]b[3-4]d[5-6]": "a1b3d5 a1b3d6 a2b3d5 a2b3d6 a1b4d5 a1b4d6 a2b4d5 a2b4d6",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "n[3-4],n[1-2]": "n3 n4 n1 n2",
    "n[1-3,2-4]": "n1 n2 n3 n2 n3 n4",
    "nodeA,nodeB[001,003]": "nodeA nodeB001 nodeB003",
    "b04-[09-10]": "b04-09 b04-10",
    "n[1-2]-ib,x": "n1-ib n2-ib x",
    "[1-3]": "1 2 3",
    "n1,,n2,": "n1 n2",
    "n1 n2": "n1 n2",
    "n[5]": "n5",
    "node.example.org": "node.example.org",
}

MALFORMED = ["", " ", ",", "(null)", "n[", "n]", "n[1-2", "n]1[", "n[[1-2]]", "n[3-1]", "n[]", "n[1,,2]", "n[-1]"]
MALFORMED += [
    "n[1-]",
    "n[1-2-3]",
    "n[a-b]",
    "n[ 1-2 ]",
    "n[0x1-0x3]",
    "n[1-2];n3",
    "n$(id)",
    "n[+1]",
    "n[\u0661]",
    "n/1",
]


@pytest.mark.parametrize("text", EXPANDED)
def test_an_expression_stands_for_these_hosts(text):
    assert expand_hostlist(text) == EXPANDED[text].split()


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_text_is_refused_and_quoted(text):
    with refusal(ValueError) as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)


def test_65536_hosts_are_the_most_and_more_are_not_even_counted_out():
    assert len(expand_hostlist("n[1-65536]")) == 65_536
    for text in ("n[1-65537]", "n[0-255][0-256]", "n[1-65536],m", "n[1-999999999999999999][1-999999999999999999]"):
        with refusal(ValueError):
            expand_hostlist(text)


@given(st.text(alphabet="n19,-[] x(", max_size=20))
def test_any_text_gives_hosts_or_a_value_error(text):
    try:
        names = expand_hostlist(text)
    except ValueError:
        return
    assert names
