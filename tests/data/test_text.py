"""Text as bytes: cut into sequences, and each byte followed by its successor."""

import hashlib

import pytest

from fsdp_helpers.data.source import DataError
from fsdp_helpers.data.text import read_text, reference_text, text_dataset


def test_sequences_worked_by_hand(tmp_path):
    # 83 bytes, sequences of 4: 82 // 4 = 20 of them, of which the last 20 // 10 = 2 are for testing
    path = tmp_path / "letters"
    path.write_bytes(bytes(range(83)))
    dataset = text_dataset(read_text(str(path)), context=4)
    assert (len(dataset.train), len(dataset.test)) == (18, 2)
    assert dataset.train.images[1].tolist() == [4, 5, 6, 7]
    assert dataset.train.labels[1].tolist() == [5, 6, 7, 8]
    assert dataset.test.labels[-1].tolist() == [77, 78, 79, 80]
    first = text_dataset(read_text(str(path)), context=4, train_sequences=3, test_sequences=1)
    assert (len(first.train), len(first.test)) == (3, 1)


def test_a_text_is_known_by_its_digest(tmp_path):
    path = tmp_path / "letters"
    path.write_text("abc")
    assert read_text(str(path)).source == "text ba7816bf8f01"  # of the published SHA-256 of "abc"
    assert read_text().source == f"text {hashlib.sha256(reference_text().encode()).hexdigest()[:12]}"


def test_the_reference_text_is_english():
    text = reference_text()
    assert len(text) > 300_000
    assert "The following sections describe" in " ".join(text.split()) or "expression" in text


def test_a_text_that_cannot_be_read(tmp_path):
    with pytest.raises(
        DataError, match="nothing-here can't be read .No such file or directory.; give a readable file with"
    ):
        read_text(str(tmp_path / "nothing-here"))
