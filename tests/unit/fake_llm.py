"""A stand-in for `stageline.engine.llm.LLM` with the same interface and no model: it repeats the prompt's words."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from stageline.config.engine_config import EngineConfig
from stageline.errors import RequestError
from stageline.outputs import CompletionOutput, RequestOutput, RequestTimings
from stageline.sampling import SamplingParams
from stageline.timeline.span import Span


@dataclass
class FakeClock:
    time_s: float = 100.0

    def now_s(self) -> float:
        return self.time_s


@dataclass(frozen=True)
class FakeSpec:
    vocab_size: int = 1000


@dataclass
class FakeLLM:
    """Every token takes 10 ms, on two stages one after the other; a call is remembered in `calls`."""

    config: EngineConfig
    max_model_len: int = 512
    spec: FakeSpec = FakeSpec()
    clock: FakeClock = field(default_factory=FakeClock)
    calls: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    is_closed: bool = False
    num_streams_closed: int = 0
    too_long_words: int = 100

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self.is_closed = True

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6, top_k=50)

    def generate(self, prompts: Sequence[Any], params: SamplingParams, use_tqdm: bool = True) -> list[RequestOutput]:
        self.calls.append((list(prompts), params))
        return [self._output(number, prompt, params) for number, prompt in enumerate(prompts)]

    def chat(self, messages: Sequence[Any], params: SamplingParams, use_tqdm: bool = True) -> list[RequestOutput]:
        self.calls.append((messages, params))
        return [self._output(n, conversation[-1]["content"], params) for n, conversation in enumerate(messages)]

    def stream_chat(
        self, messages: list[dict[str, str]], params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        self.calls.append((messages, params))
        words = messages[-1]["content"].split()
        if len(words) > self.too_long_words:
            raise RequestError(f"{len(words)} tokens are too many", "prompt")
        try:
            for end in range(1, len(words) + 1):
                new_text = words[end - 1] if end == 1 else f" {words[end - 1]}"
                yield self._completed(0, None, [1] * 4, " ".join(words[:end]), end, 1, new_text)
        finally:
            self.num_streams_closed += 1

    def spans(self, since_s: float | None = None) -> list[Span]:
        since_s = since_s or 100.0
        num_steps = round((self.clock.time_s - since_s) / 0.01)
        spans = []
        for step in range(num_steps):
            start_s = since_s + step * 0.01
            spans.append(Span(0, step, "forward", start_s, start_s + 0.005, 1, 1))
            spans.append(Span(1, step, "forward", start_s + 0.005, start_s + 0.01, 1, 1))
        return spans

    def advice(self, spans: list[Span], num_requests: int | None = None) -> list[str]:
        return [f"advice for {num_requests} requests"]

    def _output(self, number: int, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        num_tokens = params.max_tokens or 16
        text = f"about {prompt}" if isinstance(prompt, str) else ""
        prompt_ids = [1] * len(prompt.split()) if isinstance(prompt, str) else prompt
        return self._completed(number, prompt, prompt_ids, text, num_tokens, params.n)

    def _completed(
        self, number: int, prompt: Any, prompt_ids: list[int], text: str, num_tokens: int, n: int, new_text: str = ""
    ) -> RequestOutput:
        start_s = self.clock.time_s
        self.clock.time_s += num_tokens * 0.01
        token_times_s = [start_s + (token + 1) * 0.01 for token in range(num_tokens)]
        timings = RequestTimings(start_s, start_s, start_s + 0.01, self.clock.time_s, token_times_s=token_times_s)
        completions = [
            CompletionOutput(index, text, [2] * num_tokens, "length", None, None, None, timings, new_text)
            for index in range(n)
        ]
        return RequestOutput(str(number), prompt, prompt_ids, None, completions, True)
