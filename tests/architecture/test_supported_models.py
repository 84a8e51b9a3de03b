"""docs/supported_models.md lists the models that there are, and nothing that was not shown."""

from __future__ import annotations

from pathlib import Path

from stageline.checkpoint.architectures import READERS
from stageline.checkpoint.gguf_architectures import ARCHITECTURES
from stageline.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.model.tiny_families import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported_models.md"
AGAIN = "run scripts/supported_models.py"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_architecture_that_can_be_read_is_listed() -> None:
    assert sorted(row[1] for row in rows()) == sorted(READERS), AGAIN


def test_its_models_are_those_that_the_tests_know() -> None:
    families = {**FAMILIES, **EXPERT_FAMILIES}.values()
    assert {row[0] for row in rows()} == {family.shown_as for family in families}, AGAIN


def test_every_law_was_shown_for_every_model() -> None:
    assert {mark for row in rows() for mark in row[2:]} == {"✓"}, AGAIN


def test_gguf_architectures_are_listed() -> None:
    text = PAGE.read_text().replace("\n", " ")
    assert f"GGUF files: {', '.join(ARCHITECTURES)} " in text, AGAIN
    assert f"`tokenizer.ggml.pre` is one of {', '.join(PRE_TOKENIZERS)} (" in text, AGAIN
