"""Stageline: large language models through a pipeline of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stageline.errors import StagelineError as StagelineError
from stageline.sampling import SamplingParams as SamplingParams
from stageline.sampling import StructuredOutputs as StructuredOutputs

if TYPE_CHECKING:
    from stageline.engine.async_llm import AsyncLLM as AsyncLLM
    from stageline.engine.llm import LLM as LLM

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StagelineError", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    """An engine is imported when asked for, so that importing a small noun stays cheap."""
    if name == "LLM":
        from stageline.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from stageline.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
