"""Documents: batches, padding, and the folder on disk."""

import json

import numpy as np
import pytest

from eagle_fsd.data.documents import Documents


def of(*documents: list[int]) -> Documents:
    """Documents of which all but the first token is learned."""
    return Documents.of([(ids, [i > 0 for i in range(len(ids))]) for ids in documents])


def test_collation_pads_at_the_end_and_learns_nothing_there():
    documents = Documents.of([([1, 5, 6, 7], [False, False, True, True]), ([1, 8], [False, True]),
                              ([1, 9, 9], [False, False, True])])
    tokens, learned = documents.collate(np.array([1, 0]))
    assert tokens.tolist() == [[1, 8, 0, 0], [1, 5, 6, 7]]
    assert learned.tolist() == [[False, True, False, False], [False, False, True, True]]


def test_packed_documents_follow_each_other():
    tokens, learned = of([1, 5, 6], [1, 8], [1, 9]).pack(np.array([2, 0]))
    assert tokens.tolist() == [1, 9, 1, 5, 6] and tokens.dtype == np.int64
    assert learned.tolist() == [False, True, False, True, True]


def test_batches_hold_every_document_once_within_their_size():
    rng = np.random.default_rng(0)
    documents = of(*([1] * int(n) for n in rng.integers(2, 60, 9000)))
    lengths = documents.lengths
    batches = documents.batches(600, seed=1)
    assert sorted(np.concatenate(batches).tolist()) == list(range(9000))
    assert all(lengths[batch].max() * len(batch) <= 600 for batch in batches)
    assert sum(lengths[batch].max() * len(batch) for batch in batches) < 1.05 * lengths.sum()  # little padding
    assert all((a == b).all() for a, b in zip(batches, documents.batches(600, seed=1), strict=True))


def test_documents_are_saved_and_mapped_back(tmp_path):
    documents = of([1, 5], [1, 6, 151_000])
    documents.save(tmp_path / "text", {"source": "test"})
    back = Documents.load(tmp_path / "text")
    assert isinstance(back.tokens, np.memmap)
    assert back.digest() == documents.digest() != of([1, 5], [1, 6, 8]).digest()
    tokens, learned = back.collate(np.array([0, 1]))
    assert tokens.tolist() == [[1, 5, 0], [1, 6, 151_000]]
    assert learned.tolist() == [[False, True, False], [False, True, True]]
    assert [a.tolist() for a in back.document(1)] == [[1, 6, 151_000], [False, True, True]]
    assert json.loads((tmp_path / "text" / "summary.json").read_text()) == {
        "source": "test", "documents": 2, "tokens": 5, "learned_tokens": 3, "longest": 3,
    }


def test_only_a_dataset_is_replaced(tmp_path):
    of([1, 5]).save(tmp_path / "data")
    of([1, 6, 7]).save(tmp_path / "data")
    assert len(Documents.load(tmp_path / "data").tokens) == 3
    for name in ("data", "mine"):  # a dataset with something else in its folder, and a folder that is none
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "notes.txt").write_text("keep")
        with pytest.raises(ValueError, match="contains notes.txt"):
            of([1, 5]).save(tmp_path / name)
        assert (tmp_path / name / "notes.txt").read_text() == "keep"


def test_what_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it needs tokens, learned, ends.npy"):
        Documents.load(tmp_path)
    of([1, 5]).save(tmp_path / "text")
    np.save(tmp_path / "text" / "learned.npy", np.zeros(1, bool))
    with pytest.raises(ValueError, match="damaged"):
        Documents.load(tmp_path / "text")
    with pytest.raises(ValueError, match="at least one"):
        Documents.of([])
