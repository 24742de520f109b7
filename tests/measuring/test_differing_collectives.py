"""Two ranks part: where, found in traces of their collectives, also where a rank never came back."""

from fsdp_helpers.measuring.differing_collectives import Divergence, compare_collectives, describe
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.failures.gallery import trace_broken


def event(op, size):
    return Collective(op=op, bytes=size, sent_bytes=0, start_s=0.0, end_s=1.0)


def test_equal_traces_agree_whatever_their_times():
    late = Collective(op="all_gather", bytes=8, sent_bytes=4, start_s=7.0, end_s=9.0)
    assert compare_collectives([[event("all_gather", 8)], [late]]) is None
    assert compare_collectives([]) is None and compare_collectives([[], []]) is None


def test_a_different_kind_a_different_size_and_an_end():
    common = event("all_gather", 8)
    kind = compare_collectives([[common, event("all_reduce", 4)], [common, event("all_gather", 4)]])
    assert kind.position == 1 and [one.op for one in kind.collectives] == ["all_reduce", "all_gather"]
    size = compare_collectives([[event("all_reduce", 4)], [event("all_reduce", 40)], [event("all_reduce", 4)]])
    assert size.position == 0 and [one.bytes for one in size.collectives] == [4, 40, 4]
    assert compare_collectives([[common], [common, common]]) == Divergence(1, (None, common))


def test_in_words():
    assert describe(None) == "no further collective" and describe(event("all_reduce", 4_000)) == "all_reduce of 4.00 kB"
    text = str(Divergence(2, (event("all_gather", 16), None)))
    assert (
        text
        == "2 collectives in common, then the ranks diverge:\nrank 0: all_gather of 16 B\nrank 1: no further collective"
    )


def test_the_trace_of_ranks_that_hang():
    """Rank 0 reduces four bytes while rank 1 gathers two times eight; both never come back."""
    found = compare_collectives(trace_broken("hang-order"))
    assert found.position == 0
    assert [(one.op, one.bytes) for one in found.collectives] == [("all_reduce", 4), ("all_gather", 16)]
