"""Documents to train on."""

from fsdp_helpers.data.text import docstring_documents


def test_documents_are_short_sorted_and_different():
    documents = docstring_documents(longest=100)
    assert documents == sorted(set(documents)) and len(documents) > 100
    lengths = [len(document.encode()) for document in documents]
    assert min(lengths) >= 8 and 90 < max(lengths) <= 100
    assert set(documents) < set(docstring_documents())
