"""accelerate on CPU ranks says what the saved record says, and without it the record is shown as what it is."""

import importlib.util
import json

import pytest
from leftovers import PROJECT

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import with_accelerate

KEPT = PROJECT / "notebooks" / "reference" / "accelerate.json"


def test_without_accelerate_the_record_is_shown_and_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(with_accelerate, "launch", None)  # nothing is started
    answer = with_accelerate.ask_accelerate(KEPT)
    assert answer["source"].startswith("saved output, ") and "isn't installed here" in answer["source"]
    assert answer["model_is_a"] == "DistributedDataParallel" and not answer["plugin_in_use"]


def test_the_record_has_the_losses_of_plain_torch():
    plain = launch(with_accelerate.train_with_plain_torch, world_size=2, device="cpu", timeout_s=240, progress=False)[0]
    record = json.loads(KEPT.read_text())
    assert record["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    # 204,938 parameters; of one with an odd number of rows rank 0 has one row more
    assert record["parameter_bytes"] == 4 * 204_938 and plain["parameter_bytes"] == 416_148


@pytest.mark.tools
def test_with_accelerate_it_says_the_same():
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[tools]'")
    answer = with_accelerate.ask_accelerate(KEPT)
    record = json.loads(KEPT.read_text())
    assert answer.pop("source") == "run here"
    assert answer["losses"] == pytest.approx(record["losses"], abs=1e-5)
    same = ("distributed_type", "model_is_a", "plugin_in_use", "parameter_bytes", "bf16_policy")
    assert {name: answer[name] for name in same} == {name: record[name] for name in same}
