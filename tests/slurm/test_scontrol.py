"""Hostlists expand as with the real ``scontrol``."""

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.cluster.job_context import expand_hostlist
from support.messages import refusal

pytestmark = [pytest.mark.promise(name="old names"), pytest.mark.slurm]

EXAMPLES = 150

NUMBERS = st.integers(0, 120).flatmap(
    lambda number: st.sampled_from([0, 2, 3]).map(lambda width: str(number).zfill(width))
)
RANGES = st.tuples(st.integers(0, 120), st.integers(0, 4), st.sampled_from([0, 2, 3]), st.sampled_from([0, 2, 4])).map(
    lambda drawn: f"{str(drawn[0]).zfill(drawn[2])}-{str(drawn[0] + drawn[1]).zfill(drawn[3])}"
)
BRACKETS = st.lists(st.one_of(NUMBERS, RANGES), min_size=1, max_size=3).map(lambda entries: f"[{','.join(entries)}]")
PREFIXES = st.sampled_from(["n", "a-", "r1n", "", "x.y"])
WORDS = st.tuples(PREFIXES, st.lists(st.tuples(BRACKETS, st.sampled_from(["", "n", "x-", "7"])), max_size=3)).map(
    lambda drawn: drawn[0] + "".join(bracket + text for bracket, text in drawn[1])
)


@settings(max_examples=EXAMPLES)
@given(st.lists(WORDS, min_size=1, max_size=3).map(",".join))
def test_hostlists_expand_to_the_same_hosts_as_with_scontrol_in_the_same_order(scontrol, text):
    hosts = scontrol("hostnames", text)
    if hosts:  # 22.05 refuses a suffix after the last bracket
        assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[3-1]", "n[]", "n[1,,2]", "n[-1]", "n[a-b]", "n[1-2-3]", "n[1-65537]", "n[1-2];n3"])
def test_hostlists_that_scontrol_refuses_are_refused(scontrol, text):
    assert scontrol("hostnames", text) is None
    with refusal(ValueError):
        expand_hostlist(text)
