"""A pruned draft vocabulary: offsets, their mask, and ids in both directions."""

from __future__ import annotations

import pytest
import torch

from forerun.drafters.vocabulary import DraftVocabulary
from forerun.errors import ModelError, OptionError


def test_ck_1_a_stored_id_is_an_offset():
    """CK-1: D = 5 of V = 10, ids {1, 3, 4, 7, 9}: target id = i + d2t[i], t2d true exactly there.

    https://github.com/SafeAILab/EAGLE/issues/246
    """
    vocabulary = DraftVocabulary(10, torch.tensor([1, 3, 4, 7, 9]))
    maps = vocabulary.tensors()
    assert maps["d2t"].tolist() == [1, 2, 2, 4, 5]
    assert maps["d2t"].dtype == torch.int64
    assert maps["t2d"].nonzero()[:, 0].tolist() == [1, 3, 4, 7, 9]
    again = DraftVocabulary.of_offsets(10, maps["d2t"])
    assert torch.equal(again.kept, vocabulary.kept)


def test_ids_travel_both_ways():
    """Kept ids map to their place and back; others to -1, and to minus infinity in logits."""
    vocabulary = DraftVocabulary(10, torch.tensor([1, 3, 4, 7, 9]))
    assert vocabulary.to_draft(torch.arange(10)).tolist() == [-1, 0, -1, 1, 2, -1, -1, 3, -1, 4]
    logits = vocabulary.to_target(torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]]))
    assert logits[0, vocabulary.kept].tolist() == [5, 4, 3, 2, 1]
    assert (logits[0, [0, 2, 5, 6, 8]] == -torch.inf).all()


def test_a_full_vocabulary_has_no_maps_and_changes_nothing():
    vocabulary = DraftVocabulary(10)
    assert vocabulary.tensors() == {}
    assert vocabulary.draft_size == 10
    x = torch.randn(2, 10)
    assert vocabulary.to_target(x) is x


def test_the_most_frequent_ids_are_kept_and_ties_go_to_the_lower():
    counts = torch.tensor([5, 0, 9, 5, 5, 1])
    assert DraftVocabulary.most_frequent(counts, 3).kept.tolist() == [0, 2, 3]
    assert DraftVocabulary.most_frequent(counts, 6).kept is None
    with pytest.raises(OptionError, match="draft_vocab_size"):
        DraftVocabulary.most_frequent(counts, 7)


@pytest.mark.parametrize("kept", [[3, 1], [1, 1], [1, 10], [-1, 2], []])
def test_broken_maps_are_refused(kept):
    with pytest.raises(ModelError, match="d2t"):
        DraftVocabulary(10, torch.tensor(kept, dtype=torch.long))
