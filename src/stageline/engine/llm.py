"""The offline interface: a pipeline behind a Python object. Text in, text out; the engine's loop runs in the caller."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.generation_defaults import generation_defaults
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.clock import Clock, MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.engine.input_processor import InputProcessor
from stageline.engine.load_progress import LoadProgress
from stageline.engine.output_processor import OutputProcessor
from stageline.engine.startup import choose_max_model_len, start_pipeline
from stageline.errors import RequestError
from stageline.executor.executor import OnProgress
from stageline.outputs import RequestOutput
from stageline.sampling import SamplingParams
from stageline.timeline.span import Span

Prompt = str | list[int]
Messages = list[dict[str, Any]]


class LLM:
    """A model that runs on a pipeline of stages, for use from Python. Not thread-safe.

        with LLM("model.gguf", pipeline_parallel_size=2) as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0.0))
            print(output.outputs[0].text)

    Args:
        model: a Hugging Face directory, a GGUF file or a hub id.
        on_load_progress: called with (stage index, bytes read, bytes in all); None shows a progress bar on a terminal.
        settings: fields of `EngineConfig`.
    Raises: ConfigError before anything is started for what cannot work; WorkerLost if a stage dies while starting.
    """

    def __init__(self, model: str, *, on_load_progress: OnProgress | None = None, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings).check()
        self.clock: Clock = MonotonicClock()
        checkpoint = open_checkpoint(model)
        self.spec: ModelSpec = checkpoint.spec
        self.max_model_len = choose_max_model_len(self.config, checkpoint)
        self.tokenizer = load_tokenizer(checkpoint, self.config.tokenizer, self.config.chat_template)
        self._inputs = InputProcessor(
            self.spec, self.tokenizer, self.max_model_len, self.config.seed, generation_defaults(checkpoint)
        )
        self._outputs = OutputProcessor(self.tokenizer, self.clock)
        self._unclaimed: dict[str, RequestOutput] = {}
        self._next_request = itertools.count()
        progress = LoadProgress(self.config.pipeline_parallel_size) if on_load_progress is None else None
        try:
            self._pipeline = start_pipeline(self.config, checkpoint, self.clock, on_load_progress or progress)
        finally:
            if progress is not None:
                progress.close()
        self._core = self._pipeline.core

    @classmethod
    def from_config(cls, config: EngineConfig, on_load_progress: OnProgress | None = None) -> LLM:
        settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
        return cls(on_load_progress=on_load_progress, **settings)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the stages. May be called twice."""
        self._core.close()

    # ---- what users ask ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one go.

        Args:
            prompts: a text, a list of token ids, or a list of such prompts.
            sampling_params: for all prompts, or one per prompt; None takes `default_sampling_params()`.
            use_tqdm: show a progress bar on a terminal.
        Returns: one output per prompt, in order.
        Raises: RequestError, before anything is generated, if a prompt or a parameter cannot be served; WorkerLost if a
            stage is lost on the way.
        """
        many = _as_prompts(prompts)
        return self._finish_all(many, _one_per_prompt(sampling_params, len(many), self), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: lists of {"role": ..., "content": ...}. See `generate`."""
        many: Any = [messages] if not messages or isinstance(messages[0], dict) else messages
        prompts: list[Prompt] = [
            self.tokenizer.encode_chat(conversation, add_generation_prompt, **(chat_template_kwargs or {}))
            for conversation in many
        ]
        return self._finish_all(prompts, _one_per_prompt(sampling_params, len(prompts), self), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, giving the output so far each time it has grown. Closing the iterator aborts the request.

        Raises: RequestError at once, not at the first step, if the request cannot be served.
        """
        [request_id] = self._submit([prompt], [sampling_params or self.default_sampling_params()], True)
        return self._follow({request_id})

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one conversation as a stream; see `stream`."""
        return self.stream(self.tokenizer.encode_chat(messages), sampling_params)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, as far as they say; otherwise the defaults of `SamplingParams`."""
        return self._inputs.default_params()

    # ---- what users look at ----

    def startup_table(self) -> str:
        """Which stage holds what; also logged at start."""
        return self._pipeline.table

    def spans(self, since_s: float = 0.0) -> list[Span]:
        """What every stage and the engine did since then, on `clock`, as far as their rings remember."""
        return self._core.spans(since_s)

    # ---- requests on their way ----

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], is_streamed: bool) -> list[str]:
        """Queue all or none. Returns: the request ids."""
        prepared = []
        for prompt, its_params in zip(prompts, params, strict=True):
            request_id = str(next(self._next_request))
            engine_requests = self._inputs.process(request_id, prompt, its_params, self.clock.now_s())
            prepared.append((request_id, prompt, its_params, engine_requests))
        submitted: list[str] = []
        try:
            for request_id, prompt, its_params, engine_requests in prepared:
                text = prompt if isinstance(prompt, str) else None
                token_ids = engine_requests[0].prompt_token_ids
                self._outputs.add(request_id, text, token_ids, its_params, engine_requests, is_streamed)
                submitted.append(request_id)
                for engine_request in engine_requests:
                    self._core.add(engine_request)
        except RequestError:
            self._abort(submitted)
            raise
        return submitted

    def _finish_all(self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        request_ids = self._submit(prompts, params, False)
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(request_ids), desc="prompts", disable=None if use_tqdm else True, leave=False) as bar:
            for output in self._follow(set(request_ids)):
                finished[output.request_id] = output
                bar.update()
        return [finished[request_id] for request_id in request_ids]

    def _follow(self, request_ids: set[str]) -> Iterator[RequestOutput]:
        """Run the engine until these requests are finished; outputs of others are kept for whoever follows them."""
        pending = set(request_ids)
        try:
            while pending:
                for output in self._take(pending):
                    if output.is_finished:
                        pending.discard(output.request_id)
                    yield output
        finally:
            self._abort(pending)

    def _take(self, request_ids: set[str]) -> list[RequestOutput]:
        """New outputs of these requests: kept ones if there are any, else those of the engine's next step."""
        kept = [self._unclaimed.pop(request_id) for request_id in self._unclaimed.keys() & request_ids]
        if kept:
            return kept
        mine = []
        for output in self._step():
            if output.request_id in request_ids:
                mine.append(output)
            else:
                self._unclaimed[output.request_id] = output
        return mine

    def _step(self) -> list[RequestOutput]:
        processed = self._outputs.process(self._core.step())
        for engine_request_id in processed.finished_early:
            self._core.abort(engine_request_id)
        return processed.outputs

    def _abort(self, request_ids: Sequence[str] | set[str]) -> None:
        for request_id in request_ids:
            self._unclaimed.pop(request_id, None)
            for engine_request_id in self._outputs.abort(request_id):
                self._core.abort(engine_request_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a list of integers is one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, llm: LLM
) -> list[SamplingParams]:
    if params is None:
        params = llm.default_sampling_params()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            f"{len(params)} sampling_params for {num_prompts} prompts; give one for all or one for each", "sampling_params"
        )
    return list(params)
