"""The fields of samples that were prepared for BERT and what is trained on top of it."""

from __future__ import annotations

from headwater.data.records import FieldSpec

_IDS = ("input_ids",)
_MASK = ("attention_mask", "input_mask")


def segment_field(length: int, segments: int) -> FieldSpec:
    """Which text of a sample each token is of.

    Args:
        length: tokens of a sample.
        segments: texts that the model tells apart; 0 if none.
    """
    return FieldSpec(
        "token_type_ids",
        ("token_type_ids", "segment_ids"),
        (length,),
        default=0,
        below=segments or None,
        remedy=f"write num_segments: {segments + 1} in the model's section, or prepare single texts "
        "(--no-sentence_pairs)",
    )


def masked_text_fields(
    length: int,
    predictions: int,
    *,
    vocab_size: int,
    pad: int,
    segments: int,
    next_sentence: bool,
    spans: bool,
) -> list[FieldSpec]:
    """Fields of texts whose masked tokens are to be guessed.

    Args:
        length: tokens of a sample.
        predictions: tokens that are guessed at most.
        vocab_size: number above every token.
        pad: token that fills samples up.
        segments: texts of a sample that the model tells apart; 0 if none.
        next_sentence: whether the second follows the first is to be learnt.
        spans: several texts lie in a sample.
    """
    fields = [
        FieldSpec("input_ids", _IDS, (length,), fill=pad, below=vocab_size),
        FieldSpec("attention_mask", _MASK, (length,)),
        FieldSpec("masked_lm_positions", ("masked_lm_positions",), (predictions,), below=length),
        FieldSpec("masked_lm_ids", ("masked_lm_ids",), (predictions,), below=vocab_size),
        FieldSpec("masked_lm_weights", ("masked_lm_weights", "masked_lm_mask"), (predictions,)),
    ]
    if segments:
        fields.append(segment_field(length, segments))
    if next_sentence:
        names = ("next_sentence_label", "next_sentence_labels", "is_random_next")
        fields.append(FieldSpec("next_sentence_label", names))
    if spans:
        fields += [FieldSpec(name, (name,), (length,)) for name in ("attention_span", "position_ids")]
    return fields


def class_fields(length: int, *, vocab_size: int, pad: int, segments: int) -> list[FieldSpec]:
    """Return the fields of texts with a class each.

    Args:
        length: tokens of a sample.
        vocab_size: number above every token.
        pad: token that fills samples up.
        segments: texts of a sample that the model tells apart; 0 if none.
    """
    fields = [
        FieldSpec("input_ids", _IDS, (length,), fill=pad, below=vocab_size),
        FieldSpec("attention_mask", _MASK, (length,)),
        FieldSpec("labels", ("labels", "label")),
    ]
    return [*fields, segment_field(length, segments)] if segments else fields


def answer_fields(length: int, *, vocab_size: int, segments: int) -> list[FieldSpec]:
    """Return the fields of questions with texts, and of the first and last tokens of the answers.

    Args:
        length: tokens of a question with its text.
        vocab_size: number above every token.
        segments: texts of a sample that the model tells apart; 0 if none.
    """
    ends = "prepare the windows for this max_sequence_length"
    places = [
        FieldSpec(f"{end}_positions", (f"{end}_positions", f"{end}_position"), below=length, remedy=ends)
        for end in ("start", "end")
    ]
    return [
        FieldSpec("input_ids", _IDS, (length,), below=vocab_size),
        FieldSpec("attention_mask", _MASK, (length,)),
        segment_field(length, segments),
        *places,
    ]


def sentence_fields(length: int, sentences: int, *, vocab_size: int, segments: int) -> list[FieldSpec]:
    """Fields of texts whose sentences are chosen for a summary.

    Args:
        length: tokens of a sample.
        sentences: of a text at most.
        vocab_size: number above every token.
        segments: texts of a sample that the model tells apart; 0 if none.
    """
    return [
        FieldSpec("input_ids", _IDS, (length,), below=vocab_size),
        FieldSpec("attention_mask", _MASK, (length,)),
        segment_field(length, segments),
        FieldSpec("cls_indices", ("cls_indices", "cls_token_indices"), (sentences,), below=length),
        FieldSpec("cls_label", ("cls_label", "labels"), (sentences,)),
        FieldSpec("cls_weights", ("cls_weights", "cls_mask"), (sentences,)),
    ]


def retrieval_fields(
    question_length: int, passage_length: int, passages: int, *, vocab_sizes: tuple[int, int]
) -> list[FieldSpec]:
    """Fields of questions and passages.

    Args:
        question_length: tokens of a question.
        passage_length: tokens of a passage.
        passages: of a question, the right one first.
        vocab_sizes: numbers above every token of questions and of passages.
    """
    fields = []
    kinds = (("questions", (question_length,)), ("ctx", (passages, passage_length)))
    for (kind, length), vocab_size in zip(kinds, vocab_sizes, strict=True):
        fields += [
            FieldSpec(f"{kind}_input_ids", (f"{kind}_input_ids",), length, below=vocab_size),
            FieldSpec(f"{kind}_attention_mask", (f"{kind}_attention_mask",), length),
            FieldSpec(f"{kind}_token_type_ids", (f"{kind}_token_type_ids",), length, default=0),
        ]
    return fields


def preference_fields(length: int, *, vocab_size: int) -> list[FieldSpec]:
    """Fields of prompts with a preferred and another answer.

    Args:
        length: tokens of a prompt with its answer.
        vocab_size: number above every token.
    """
    fields = []
    for side in ("chosen", "rejected"):
        fields += [
            FieldSpec(f"{side}_input_ids", (f"{side}_input_ids",), (length,), below=vocab_size),
            FieldSpec(f"{side}_labels", (f"{side}_labels",), (length,), fill=-100, below=vocab_size),
        ]
    return fields
