"""The saved language model: small, complete, and what its record says."""

import hashlib
import json
from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F
from pretrained import KEPT, kept_shape, load_hugging_face

from fsdp_helpers.models.llama import Llama

CONTEXT, TEST_PART = 128, 10  # bytes in a sequence; the last tenth of the sequences was for testing


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((KEPT / "record.json").read_text())


def kept_model() -> Llama:
    model = Llama(kept_shape())
    load_hugging_face(model, KEPT)
    return model


@pytest.mark.tools
def test_transformers_reads_it_as_the_kept_record_says():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[tools]'")
    kept = json.loads((KEPT / "transformers.json").read_text())
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(KEPT).eval(), kept_model()
    numbers = torch.tensor([list(kept["text"].encode())])
    with torch.no_grad():
        assert torch.allclose(theirs(numbers).logits, ours(numbers), rtol=0, atol=1e-5)
        said = theirs.generate(numbers, max_new_tokens=60, do_sample=False, pad_token_id=0)[0].tolist()
    assert bytes(said).decode(errors="replace") == kept["continued"]


def test_it_predicts_as_its_record_says(record):
    """On the text of the record, Python's own reference, which other versions of Python do not have."""
    content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    source = f"text {hashlib.sha256(content).hexdigest()[:12]}"
    if source != record["data_source"]:
        pytest.skip(f"this Python has {source}; the record is of {record['data_source']}")
    num_sequences = (len(content) - 1) // CONTEXT  # the last byte is only a target
    numbers = torch.tensor(list(content[: num_sequences * CONTEXT + 1]))
    first = num_sequences - num_sequences // TEST_PART
    inputs, targets = (part.view(-1, CONTEXT)[first:] for part in (numbers[:-1], numbers[1:]))
    model, losses, correct = kept_model(), [], []
    with torch.no_grad():
        for tokens, wanted in zip(inputs.split(50), targets.split(50), strict=True):
            logits = model(tokens)
            losses.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none"))
            correct.append((logits.argmax(dim=-1) == wanted).flatten())
    last = record["epochs"][-1]
    found = torch.cat(losses).mean().item(), torch.cat(correct).float().mean().item()
    assert found == pytest.approx((last["test_loss"], last["test_accuracy"]), abs=1e-4)
