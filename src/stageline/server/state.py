"""What every route needs, made once: the engine's client, the operator's wishes, and what follows from the model."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from stageline.config.serve_config import ServeConfig
from stageline.engine.async_llm import AsyncLLM
from stageline.server.advice_log import AdviceLog
from stageline.server.answer_parsing import AnswerStyle, choose_answer_style
from stageline.server.errors import ApiError


@dataclass(frozen=True)
class ServerState:
    """Args:
    model_names: what clients may call the model; the first is shown in answers.
    started_s: when this process started, in seconds since 1970.
    answer_style: how the model writes tool calls and reasoning.
    longest_prompt_bytes: no text with more can fit into the model's length.
    fingerprint: OpenAI's system_fingerprint: answers of one seed compare only where it is the same.
    advice_log: None where another process writes it.
    """

    llm: AsyncLLM
    config: ServeConfig
    model_names: tuple[str, ...]
    started_s: int
    answer_style: AnswerStyle
    longest_prompt_bytes: int
    fingerprint: str
    advice_log: AdviceLog | None = None

    @classmethod
    def of(cls, llm: AsyncLLM, config: ServeConfig, version: str, writes_advice: bool = True) -> ServerState:
        """Args: writes_advice: into the log; of several processes that serve one engine, one does."""
        names = config.served_model_name or (llm.config.model,)
        stages = llm.config.pipeline_parallel_size
        return cls(
            llm=llm,
            config=config,
            model_names=tuple(names),
            started_s=int(time.time()),
            answer_style=choose_answer_style(llm.tokenizer, config, names),
            longest_prompt_bytes=llm.max_model_len * llm.tokenizer.longest_token_bytes,
            fingerprint=f"stageline-{version}-pp{stages}",
            advice_log=AdviceLog(llm) if writes_advice else None,
        )

    def check_model(self, name: str | None) -> str:
        """The name for the answer; who names none means the one there is. Raises: ApiError 404 for another."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        known = ", ".join(self.model_names)
        raise ApiError(404, f"there is no model {name[:200]!r}; this server has {known}", "model", "model_not_found")


@dataclass(frozen=True)
class AnswerHead:
    """What every part of an answer repeats.

    Args:
        created: seconds since 1970.
    """

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, state: ServerState, prefix: str, model: str) -> AnswerHead:
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, state.fingerprint)
