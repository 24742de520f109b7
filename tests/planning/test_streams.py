"""Two queues of a GPU, worked out by hand."""

from fsdp_helpers.planning.streams import ARITHMETIC, AT_END, COMMUNICATION, COPIES, Task, run_tasks, step_spans

SECONDS = {"forward_s": 2.0, "gather_s": 1.0, "reduce_s": 1.0}


def stretches(spans, queue):
    return [(span.op, span.unit, span.start_s, span.end_s) for span in spans if span.queue == queue]


def test_gathers_asked_for_early_hide_behind_arithmetic():
    spans = step_spans(2, **SECONDS, prefetch=True)
    # Each forward takes 2 s, each backward 4 s; they follow one another without a gap.
    assert stretches(spans, ARITHMETIC) == [
        ("forward", 0, 1.0, 3.0),
        ("forward", 1, 3.0, 5.0),
        ("backward", 1, 5.0, 9.0),
        ("backward", 0, 9.0, 13.0),
    ]
    # Each gather is issued when the arithmetic before it begins. What does not hide: the first gather, 1 s, and
    # the last reduction, 1 s.
    assert stretches(spans, COMMUNICATION) == [
        ("all_gather", 0, 0.0, 1.0),
        ("all_gather", 1, 1.0, 2.0),
        ("all_gather", 1, 3.0, 4.0),
        ("all_gather", 0, 5.0, 6.0),
        ("reduce_scatter", 1, 9.0, 10.0),
        ("reduce_scatter", 0, 13.0, 14.0),
    ]


def test_gathers_asked_for_late_leave_a_gap_each():
    spans = step_spans(2, **SECONDS, prefetch=False)
    # 12 s of arithmetic, four gathers of 1 s, and the last reduction
    assert stretches(spans, ARITHMETIC) == [
        ("forward", 0, 1.0, 3.0),
        ("forward", 1, 4.0, 6.0),
        ("backward", 1, 7.0, 11.0),
        ("backward", 0, 12.0, 16.0),
    ]
    assert stretches(spans, COMMUNICATION)[-2:] == [
        ("reduce_scatter", 1, 12.0, 13.0),
        ("reduce_scatter", 0, 16.0, 17.0),
    ]


def test_a_link_slower_than_the_arithmetic_cannot_hide():
    spans = step_spans(2, forward_s=1.0, gather_s=3.0, reduce_s=3.0, prefetch=True)
    # gathers 0-3, 3-6, 6-9, 9-12; backward of unit 1 at 9-11, of unit 0 from 12 on; reductions 12-15 and 15-18
    assert stretches(spans, ARITHMETIC)[-2:] == [("backward", 1, 9.0, 11.0), ("backward", 0, 12.0, 14.0)]
    assert max(span.end_s for span in spans) == 18.0


def test_one_reduction_is_under_way_at_a_time():
    units = ("c", "b", "a")
    backward = [Task(queue=ARITHMETIC, op="backward", unit=unit) for unit in units]
    reduce = [Task(queue=COMMUNICATION, op="reduce_scatter", unit=unit, issued=AT_END) for unit in units]
    tasks = [task for pair in zip(backward, reduce, strict=True) for task in pair]
    spans = run_tasks(tasks, lambda task: 2.0 if task.op == "backward" else 9.0)
    # c is reduced from 2 to 11; b computes meanwhile, but a waits until that has ended
    assert [start_s for _, _, start_s, _ in stretches(spans, ARITHMETIC)] == [0.0, 2.0, 11.0]


def test_shards_are_added_up_over_the_copies_once_they_are_complete():
    backward = Task(queue=ARITHMETIC, op="backward", unit="a")
    reduce = Task(queue=COMMUNICATION, op="reduce_scatter", unit="a", issued=AT_END)
    add_up = Task(queue=COPIES, op="all_reduce", unit="a", issued=AT_END)
    spans = run_tasks(
        [backward, reduce, add_up], lambda task: {"backward": 2.0, "reduce_scatter": 3.0}.get(task.op, 1.0)
    )
    assert [(span.start_s, span.end_s) for span in spans] == [(0.0, 2.0), (2.0, 5.0), (5.0, 6.0)]
