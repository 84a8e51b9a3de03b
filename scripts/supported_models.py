"""Writes docs/supported_models.md from tests that it runs: a model is listed with what was shown for it just now.

    .venv/bin/python scripts/supported_models.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "supported_models.md"
TEST_FILES = ("tests/model/test_families.py", "tests/model/test_tensor_parallel.py")
# What a column says, and the test that shows it for a family.
COLUMNS = {
    "logits, 1–3 stages, chunks": "test_logits_equal_transformers_at_every_depth",
    "shared prefix": "test_a_shared_prefix_gives_the_same_logits",
    "without kernels": "test_without_kernels_torch_gives_the_same_logits",
    "one program": "test_blocks_are_recorded_as_one_program",
    "shared by ranks": "test_logits_are_those_of_one_rank",
}
SHOWN, NOT_SHOWN = "✓", "–"

HEAD = """# Supported models

Written by `scripts/supported_models.py` from tests that it ran; do not edit it. Every test runs tiny random checkpoints
that `transformers` wrote, and compares with what `transformers` computes from them in float32: no logit is off by more
than a ten-thousandth of the largest, and the likeliest token is the same.

- **logits, 1–3 stages, chunks**: the model in one, two and three stages, prompts in chunks of several sizes beside
  decodes; and the same bits whatever the number of stages.
- **shared prefix**: a request that begins with another's blocks.
- **without kernels**: torch computes everything.
- **one program**: in bfloat16, a stage's layers run as one call into the compiled kernels.
- **shared by ranks**: the logits of one rank, with two for each of one or two stages, and with two, one and one for
  three; experts in parts, and dealt whole.

"""

TAIL = """
GGUF files: {gguf}
(the names under `general.architecture`; llama with experts is Mixtral). Another architecture is refused by name before
anything starts. A model is opened by its file, of one that is split (`NAME-00001-of-00003.gguf`) by any that lies
beside the others, by a folder that has no other, or from the hub by `organisation/name:Q4_K_M` or
`organisation/name/FILE.gguf`. How one is added: [adding_a_model.md](adding_a_model.md).

Their tokenizers: SentencePiece, and byte-level BPE whose `tokenizer.ggml.pre` is one of
{pre}
(with another, give the model's own tokenizer.json: `--tokenizer DIRECTORY`).
"""


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    outcomes = run_tests()
    PAGE.write_text(page(outcomes), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(outcomes)} variants")
    return 0


def run_tests() -> dict[str, set[str]]:
    """Returns: the tests that passed, by the name of the variant. Exits if one failed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *TEST_FILES, f"--junitxml={report}"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit("a test failed, so nothing is written")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        outcomes: dict[str, set[str]] = {}
        for case in cases:
            test, _, variant = case.attrib["name"].rstrip("]").partition("[")
            if variant and not list(case):  # a child would say why it was skipped
                outcomes.setdefault(variant, set()).add(test)
    return outcomes


def page(outcomes: dict[str, set[str]]) -> str:
    """A model's row shows what all of its variants have shown."""
    from stageline.checkpoint.gguf_architectures import ARCHITECTURES
    from stageline.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS

    sys.path.insert(0, str(ROOT))
    from tests.model.tiny_experts import EXPERT_FAMILIES
    from tests.model.tiny_families import FAMILIES

    rows: dict[tuple[str, str], set[str]] = {}
    for variant, family in {**FAMILIES, **EXPERT_FAMILIES}.items():
        shown = outcomes.get(variant, set())
        key = family.shown_as, architecture(family.model_type)
        rows[key] = rows.get(key, shown) & shown
    lines = ["| model | architecture | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for (shown_as, name), shown in rows.items():
        marks = [SHOWN if test in shown else NOT_SHOWN for test in COLUMNS.values()]
        lines.append(f"| {shown_as} | {name} | {' | '.join(marks)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL.format(gguf=", ".join(ARCHITECTURES), pre=", ".join(PRE_TOKENIZERS))


def architecture(model_type: str) -> str:
    """As config.json names it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


if __name__ == "__main__":
    sys.exit(main())
