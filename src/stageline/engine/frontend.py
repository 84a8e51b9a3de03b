"""Between those who ask and the core: queues requests, runs the engine, keeps outputs for whoever follows them.

One idea: whoever waits for an output runs the engine, and what comes for others meanwhile waits for them here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from stageline.clock import Clock
from stageline.engine.core import EngineCore
from stageline.engine.input_processor import InputProcessor
from stageline.engine.output_processor import OutputProcessor
from stageline.errors import RequestError, StagelineError
from stageline.outputs import OutputKind, RequestOutput
from stageline.sampling import SamplingParams

Prompt = str | list[int]


class Frontend:
    """One per engine; its callers take turns in one thread."""

    def __init__(self, core: EngineCore, inputs: InputProcessor, outputs: OutputProcessor, clock: Clock) -> None:
        self._core = core
        self._inputs = inputs
        self._outputs = outputs
        self._clock = clock
        self._unclaimed: dict[str, RequestOutput] = {}
        self._failures: dict[str, StagelineError] = {}
        self._abandoned: deque[str] = deque()
        self._next_request = itertools.count()

    def submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], kind: OutputKind) -> list[str]:
        """Queue all or none. Returns: the request ids. Raises: RequestError if one of them cannot be served."""
        self._forget_abandoned()
        prepared = []
        for index, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
            request_id = str(next(self._next_request))
            with errors_that_name_the_prompt(index, len(prompts)):
                engine_requests = self._inputs.process(request_id, prompt, its_params, self._clock.now_s())
            prepared.append((request_id, prompt, its_params, engine_requests))
        submitted: list[str] = []
        try:
            for index, (request_id, prompt, its_params, engine_requests) in enumerate(prepared):
                text = prompt if isinstance(prompt, str) else None
                token_ids = engine_requests[0].prompt_token_ids
                submitted.append(request_id)
                self._outputs.add(request_id, text, token_ids, its_params, engine_requests, kind)
                with errors_that_name_the_prompt(index, len(prompts)):
                    for engine_request in engine_requests:
                        self._core.add(engine_request)
        except BaseException:
            self.abort(submitted)
            raise
        return submitted

    def take(self, request_ids: set[str]) -> list[RequestOutput]:
        """New outputs of these requests: those kept for them, or else those of the engine's next step, perhaps none."""
        self._forget_abandoned()
        kept = [self._unclaimed.pop(request_id) for request_id in self._unclaimed.keys() & request_ids]
        return kept or self._step(request_ids)

    def take_failure(self, request_ids: Iterable[str]) -> tuple[str, StagelineError] | None:
        """The first of these requests that failed on its way, and why; told once."""
        for request_id in request_ids:
            if request_id in self._failures:
                return request_id, self._failures.pop(request_id)
        return None

    def _step(self, request_ids: set[str]) -> list[RequestOutput]:
        processed = self._outputs.process(self._core.step())
        for engine_request_id in processed.finished_early:
            self._core.abort(engine_request_id)
        for request_id, failure in processed.failures.items():
            self._unclaimed.pop(request_id, None)
            self._failures[request_id] = failure.error
            for engine_request_id in failure.unfinished:
                self._core.abort(engine_request_id)
        mine = []
        for output in processed.outputs:
            if output.request_id in request_ids:
                mine.append(output)
                continue
            missed = self._unclaimed.get(output.request_id)
            self._unclaimed[output.request_id] = output if missed is None else output.after(missed)
        return mine

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests that may be unfinished; nothing more is heard of them."""
        for request_id in request_ids:
            self._unclaimed.pop(request_id, None)
            self._failures.pop(request_id, None)
            for engine_request_id in self._outputs.abort(request_id):
                self._core.abort(engine_request_id)

    def abandon(self, request_ids: Iterable[str]) -> None:
        """End requests before the engine's next step; may be called in the middle of one."""
        self._abandoned.extend(request_ids)

    def _forget_abandoned(self) -> None:
        while self._abandoned:
            self.abort([self._abandoned.popleft()])


@contextmanager
def errors_that_name_the_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Say which of several prompts a RequestError is about."""
    try:
        yield
    except RequestError as error:
        if num_prompts == 1:
            raise
        raise RequestError(f"prompt {index + 1} of {num_prompts}: {error}", error.field) from error
