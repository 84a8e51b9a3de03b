"""The offline interface: a pipeline behind a Python object. Text in, text out; the engine's loop runs in the caller."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.generation_defaults import generation_defaults
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.clock import Clock, MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.config.keyword_settings import own_settings
from stageline.engine.advice import RunFacts, advise
from stageline.engine.frontend import Frontend, Prompt
from stageline.engine.input_processor import InputProcessor
from stageline.engine.load_progress import LoadProgress
from stageline.engine.output_processor import OutputProcessor
from stageline.engine.output_stream import OutputStream
from stageline.engine.startup import choose_max_model_len, start_pipeline
from stageline.errors import ConfigError, RequestError
from stageline.executor.executor import OnProgress
from stageline.executor.messages import StageLoaded
from stageline.kv.kv_plan import KVPlan
from stageline.outputs import OutputKind, RequestOutput
from stageline.pipeline.item_times import StageItemTimes
from stageline.pipeline.partition import StageLayers
from stageline.sampling import SamplingParams
from stageline.timeline.analysis import analyse
from stageline.timeline.journeys import journeys
from stageline.timeline.span import Span

Messages = list[dict[str, Any]]

logger = logging.getLogger(__name__)


class LLM:
    """A model that runs on a pipeline of stages, for use from Python. Not thread-safe.

        with LLM("model.gguf", pipeline_parallel_size=2) as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0.0))
            print(output.outputs[0].text)

    Args:
        model: a Hugging Face directory, a GGUF file or a hub id.
        on_load_progress: called with (stage index, bytes read, bytes in all); None shows a progress bar on a terminal.
        settings: fields of `EngineConfig`; arguments of vLLM that change nothing are taken with a note.
    Raises: ConfigError before anything is started for what cannot work; WorkerLost if a stage dies while starting.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, on_load_progress: OnProgress | None = None, **settings: Any
    ) -> None:
        _refuse_replicas(settings.pop("data_parallel_size", 1))
        own, notes = own_settings(settings, EngineConfig.__dataclass_fields__)
        for note in notes:
            logger.warning("%s", note)
        self.config = EngineConfig(model=_as_text(model), **own).check()
        self.clock: Clock = MonotonicClock()
        checkpoint = open_checkpoint(self.config.model)
        self.spec: ModelSpec = checkpoint.spec
        self.max_model_len = choose_max_model_len(self.config, checkpoint)
        self.tokenizer = load_tokenizer(checkpoint, self.config.tokenizer, self.config.chat_template)
        self._inputs = InputProcessor(
            self.spec, self.tokenizer, self.max_model_len, self.config.seed, generation_defaults(checkpoint)
        )
        progress = LoadProgress(self.config.pipeline_parallel_size) if on_load_progress is None else None
        try:
            self._pipeline = start_pipeline(
                self.config, checkpoint, self.clock, on_load_progress or progress, self._inputs.grammars
            )
        finally:
            if progress is not None:
                progress.close()
        self._core = self._pipeline.core
        self._frontend = Frontend(self._core, self._inputs, OutputProcessor(self.tokenizer, self.clock), self.clock)

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
        Raises: RequestError, before anything is generated, if a prompt or a parameter cannot be served, and later if
            a grammar exceeds its limits within an answer; WorkerLost if a stage is lost on the way.
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
        prompts: list[Prompt] = [
            self.tokenizer.encode_chat(conversation, add_generation_prompt, **(chat_template_kwargs or {}))
            for conversation in _as_conversations(messages)
        ]
        return self._finish_all(prompts, _one_per_prompt(sampling_params, len(prompts), self), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> OutputStream:
        """Complete one prompt, giving the output so far each time it has grown.

        Closing or dropping the stream aborts the request. Several streams may be open, and `generate` called meanwhile.

        Raises: RequestError at once, not at the first step, if the request cannot be served.
        """
        params = _one_per_prompt(sampling_params, 1, self)
        return OutputStream(self._frontend, self._frontend.submit([prompt], params, OutputKind.CUMULATIVE))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> OutputStream:
        """Answer one conversation as a stream; see `stream`."""
        return self.stream(self.tokenizer.encode_chat(messages), sampling_params)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, as far as they say; otherwise the defaults of `SamplingParams`."""
        return self._inputs.default_params()

    # ---- what users look at ----

    @property
    def kv_plan(self) -> KVPlan:
        """The agreed KV cache, and each stage's side of it."""
        return self._pipeline.kv_plan

    @property
    def stage_reports(self) -> tuple[StageLoaded, ...]:
        """What each stage found out while loading."""
        return self._pipeline.reports

    @property
    def partition(self) -> tuple[StageLayers, ...]:
        """Which layers each stage holds."""
        return self._pipeline.partition

    def startup_table(self) -> str:
        """Which stage holds what; also logged at start."""
        return self._pipeline.layout.table

    def spans(self, since_s: float = 0.0) -> list[Span]:
        """What every stage and the engine did since then, on `clock`, as far as their rings remember."""
        return self._core.spans(since_s)

    def advice(self, spans: Sequence[Span], num_requests: int | None = None) -> list[str]:
        """What these spans say should be changed, in sentences; see `stageline.engine.advice`.

        Args:
            num_requests: most that were running at once meanwhile.
        """
        num_stages = self.config.pipeline_parallel_size
        counts = [len(stage.layers) for stage in self.partition]
        report = analyse(spans, num_stages)
        facts = RunFacts(report, journeys(spans, num_stages), counts, num_requests, self.kv_plan)
        return [advice.text for advice in advise(facts)]

    def item_times(self) -> list[StageItemTimes]:
        """What every item of each stage took since this was called before; the first call turns timing on."""
        return self._core.collect_item_times()

    def _finish_all(self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        request_ids = self._frontend.submit(prompts, params, OutputKind.FINAL_ONLY)
        finished: dict[str, RequestOutput] = {}
        with (
            OutputStream(self._frontend, request_ids) as outputs,
            tqdm(total=len(request_ids), desc="prompts", disable=None if use_tqdm else True, leave=False) as bar,
        ):
            for output in outputs:
                finished[output.request_id] = output
                bar.update()
        return [finished[request_id] for request_id in request_ids]


def _as_text(model: str | os.PathLike[str]) -> str:
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a list of integers is one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}; give a text, a list of token ids, or a list of such prompts",
            "prompt",
        )
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [list(prompts)]
    return list(prompts)


def _as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or several; a list of messages is one."""
    if isinstance(messages, list | tuple) and messages and all(isinstance(entry, list | tuple) for entry in messages):
        return list(messages)
    return [messages]  # type: ignore[list-item]  # the template refuses what is no conversation


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, llm: LLM
) -> list[SamplingParams]:
    if params is None:
        params = llm.default_sampling_params()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, list | tuple) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise RequestError(
            f"sampling_params is {params!r}; give SamplingParams(...), or a list of them, one per prompt",
            "sampling_params",
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"{len(params)} sampling_params for {num_prompts} prompts; give one for all or one for each",
            "sampling_params",
        )
    return list(params)


def _refuse_replicas(num_replicas: Any) -> None:
    """Known to those who come from a server's settings. Raises: ConfigError."""
    if num_replicas != 1:
        raise ConfigError(
            f"data_parallel_size is {num_replicas!r}, but an LLM is one pipeline; `stageline serve -dp {num_replicas}` "
            "has several behind one API, and a batch is divided by starting several LLMs"
        )
