"""Requests in JSON: those of OpenAI's API, and those of the public model card of Cerebras-GPT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from headwater.generation.beams import LARGEST_NUM_BEAMS, LARGEST_PENALTY, BeamSearch

Probability = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1)]
NewTokens = Annotated[int, Field(ge=0)]
"""Most tokens of a text; 0: only the prompt, or an empty text."""
Token = Annotated[int, Field(ge=0)]
NgramSize = Annotated[int, Field(ge=0, le=100)]
MOST_KEYS = 100
"""Most keys of one object: each unknown key is an error, and all errors are in memory at once."""

Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]

# A list of many wrong values is one error: each error takes memory.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]

LARGEST_N = 64
"""Most texts of one prompt."""
MOST_TEXTS = 1024
"""Most texts of one request."""


class Section(BaseModel):
    """A JSON object with known keys. Strings are not converted to numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            raise ValueError(f"expected at most {MOST_KEYS} keys, got {len(value)}")
        return value


def known_keys(schema: type[Section], path: Sequence[int | str]) -> list[str]:
    """Return the keys of an object in a request.

    Args:
        schema: the keys of the request.
        path: the keys that lead to the object. pydantic puts numbers and names of types between them.
    """
    for part in path:
        field = schema.model_fields.get(str(part))
        schema = schema if field is None else next(_sections(field.annotation), schema)
    return list(schema.model_fields)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Yield the objects that an annotation names, such as `list[ChatMessage]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for each in get_args(annotation):
        yield from _sections(each)


class StreamOptions(Section):
    """Settings of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(Section):
    """The format of an answer; only plain text is supported."""

    type: Literal["text"] = "text"


class BeamSettings(Section):
    """The keys of a beam search, with the names of the transformers library."""

    num_beams: Annotated[int, Field(ge=1, le=LARGEST_NUM_BEAMS)] = 1
    early_stopping: bool | Literal["never"] = False
    length_penalty: Annotated[float, Field(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)] = 1.0
    no_repeat_ngram_size: NgramSize = 0

    @property
    def beams(self) -> BeamSearch | None:
        """The settings of the beam search; `None` without one."""
        if self.num_beams == 1:
            return None
        return BeamSearch(self.num_beams, self.early_stopping, self.length_penalty, self.no_repeat_ngram_size)

    def refuse_with_beams(self, **found: object) -> None:
        """Raise `ValueError` if beam search is requested with a setting that it does not support."""
        named = [name for name, value in found.items() if value]
        if self.num_beams > 1 and named:
            raise ValueError(
                f"beam search (num_beams {self.num_beams}) does not support {named[0]}; remedy: remove it"
            )


class TextSettings(BeamSettings):
    """The keys that completions and chat completions have in common."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=LARGEST_N)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted because clients send them; only values without effect are valid.
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    # Accepted and ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _one_text_of_beams(self) -> Self:
        self.refuse_with_beams(temperature=self.temperature, n=self.n is not None and self.n > 1)
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(TextSettings):
    """The body of `/v1/completions`."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: NewTokens | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: Annotated[str, StringConstraints(max_length=0)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    @property
    def count(self) -> int:
        """Number of texts to write."""
        return len(self.prompts) * (self.n or 1)

    @model_validator(mode="after")
    def _supported(self) -> CompletionRequest:
        self.refuse_with_beams(logprobs=self.logprobs is not None)
        if self.echo and self.logprobs is not None:
            raise ValueError(
                "echo with logprobs is not supported, because the prompt has no log-probabilities; "
                "remedy: remove one of them"
            )
        if self.best_of not in (None, 1, self.n):
            raise ValueError(
                f"expected best_of to be 1 or n ({self.n or 1}), got {self.best_of}; remedy: remove it"
            )
        return self

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if isinstance(value, list) and not value:
            raise ValueError("expected at least one prompt")
        return value


class ContentPart(Section):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Section):
    """A message of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]
    name: str | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        """The text of the message."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(TextSettings):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _supported(self) -> ChatRequest:
        self.refuse_with_beams(logprobs=self.logprobs)
        return self

    @property
    def count(self) -> int:
        """Number of texts to write."""
        return self.n or 1


class CardSettings(BeamSettings):
    """The key `params` of a request in the JSON of the Cerebras-GPT model card."""

    max_new_tokens: NewTokens = 100
    do_sample: bool = False
    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Field(ge=0)] | None = None
    return_full_text: bool = True
    seed: int | None = None

    @model_validator(mode="after")
    def _beams_draw_nothing(self) -> CardSettings:
        self.refuse_with_beams(do_sample=self.do_sample)
        return self


class CardRequest(Section):
    """A request in the JSON of the Cerebras-GPT model card, with the further key `model`."""

    input_data: Annotated[Texts, Field(min_length=1, max_length=MOST_TEXTS)]
    params: CardSettings = CardSettings()
    model: str | None = None

    @property
    def count(self) -> int:
        """Number of texts to write."""
        return len(self.input_data)
