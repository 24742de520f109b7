import torch
from IPython.display import Markdown

from fsdp_helpers.sharding.wrapping import size_policy
from fsdp_helpers.teaching import show
from fsdp_helpers.teaching.by_hand import FlatUnit
from fsdp_helpers.teaching.probes import show_all_reduce


def test_source_of_functions_and_methods():
    shown = show.source(size_policy, FlatUnit.gather, show_all_reduce)
    assert isinstance(shown, Markdown)
    assert shown.data.startswith("```python\ndef size_policy(min_num_params: int) -> Policy:\n")
    assert "\n\n\ndef gather(self) -> None:\n    " in shown.data  # a method starts at the left margin too
    assert shown.data.endswith("return before, values.tolist()\n```")


def test_table():
    shown = show.table(["strategy", "MB", "ratio"], [["ddp", 24.0, 1.0], ["fsdp", 9.6, None]])
    assert shown.data.splitlines() == [
        "| strategy | MB | ratio |",
        "| :-- | --: | --: |",
        "| ddp | 24.0 | 1.0 |",
        "| fsdp | 9.6 | None |",
    ]


def test_machine():
    shown = show.machine("cpu", 2, "Data: the digits.").data
    assert f"torch {torch.__version__}. 2 rank(s) on CPU with " in shown
    assert shown.endswith("Data: the digits.")
