"""Answers of models that fill in mask tokens, such as BERT."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

from headwater.core.errors import DataError, HeadwaterError, RunError
from headwater.generation.fill_mask import Filling, MaskedText, MaskFiller
from headwater.serving.answer import Answer
from headwater.serving.schemas import CardRequest

logger = logging.getLogger(__name__)

_TOP_K = 5
"""Tokens for each place, if the request names no number; that of the transformers library."""

Fillings = list[list[list[Filling]]]
"""Likely tokens: for each text, for each of its places."""


@dataclasses.dataclass(frozen=True)
class _Job:
    """Texts of one request."""

    texts: list[MaskedText]
    top_k: int
    future: Future[Fillings]


@final
class FillWorker:
    """Fills in masks on a separate thread. Requests that wait are computed together, in one pass.

    Args:
        filler: fills in masks. Only the worker's thread computes with it.
        name: name of the thread.

    Attributes:
        filler: see above.
        error: the error that ended the worker; `None` while it works.
    """

    used_cache_tokens = cache_limit_tokens = 0

    def __init__(self, filler: MaskFiller, name: str) -> None:
        self.filler = filler
        self.error: HeadwaterError | None = None
        self._lock = threading.Lock()
        self._new: list[_Job] = []
        self._active = 0
        self._thread = ThreadPoolExecutor(1, name)

    @property
    def max_length(self) -> int:
        """Most tokens of a text."""
        return self.filler.max_length

    @property
    def passes(self) -> int:
        """Passes over the weights so far."""
        return self.filler.passes

    @property
    def active(self) -> int:
        """Number of texts that are computed."""
        return self._active

    @property
    def waiting(self) -> int:
        """Number of texts that wait for the next pass."""
        with self._lock:
            return sum(len(job.texts) for job in self._new)

    def submit(self, texts: list[MaskedText], top_k: int) -> Future[Fillings]:
        """Put texts into the queue. The future has `MaskFiller.fill` of them.

        Raises:
            HeadwaterError: if the worker has ended.
        """
        if self.error is not None:
            raise self.error
        job = _Job(texts, top_k, Future())
        with self._lock:
            self._new.append(job)
        self._thread.submit(self._fill_waiting)
        return job.future

    def close(self) -> None:
        """Cancel the texts that wait, and end the thread."""
        self.error = RunError("the server is stopping", remedy="send the request again later")
        with self._lock:
            new, self._new = self._new, []
        for job in new:
            job.future.cancel()
        self._thread.shutdown()

    def _fill_waiting(self) -> None:
        with self._lock:
            jobs, self._new = self._new, []
        jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
        if not jobs:
            return  # an earlier call has computed them
        texts = [text for job in jobs for text in job.texts]
        self._active = len(texts)
        try:
            found = self.filler.fill(texts, max(job.top_k for job in jobs))
        except HeadwaterError as error:
            self._fail(jobs, error)
            return
        except Exception as error:
            logger.exception("filling in masks failed")
            remedy = "see the log of the server, and restart it"
            self._fail(jobs, RunError(f"filling in masks failed: {error!r}", remedy=remedy))
            return
        finally:
            self._active = 0
        start = 0
        for job in jobs:
            mine = found[start : start + len(job.texts)]
            start += len(job.texts)
            job.future.set_result([[place[: job.top_k] for place in text] for text in mine])

    def _fail(self, jobs: list[_Job], error: HeadwaterError) -> None:
        """End the worker with an error."""
        self.error = error
        for job in jobs:
            job.future.set_exception(error)


@dataclasses.dataclass(frozen=True)
class ServedFiller:
    """A model that fills in mask tokens.

    Attributes:
        name: its name in requests.
        worker: computes.
        created: seconds since 1970 at which the server opened it.
        source: the folder of its weights, and its checkpoint.
    """

    name: str
    worker: FillWorker
    created: int
    source: str


@final
class FillAnswer(Answer):
    """An answer in the JSON of the model card: for each text, the likely tokens at its masked place.

    A text with several places has a list for each of them.
    """

    num_tokens = 0

    def __init__(self, model: ServedFiller, body: CardRequest) -> None:
        refused = sorted(body.params.model_fields_set - {"top_k"})
        if refused:
            raise DataError(
                f"{refused[0]} has no effect on {model.name}, which fills in mask tokens",
                where="params",
                remedy="send only input_data and top_k",
            )
        self._texts = [model.worker.filler.read(text) for text in body.input_data]
        super().__init__(model.name, len(self._texts), sum(len(text.tokens) for text in self._texts))
        self._worker = model.worker
        self._top_k = body.params.top_k or _TOP_K
        self._future: Future[Fillings] | None = None

    def begin(self) -> None:
        self._future = self._worker.submit(self._texts, self._top_k)

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()

    async def body(self) -> Any:
        assert self._future is not None, "begin comes first"
        found = await asyncio.wrap_future(self._future)
        lists = [[[dataclasses.asdict(each) for each in place] for place in text] for text in found]
        return [text[0] if len(text) == 1 else text for text in lists]
