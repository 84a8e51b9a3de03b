"""What to say of a flag that a command does not know: which was meant, or which command has it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_REPLICAS = "replicas are for stageline serve; other commands run one pipeline"
_ELSEWHERE = {"-dp": _REPLICAS, "--data-parallel-size": _REPLICAS}
# How llama.cpp and others call what a command has; told where the command has it.
_OTHER_NAMES = {
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-ngl": "--device",
    "--gpu-layers": "--device",
    "--n-gpu-layers": "--device",
    "-t": "--threads-per-stage",
    "--threads": "--threads-per-stage",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-ts": "--pp-layer-partition",
    "--tensor-split": "--pp-layer-partition",
    "-p": "--prompt",
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--url": "--base-url",
}  # fmt: skip


def describe_unknown(unknown: Sequence[str], known_flags: Iterable[str]) -> str:
    """One line for everything that was not understood.

    Args:
        unknown: as typed, flags and values.
        known_flags: of the command, such as "--port".
    """
    flags = list(known_flags)
    hints = [hint for word in unknown if word.startswith("-") and (hint := _hint(word.split("=")[0], flags))]
    return f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; {hint}" for hint in hints)


def _hint(flag: str, known_flags: list[str]) -> str:
    if words := _ELSEWHERE.get(flag):
        return f"{flag}: {words}"
    if flag == "-m" and "--model" not in known_flags:
        return "-m: MODEL is given without a flag"
    if (name := _OTHER_NAMES.get(flag)) in known_flags:
        return f"{flag}: see {name}"
    close = difflib.get_close_matches(flag, known_flags, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close and flag.startswith("--") else ""
