"""A run in a few lines of text."""

from dataclasses import replace

from runs import tiny_record

from fsdp_helpers.cli.printing import print_summary


def test_held_and_peak_bytes_stand_where_they_belong(capsys):
    record = tiny_record()
    print_summary(replace(record, ranks=(replace(record.ranks[0], held_bytes=1_000, peak_bytes=2_000),)))
    assert "held 1.00 kB, peak 2.00 kB" in capsys.readouterr().out
