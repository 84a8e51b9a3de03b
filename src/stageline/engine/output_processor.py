"""From the engine's news (tokens) to what a user reads (text), completion by completion.

One idea: a completion's text only grows. Each token is decoded once and looked at once for stop strings; what may be
the beginning of a stop string, or half a character, is held back until it is decided. Where nobody reads or searches
the text before the end, all of it is decoded there in one go, which costs a fifth.

What has not been asked for yet is kept here as tokens and text, so a reader who is late gets it all in one output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stageline.clock import Clock, MonotonicClock
from stageline.engine.input_processor import Tokenizer
from stageline.engine.stop_strings import StopStringScanner
from stageline.errors import StagelineError
from stageline.outputs import CompletionOutput, FinishReason, Logprob, OutputKind, RequestOutput, RequestTimings
from stageline.request import EngineRequest, RequestUpdate
from stageline.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Failure:
    """One completion of a user request failed, and with it the request, which is forgotten.

    Args:
        unfinished: its other engine requests that are still running, for the engine to abort.
    """

    error: StagelineError
    unfinished: list[str]


@dataclass(frozen=True)
class Changes:
    """What some updates changed.

    Args:
        request_ids: user requests that now have something to tell.
        finished_early: engine requests that a stop string ended; the engine does not know and has to abort them.
        failures: user requests that failed.
    """

    request_ids: list[str]
    finished_early: list[str]
    failures: dict[str, Failure] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessedOutputs:
    """What some updates came to.

    Args:
        outputs: one per user request that changed.
        finished_early: engine requests that a stop string ended; the engine does not know and has to abort them.
        failures: user requests that failed.
    """

    outputs: list[RequestOutput]
    finished_early: list[str]
    failures: dict[str, Failure] = field(default_factory=dict)


class OutputProcessor:
    """Keeps the text of every live request.

    Args:
        tokenizer: turns tokens into text.
        clock: the engine's; it tells when a stop string ended a completion.
    """

    def __init__(self, tokenizer: Tokenizer, clock: Clock | None = None) -> None:
        self._tokenizer = tokenizer
        self._clock = clock or MonotonicClock()
        self._requests: dict[str, _UserRequest] = {}
        self._owners: dict[str, _UserRequest] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._owners)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        engine_requests: list[EngineRequest],
        kind: OutputKind = OutputKind.CUMULATIVE,
        label: str | None = None,
    ) -> None:
        """Expect updates of these engine requests: the completions of one user request, in order.

        Args:
            kind: what its outputs shall hold. The fuller they are, the more is copied.
            label: what its outputs call it; None for the request id.
        """
        completions = {
            one.request_id: _Completion(index, one.arrival_s, params, self._tokenizer, prompt_token_ids, kind)
            for index, one in enumerate(engine_requests)
        }
        has_prompt_logprobs = params.prompt_logprobs is not None
        label = request_id if label is None else label
        request = _UserRequest(request_id, label, prompt, prompt_token_ids, completions, has_prompt_logprobs, kind)
        self._requests[request_id] = request
        self._owners.update(dict.fromkeys(completions, request))

    def process(self, updates: Sequence[RequestUpdate]) -> ProcessedOutputs:
        """`take`, and an output of every request that has something to tell."""
        changes = self.take(updates)
        outputs = [self.output(request_id) for request_id in changes.request_ids]
        return ProcessedOutputs(outputs, changes.finished_early, changes.failures)

    def take(self, updates: Sequence[RequestUpdate]) -> Changes:
        """Take news in the order the engine sent them. Those of requests that are finished or aborted are ignored."""
        changed: dict[str, _UserRequest] = {}
        finished_early: list[str] = []
        failures: dict[str, Failure] = {}
        for update in updates:
            request = self._owners.get(update.request_id)
            if request is None:
                continue
            if update.failure is not None:
                others = [one for one in self.abort(request.request_id) if one != update.request_id]
                failures[request.request_id] = Failure(update.failure.as_error(), others)
                changed.pop(request.request_id, None)
                continue
            changed[request.request_id] = request
            request.add_prompt_logprobs(update.prompt_logprobs, self._tokenizer)
            completion = request.completions[update.request_id]
            completion.take(update)
            if completion.finish_reason is not None:
                del self._owners[update.request_id]
                if update.finish_reason is None:
                    completion.finished_s = self._clock.now_s()
                    finished_early.append(update.request_id)
        told = [id_ for id_, request in changed.items() if request.has_something_to_tell]
        return Changes(told, finished_early, failures)

    def requests_of(self, engine_request_ids: Iterable[str]) -> list[str]:
        """The user requests, each once, of engine requests that run."""
        owners = (self._owners.get(id_) for id_ in engine_request_ids)
        return list(dict.fromkeys(owner.request_id for owner in owners if owner is not None))

    def is_finished(self, request_id: str) -> bool:
        """Whether it is finished, though perhaps not all told."""
        request = self._requests.get(request_id)
        return request is not None and request.is_finished

    def output(self, request_id: str) -> RequestOutput:
        """What a request, one that was not aborted, has to tell now. It is forgotten if it is finished."""
        request = self._requests[request_id]
        if request.is_finished:
            del self._requests[request_id]
        return request.output()

    def abort(self, request_id: str) -> list[str]:
        """Forget a request. Returns: its engine requests that are still running, for the engine to abort."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        running = [id_ for id_, completion in request.completions.items() if completion.finish_reason is None]
        for engine_request_id in running:
            del self._owners[engine_request_id]
        return running


class _UserRequest:
    """A prompt and its completions by engine request id."""

    def __init__(
        self,
        request_id: str,
        label: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        completions: dict[str, _Completion],
        has_prompt_logprobs: bool,
        kind: OutputKind,
    ) -> None:
        self.request_id = request_id
        self.completions = completions
        self._kind = kind
        self._label = label
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if has_prompt_logprobs else None
        self._num_described = 1

    @property
    def is_finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions.values())

    @property
    def has_something_to_tell(self) -> bool:
        """Nothing of several completions before the whole prompt is described, if it is to be: only the first one
        describes it, and others, which may find it in the KV cache, can be far ahead of that one.
        """
        return self.is_finished or (self._kind is not OutputKind.FINAL_ONLY and self._is_described)

    @property
    def _is_described(self) -> bool:
        is_alone = self._prompt_logprobs is None or len(self.completions) == 1
        return is_alone or self._num_described >= len(self._prompt_token_ids)

    def add_prompt_logprobs(self, positions: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> None:
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += [_logprobs_by_id(position, tokenizer) for position in positions]
            self._num_described += len(positions)

    def output(self) -> RequestOutput:
        is_delta = self._kind is OutputKind.DELTA
        prompt_logprobs = None if self._prompt_logprobs is None else list(self._prompt_logprobs)
        if is_delta and self._prompt_logprobs is not None:
            self._prompt_logprobs.clear()
        completions = self.completions.values()
        return RequestOutput(
            request_id=self._label,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[one.output() for one in completions if one.has_news or not is_delta],
            is_finished=self.is_finished,
            is_delta=is_delta,
        )


class _Completion:
    """The text of one completion so far, and why it ended."""

    def __init__(
        self,
        index: int,
        arrival_s: float,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        kind: OutputKind,
    ) -> None:
        self.has_news = False
        self.finish_reason: FinishReason | None = None
        self.finished_s: float | None = None
        self._index = index
        self._is_delta = kind is OutputKind.DELTA
        self._arrival_s = arrival_s
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._is_stop_included = params.include_stop_str_in_output
        self._decoder = tokenizer.new_decode_stream(params.skip_special_tokens, prompt_token_ids)
        self._scanner = StopStringScanner(params.stop_strings, params.include_stop_str_in_output)
        self._is_decoded_at_end = kind is OutputKind.FINAL_ONLY and not params.stop_strings
        self._text = ""
        self._new_pieces: list[str] = []
        self._num_tokens = 0
        # Of a delta, those that were not given out yet.
        self._token_ids: list[int] = []
        self._token_times_s: list[float] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._stop_reason: int | str | None = None
        self._latest: RequestUpdate | None = None

    def take(self, update: RequestUpdate) -> None:
        """Take one update: tokens, then the end if it is the last one."""
        self.has_news = True
        self._latest = update
        self.finished_s = update.finished_s
        last = len(update.token_ids) - 1
        for place, token_id in enumerate(update.token_ids):
            self._add_token(token_id, update.time_s, update.logprobs[place] if update.logprobs else None)
            if self._is_decoded_at_end or (place == last and self._is_left_out(update)):
                continue
            # As with stop tokens, what ends a completion comes after min_tokens tokens.
            may_stop = self._num_tokens > self._min_tokens
            self._new_pieces.append(self._scanner.push(self._decoder.step(token_id), may_stop))
            if self._scanner.found is not None:
                self._end_at_stop_string()
                return
        if update.finish_reason is not None:
            self._end(update.finish_reason, update.stop_reason, self._undecoded(update))

    def _undecoded(self, last_update: RequestUpdate) -> list[int]:
        if not self._is_decoded_at_end:
            return []
        return self._token_ids[:-1] if self._is_left_out(last_update) else self._token_ids

    def _is_left_out(self, update: RequestUpdate) -> bool:
        """The update's last token stopped the completion and is not part of its text."""
        ends_with_stop = update.finish_reason == "stop" and bool(update.token_ids) and not update.is_last_token_text
        return ends_with_stop and not self._is_stop_included

    def _add_token(self, token_id: int, time_s: float, described: TokenLogprobs | None) -> None:
        self._num_tokens += 1
        self._token_ids.append(token_id)
        self._token_times_s.append(time_s)
        if self._logprobs is not None and described is not None:
            self._logprobs.append(_logprobs_by_id(described, self._tokenizer))
            self._cumulative_logprob += described.logprobs[0]

    def _end(self, reason: FinishReason, stop_reason: int | None, undecoded: list[int]) -> None:
        may_stop = self._num_tokens > self._min_tokens
        self._new_pieces.append(self._scanner.push(self._decoder.finish(undecoded), may_stop))
        if self._scanner.found is not None:
            self._end_at_stop_string()
            return
        self._new_pieces.append(self._scanner.finish())
        self.finish_reason = reason
        self._stop_reason = stop_reason

    def _end_at_stop_string(self) -> None:
        self.finish_reason = "stop"
        self._stop_reason = self._scanner.found

    def output(self) -> CompletionOutput:
        """All so far, or all that is new; what is new in the next output begins here."""
        new_text = "".join(self._new_pieces)
        self._new_pieces.clear()
        self._text = new_text if self._is_delta else self._text + new_text
        output = CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=list(self._token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            timings=self._timings(),
            new_text=new_text,
        )
        self.has_news = False
        if self._is_delta:
            self._token_ids.clear()
            self._token_times_s.clear()
            if self._logprobs is not None:
                self._logprobs.clear()
        return output

    def _timings(self) -> RequestTimings:
        if self._latest is None:
            return RequestTimings(self._arrival_s)
        return RequestTimings(
            arrival_s=self._arrival_s,
            first_scheduled_s=self._latest.first_scheduled_s,
            first_token_s=self._latest.first_token_s,
            finished_s=self.finished_s,
            num_cached_tokens=self._latest.num_cached_tokens,
            num_preemptions=self._latest.num_preemptions,
            token_times_s=tuple(self._token_times_s),
        )


def _logprobs_by_id(described: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The described token with its own rank, then the likeliest ones, whose ranks are their places."""
    token_ids, logprobs = described.token_ids, described.logprobs
    by_id = {token_ids[0]: Logprob(logprobs[0], described.rank, tokenizer.token_text(token_ids[0]))}
    for rank, (token_id, logprob) in enumerate(zip(token_ids[1:], logprobs[1:], strict=True), start=1):
        if token_id not in by_id:
            by_id[token_id] = Logprob(logprob, rank, tokenizer.token_text(token_id))
    return by_id
