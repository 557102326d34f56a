"""Fields of prepared samples: for BERT, for models fine-tuned from it, for retrieval and for DPO."""

from __future__ import annotations

from headwater.core.batches import IGNORED
from headwater.data.records import FieldSpec

_IDS = ("input_ids",)
_MASK = ("attention_mask", "input_mask")


def segment_field(length: int, segments: int) -> FieldSpec:
    """Return the field of token types: the index of the text in the sample that each token belongs to.

    Args:
        length: tokens per sample.
        segments: number of token types of the model; 0: any number.
    """
    return FieldSpec(
        "token_type_ids",
        ("token_type_ids", "segment_ids"),
        (length,),
        default=0,
        below=segments or None,
        remedy=f"set num_segments: {segments + 1} in the model's section, or prepare single texts "
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
    """Return the fields of texts with masked tokens to predict.

    Args:
        length: tokens per sample.
        predictions: maximum number of predicted tokens of a sample.
        vocab_size: all token ids must be below this number.
        pad: id of the padding token.
        segments: number of token types of the model; 0: without token types.
        next_sentence: include the label of next sentence prediction.
        spans: include the fields that keep packed texts apart.
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


def class_fields(
    length: int, *, vocab_size: int, pad: int, segments: int, num_labels: int | None = None
) -> list[FieldSpec]:
    """Return the fields of texts with one class each.

    Args:
        length: tokens per sample.
        vocab_size: all token ids must be below this number.
        pad: id of the padding token.
        segments: number of token types of the model; 0: without token types.
        num_labels: number of classes; `None`: labels are numbers of any size.
    """
    classes = "set num_labels of the model to the number of classes in the data"
    fields = [
        FieldSpec("input_ids", _IDS, (length,), fill=pad, below=vocab_size),
        FieldSpec("attention_mask", _MASK, (length,)),
        FieldSpec("labels", ("labels", "label"), below=num_labels, remedy=classes),
    ]
    return [*fields, segment_field(length, segments)] if segments else fields


def answer_fields(length: int, *, vocab_size: int, segments: int) -> list[FieldSpec]:
    """Return the fields of questions with contexts, and of the first and last token of each answer.

    Args:
        length: tokens of a question with its context.
        vocab_size: all token ids must be below this number.
        segments: number of token types of the model; 0: any number.
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
    """Return the fields of texts for extractive summarization.

    Args:
        length: tokens per sample.
        sentences: maximum sentences of a text.
        vocab_size: all token ids must be below this number.
        segments: number of token types of the model; 0: any number.
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
    """Return the fields of questions and their passages.

    Args:
        question_length: tokens of a question.
        passage_length: tokens of a passage.
        passages: passages of a question; the first one is the right one.
        vocab_sizes: vocabularies of the encoders of questions and of passages.
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
    """Return the fields of prompts with a chosen and a rejected answer.

    Args:
        length: tokens of a prompt with its answer.
        vocab_size: all token ids must be below this number.
    """
    fields = []
    for side in ("chosen", "rejected"):
        fields += [
            FieldSpec(f"{side}_input_ids", (f"{side}_input_ids",), (length,), below=vocab_size),
            FieldSpec(f"{side}_labels", (f"{side}_labels",), (length,), fill=IGNORED, below=vocab_size),
        ]
    return fields
