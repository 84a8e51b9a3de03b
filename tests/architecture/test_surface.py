"""What users have typed stays: public names, flags, and every command that the README shows."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

import stageline
from stageline.cli.main import build_parser
from tests.architecture.source_tree import ROOT


def _words(text: str) -> list[str]:
    return text.split()


PUBLIC_NAMES = ["LLM", "AsyncLLM", "SamplingParams", "StagelineError", "StructuredOutputs", "__version__"]

ENGINE_FLAGS = _words("""
    --activation-dtype --bind-cores --block-size --chat-template --device --distributed-executor-backend --dtype
    --enable-expert-parallel --no-enable-expert-parallel
    --enable-prefix-caching --expected-request-tokens --heartbeat-timeout-s --kv-cache-memory --load-timeout-s
    --long-prefill-token-threshold
    --look-ahead --max-decode-slowdown --no-look-ahead --max-microbatches-in-flight --max-model-len
    --max-num-batched-tokens --max-num-seqs --max-queue --no-bind-cores --no-enable-prefix-caching --no-rebalance
    --pipeline-parallel-size --pp-layer-partition --prefill-chunk --progress-timeout-s --quantization --rebalance
    --rebalance-gain --rebalance-patience-s --seed --tensor-parallel-size --threads-per-stage --tokenizer -pp -tp
""")

SAMPLING_FLAGS = _words("""
    --allowed-token-ids --bad-words --frequency-penalty --grammar --ignore-eos --include-stop-str-in-output
    --json-schema --logit-bias --logprobs --max-tokens --min-p --min-tokens --n --no-ignore-eos
    --no-include-stop-str-in-output --no-skip-special-tokens --presence-penalty --prompt-logprobs --regex
    --repetition-penalty --skip-special-tokens --stop --stop-token-ids --temperature --top-k --top-p
""")

OWN_FLAGS = {
    "generate": [*SAMPLING_FLAGS, "--chat", "--json", "--prompt", "--prompt-file"],
    "chat": sorted({*SAMPLING_FLAGS, "--system"} - {"--n", "--logprobs", "--prompt-logprobs"}),
    "serve": _words("""
        --allowed-origins --api-key --api-key-file --api-server-count --cluster-key-file --data-parallel-size
        --disable-log-requests --drain-timeout-s -dp --enable-request-id-headers --headless --host --insecure
        --interface --join-timeout
        --join-timeout-s --keep-alive-timeout-s --master-addr --master-port --max-body-bytes --max-connections
        --max-header-bytes --model-source --nnodes --no-disable-log-requests --no-enable-request-id-headers
        --no-headless --no-insecure --no-warmup --node-address --node-rank --on-worker-lost --port --port-range
        --read-timeout-s --reasoning-parser
        --request-timeout-s --root-path --served-model-name --ssl-certfile --ssl-keyfile --stages --tool-call-parser
        --warmup --write-timeout-s
    """),
    "bench throughput": sorted(
        {*SAMPLING_FLAGS, "--input-len", "--num-prompts", "--num-warmup", "--output", "--output-len", "--prompt-file",
         "--timeline"} - {"--n", "--max-tokens", "--min-tokens"}
    ),
    "tune": ["--apply", "--concurrency", "--context", "--output", "--output-len", "--repetitions"],
    "bench latency": sorted(
        {*SAMPLING_FLAGS, "--batch-size", "--input-len", "--num-iters", "--num-warmup", "--output", "--output-len",
         "--timeline"} - {"--n", "--max-tokens", "--min-tokens"}
    ),
}  # fmt: skip
OWN_FLAGS["doctor"] = [*OWN_FLAGS["serve"], "--first-request", "--first-request-s", "--json", "--listen", "--peers"]


def _parser(command: str) -> argparse.ArgumentParser:
    parser = build_parser()
    for word in command.split():
        [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        parser = commands.choices[word]
    return parser


def _code_lines(page: str) -> list[str]:
    """Lines of the page's code blocks, continuation lines joined."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_public_names_are_the_frozen_list() -> None:
    assert stageline.__all__ == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(stageline, name) is not None


WITHOUT_ENGINE_FLAGS = {
    "bench serve": _words("""
        --api-key --base-url --burstiness --ca-file --dataset-name --dataset-path --endpoint --goodput --ignore-eos
        --input-len --json --max-concurrency --model --no-ignore-eos --num-prefixes --num-prompts --num-warmup --output
        --output-len --plot --prefix-len --range-ratio --rates --request-rate --seed --temperature --time-scale
        --timeout-s
    """),
    "cache": ["--clear", "--keep-bytes"],
    "join": _words("""
        --bind-cores --cluster-key-file --insecure --interface --join-timeout --join-timeout-s --model --model-source
        --no-bind-cores --node-address --node-rank --port-range --stages
    """),
    "key new": ["--out"],
    "plan": _words("""
        --burstiness --calibrate --cluster --concurrency --data-parallel-size --dataset-name --dataset-path
        --kv-cache-dtype --list --max-concurrency --max-num-batched-tokens --memory-fraction --min-tokens-per-s
        --num-prefixes --num-prompts --objective --output-tokens --pareto --pipeline-parallel-size --prefix-len
        --prompt-tokens --range-ratio --request-rate --save --seed --simulate --speculate-acceptance --speculate-tokens
        --table --tensor-parallel-size
        --time-scale --top --trace-out --weights --yaml -dp -pp -tp
    """),
    "probe": ["--cluster-key-file", "--insecure", "--interface", "--json", "--listen", "--port"],
    "timeline": ["--api-key", "--ca-file", "--chrome", "--png", "--save", "--seconds", "--simulated", "--url",
                 "--width"],
}


@pytest.mark.parametrize("command", WITHOUT_ENGINE_FLAGS)
def test_flags_of_commands_that_start_no_engine_are_the_frozen_list(command: str) -> None:
    spellings = {spelling for action in _parser(command)._actions for spelling in action.option_strings}
    assert sorted(spellings - {"-h", "--help"}) == WITHOUT_ENGINE_FLAGS[command]


@pytest.mark.parametrize("command", OWN_FLAGS)
def test_flags_are_the_frozen_list(command: str) -> None:
    spellings = {spelling for action in _parser(command)._actions for spelling in action.option_strings}
    assert sorted(spellings - {"-h", "--help"}) == sorted([*ENGINE_FLAGS, *OWN_FLAGS[command]])


@pytest.mark.parametrize("command", [*WITHOUT_ENGINE_FLAGS, *OWN_FLAGS])
def test_a_command_calls_itself_what_is_typed(command: str) -> None:
    """In its usage line and in the hint at its help."""
    assert _parser(command).prog == f"stageline {command}"


def test_every_make_target_of_the_pages_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    lines = [*_code_lines("README.md"), *_code_lines("CONTRIBUTING.md")]
    shown = [line for line in lines if line.startswith("make ")]
    assert shown
    for line in shown:
        words = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
        assert set(words) <= targets, line


DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", ["README.md", *DOCS])
def test_every_stageline_command_of_a_page_parses(page: str) -> None:
    shown = [line for line in _code_lines(page) if line.split()[0].endswith("stageline")]
    assert shown or page != "README.md"
    for line in shown:
        build_parser().parse_args(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("page", DOCS)
def test_every_flag_that_a_page_of_the_docs_names_is_one_of_a_command(page: str) -> None:
    """In the text too, where no command shows whether it can be parsed."""
    known = {spelling for command in _commands(build_parser()) for spelling in command}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / page).read_text()))
    assert named - known - FLAGS_OF_OTHERS == set()


def test_the_doctors_page_names_every_check_that_it_prints() -> None:
    sources = [*(ROOT / "src/stageline/doctor").glob("*.py"), ROOT / "src/stageline/cli/doctor.py"]
    pattern = r"\b(?:ok|warning|failed|finding_of)\(\s*\"([^\"]+)\""
    printed = {name for source in sources for name in re.findall(pattern, source.read_text())}
    assert len(printed) > 20
    rows = [line for line in (ROOT / "docs/doctor.md").read_text().splitlines() if line.startswith("|")]
    assert printed - {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set()


FLAGS_OF_OTHERS = set(_words("""
    --add-port --address --entrypoint --from-literal --hostname --name --network --no-healthcheck --permanent --reload
    --timeout
"""))
"""Of docker, firewall-cmd, ray and the like."""


def _commands(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Spellings of every command's flags."""
    found = [[spelling for action in parser._actions for spelling in action.option_strings]]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [spellings for command in action.choices.values() for spellings in _commands(command)]
    return found


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *DOCS])
def test_every_file_that_a_page_links_to_exists(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
