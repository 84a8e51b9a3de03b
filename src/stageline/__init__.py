"""Stageline: large language models through a pipeline of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stageline.errors import StagelineError as StagelineError
from stageline.sampling import SamplingParams as SamplingParams
from stageline.sampling import StructuredOutputs as StructuredOutputs

if TYPE_CHECKING:
    from stageline.engine.llm import LLM as LLM

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "StagelineError", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` is imported when asked for, so that importing a small noun stays cheap."""
    if name == "LLM":
        from stageline.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
