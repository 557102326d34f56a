"""Metrics of encoders: answers in a text, and the best sentence of a text."""

import itertools

import pytest
import torch

from headwater.config.models.encoder import ExtractiveSummarizationConfig, QuestionAnsweringConfig
from headwater.models.question_answering import answerable, best_spans
from headwater.models.registry import build_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "num_hidden_layers": 1,
    "filter_size": 40,
    "max_position_embeddings": 16,
}


def questions(generator):
    """Return questions of 3 tokens with texts of 3 to 10; separators may not be in an answer."""
    ids = torch.randint(5, 64, (6, 16), generator=generator)
    counts = torch.tensor([[9], [10], [11], [12], [15], [16]])
    places = torch.arange(16).expand(6, 16)
    mask = (places < counts).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": mask * (places >= 5)}


@pytest.mark.parametrize("longest", [1, 3, 30])
def test_best_answer_has_the_highest_score_of_all_spans(longest):
    generator = torch.Generator().manual_seed(3)
    batch = questions(generator)
    starts, ends = torch.randn(2, 6, 16, generator=generator)
    score, begin, end = best_spans(starts, ends, answerable(batch), longest)
    for row, count in enumerate(batch["attention_mask"].sum(1).tolist()):
        pairs = itertools.combinations_with_replacement(range(5, count - 1), 2)
        scores = {(a, b): (starts[row, a] + ends[row, b]).item() for a, b in pairs if b - a < longest}
        assert (int(begin[row]), int(end[row])) == max(scores, key=scores.get)
        assert score[row].item() == max(scores.values())


def test_f1_of_answers_counts_their_tokens():
    generator = torch.Generator().manual_seed(3)
    model = build_model(QuestionAnsweringConfig(name="bert/qa", **SIZES)).eval()
    batch = questions(generator)
    with torch.no_grad():
        _, begin, end = model.answers(batch)
        # One answer is right, one question has no answer, one end is wrong, the others are elsewhere.
        right = [
            (int(begin[0]), int(end[0])),
            (0, 0),
            (int(begin[2]), min(int(end[2]) + 1, 15)),
            *[(1, 2)] * 3,
        ]
        starts, ends = zip(*right, strict=True)
        model({**batch, "start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)})
    tokens = [set(range(a, b + 1)) for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
    pairs = [(found, set(range(a, b + 1))) for found, (a, b) in zip(tokens, right, strict=True) if a]
    shared = sum(len(found & wanted) for found, wanted in pairs)
    assert model.f1.compute() == pytest.approx(2 * shared / sum(len(a) + len(b) for a, b in pairs))
    assert model.scored["accuracy"].compute() == pytest.approx(1 / 5)


def test_best_sentence_ignores_padding():
    model = build_model(ExtractiveSummarizationConfig(name="bert/extractive_summarization", **SIZES)).eval()
    batch = questions(torch.Generator().manual_seed(3))
    batch["cls_indices"] = torch.tensor([[0, 3, 6, 0]]).expand(6, 4)
    batch["cls_weights"] = torch.tensor([[1, 1, 1, 0]]).expand(6, 4)
    with torch.no_grad():
        best = model.logits(batch)[:, :3].argmax(1)
        labels = torch.zeros(6, 4, dtype=torch.int64)
        labels[:, 3] = 1  # padding
        labels[range(4), best[:4]] = 1
        model({**batch, "cls_label": labels})
    assert model.scored["best_sentence"].compute() == pytest.approx(4 / 6)
