"""Classes of the transformers library of every kind equal plain PyTorch, streamed with the fewest slabs.

`python -m benchmarks.transformers_walk` compares the whole library.
"""

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.transformers_walk.catalogue import entries
from benchmarks.transformers_walk.walk import walk

SAMPLE = (
    "MptModel",
    "ModernBertModel",
    "GPTNeoXModel",
    "VoxtralModel",
    "WhisperForCausalLM",
    "ModernBertDecoderForCausalLM",
    "GlmForCausalLM",
    "BloomForCausalLM",
    "ArceeForCausalLM",
    "MraForSequenceClassification",
    "AlbertForSequenceClassification",
    "MegatronBertForTokenClassification",
    "ViTMAEModel",
    "VivitModel",
    "VitDetModel",
    "SqueezeBertForMaskedLM",
    "FNetForMaskedLM",
    "CamembertForMultipleChoice",
    "ElectraForPreTraining",
    "Wav2Vec2ForSequenceClassification",
    "BloomForQuestionAnswering",
    "T5EncoderModel",
    "CLIPTextModel",
    "CLIPModel",
    "Idefics2ForConditionalGeneration",
    "ResNetBackbone",
    "ViTForImageClassification",
    "BertForNextSentencePrediction",
    "BlenderbotSmallForConditionalGeneration",
    "MarianMTModel",
    "ViltForQuestionAnswering",
    "MoonshineForConditionalGeneration",
    "UniSpeechSatForAudioFrameClassification",
    "HubertForCTC",
    "ViTForMaskedImageModeling",
    "Qwen2AudioForConditionalGeneration",
    "ImageGPTForCausalImageModeling",
    "TapasForQuestionAnswering",
    "TimesformerForVideoClassification",
    "YolosForObjectDetection",
)
BY_NAME = {entry.class_name: entry for entry in entries()}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_streamed_class_equals_plain_pytorch(name):
    outcome = walk(BY_NAME[name])
    assert outcome.built, outcome.reason
    assert outcome.equal, outcome.reason


def test_the_sample_has_forty_classes_of_most_kinds():
    assert len(set(SAMPLE)) == 40
    kinds = {BY_NAME[name].tasks[0] for name in SAMPLE}
    assert len(kinds) >= 25
