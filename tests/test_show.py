import torch
from IPython.display import Markdown

from fsdp_helpers import show
from fsdp_helpers.lessons import FlatUnit, show_all_reduce
from fsdp_helpers.wrapping import size_policy


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
