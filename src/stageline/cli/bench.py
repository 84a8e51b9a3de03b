"""`stageline bench`: measure throughput (all prompts at once) or latency (one batch at a time, repeated).

The stages are warmed up first, and only what comes after that is measured, reported and drawn.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tqdm import tqdm

from stageline.cli import bench_serve
from stageline.cli.bench_report import BenchReport, format_bench_report
from stageline.cli.opening import OpenLLM, SubParsers, add_command, check_can_write, open_llm, read_prompts, written
from stageline.cli.sampling_flags import add_sampling_flags, check_sampling_flags, sampling_params_from_args
from stageline.config.engine_config import EngineConfig
from stageline.config.flags import add_engine_flags, engine_config_from_args
from stageline.errors import ConfigError
from stageline.sampling import SamplingParams
from stageline.timeline.analysis import analyse
from stageline.timeline.chrome_trace import write_chrome_trace
from stageline.timeline.journeys import journeys, mean_split
from stageline.timeline.span import Span

if TYPE_CHECKING:
    from stageline.engine.llm import LLM
    from stageline.outputs import RequestOutput

Prompts = list[str] | list[list[int]]

DEFAULT_NUM_PROMPTS = 64
WARMUP_MAX_TOKENS = 8
_THROUGHPUT_USAGE = "stageline bench throughput MODEL [--num-prompts N] [-pp STAGES] [options]"
_THROUGHPUT_EXAMPLE = """example:
  stageline bench throughput ./SmolLM2-135M-Instruct -pp 2 --num-prompts 32 --input-len 128 --output-len 64 \\
      --output result.json --timeline timeline.json

timeline.json opens in ui.perfetto.dev.
"""
_LATENCY_USAGE = "stageline bench latency MODEL [--batch-size N] [--num-iters N] [-pp STAGES] [options]"
_LATENCY_EXAMPLE = """example:
  stageline bench latency ./SmolLM2-135M-Instruct -pp 2 --batch-size 1 --num-iters 10
"""


def add_parser(commands: SubParsers) -> None:
    bench = commands.add_parser(
        "bench", help="measure throughput, latency or a server", description="Measure a pipeline, or a server."
    )
    modes = bench.add_subparsers(title="what to measure", metavar="MODE", required=True)

    summary = "finish many prompts as fast as possible"
    throughput = add_command(modes, "throughput", summary, _THROUGHPUT_USAGE, _THROUGHPUT_EXAMPLE)
    throughput.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"how many prompts (default: all of --prompt-file, else {DEFAULT_NUM_PROMPTS})",
    )
    throughput.add_argument("--prompt-file", metavar="FILE", help="one prompt per line, instead of random tokens")
    _add_count(throughput, "--num-warmup", 4, "prompts to warm up with")
    _add_common_flags(throughput)
    throughput.set_defaults(run=run_throughput)

    summary = "time single batches, one after the other"
    latency = add_command(modes, "latency", summary, _LATENCY_USAGE, _LATENCY_EXAMPLE)
    _add_count(latency, "--batch-size", 1, "prompts per batch")
    _add_count(latency, "--num-iters", 10, "batches to time")
    _add_count(latency, "--num-warmup", 2, "batches to warm up with")
    _add_common_flags(latency)
    latency.set_defaults(run=run_latency, prompt_file=None)

    bench_serve.add_parser(modes)


def _add_count(parser: argparse.ArgumentParser, flag: str, default: int, text: str, metavar: str = "N") -> None:
    parser.add_argument(flag, type=int, default=default, metavar=metavar, help=f"{text} (default: {default})")


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    _add_count(parser, "--input-len", 128, "tokens per random prompt", "TOKENS")
    _add_count(parser, "--output-len", 64, "tokens per answer", "TOKENS")
    parser.add_argument("--output", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--timeline", metavar="FILE", help="write a Chrome trace of all stages, for ui.perfetto.dev")
    add_engine_flags(parser)
    # `ignore_eos` None: decided by where the prompts come from.
    add_sampling_flags(parser, {"temperature": 0.0}, skip=("n", "max_tokens", "min_tokens", "ignore_eos"))
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="go on to --output-len past the end-of-sequence token (default: on for random prompts)",
    )


def run_throughput(args: argparse.Namespace, open_llm: OpenLLM = open_llm) -> int:
    config = _checked_config(args, ("num_prompts", 1), ("num_warmup", 0))
    lines = read_prompts(args.prompt_file) if args.prompt_file else None
    if lines is not None and args.num_prompts is not None and args.num_prompts > len(lines):
        raise ConfigError(f"--num-prompts is {args.num_prompts}, but {args.prompt_file} holds {len(lines)}; lower it")
    with open_llm(config) as llm:
        random_prompts = RandomPrompts(llm, args)
        params = _sampling_params(args, llm)
        random_prompts.warm_up(llm, params, args.num_warmup)
        prompts: Prompts
        if lines is None:
            prompts = random_prompts.draw(args.num_prompts or DEFAULT_NUM_PROMPTS)
        else:
            prompts = lines[: args.num_prompts]
        start_s = llm.clock.now_s()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        end_s = llm.clock.now_s()
        spans = llm.spans(start_s)
        advice = llm.advice(spans, min(len(prompts), config.max_num_seqs))
    return _finish(args, config, "throughput", outputs, [end_s - start_s], spans, advice)


def run_latency(args: argparse.Namespace, open_llm: OpenLLM = open_llm) -> int:
    config = _checked_config(args, ("batch_size", 1), ("num_iters", 1), ("num_warmup", 0))
    outputs: list[RequestOutput] = []
    batch_times_s: list[float] = []
    with open_llm(config) as llm:
        random_prompts = RandomPrompts(llm, args)
        params = _sampling_params(args, llm)
        for _ in range(args.num_warmup):
            random_prompts.warm_up(llm, params, args.batch_size)
        first_s = llm.clock.now_s()
        for _ in tqdm(range(args.num_iters), desc="batches", disable=None, leave=False):
            prompts = random_prompts.draw(args.batch_size)
            start_s = llm.clock.now_s()
            outputs += llm.generate(prompts, params, use_tqdm=False)
            batch_times_s.append(llm.clock.now_s() - start_s)
        spans = llm.spans(first_s)
        advice = llm.advice(spans, min(args.batch_size, config.max_num_seqs))
    return _finish(args, config, "latency", outputs, batch_times_s, spans, advice)


class RandomPrompts:
    """Prompts of random tokens, never the same twice, so that the prefix cache does not help. Seeded by --seed."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        wanted = args.input_len + args.output_len
        if not args.prompt_file and wanted > llm.max_model_len:
            raise ConfigError(
                f"--input-len {args.input_len} and --output-len {args.output_len} make {wanted} tokens, "
                f"above the model's {llm.max_model_len}; lower one of them"
            )
        self._random = random.Random(args.seed)
        self._vocab_size = llm.spec.vocab_size
        self._input_len = min(args.input_len, llm.max_model_len - 1)

    def draw(self, num_prompts: int) -> list[list[int]]:
        return [self._random.choices(range(self._vocab_size), k=self._input_len) for _ in range(num_prompts)]

    def warm_up(self, llm: LLM, params: SamplingParams, num_prompts: int) -> None:
        if num_prompts:
            max_tokens = min(WARMUP_MAX_TOKENS, params.max_tokens or WARMUP_MAX_TOKENS)
            short = msgspec.structs.replace(params, max_tokens=max_tokens)
            llm.generate(self.draw(num_prompts), short, use_tqdm=False)


def _checked_config(args: argparse.Namespace, *lowest: tuple[str, int]) -> EngineConfig:
    """The engine's configuration, once everything that can be refused before the start was checked."""
    for name, smallest in (*lowest, ("input_len", 1), ("output_len", 1)):
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {smallest}")
    check_can_write("--output", args.output)
    check_can_write("--timeline", args.timeline)
    if args.output is not None and args.output == args.timeline:
        raise ConfigError(f"--output and --timeline are both {args.output}; give two files")
    check_sampling_flags(args)
    return engine_config_from_args(args)


def _sampling_params(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    ignore_eos = args.prompt_file is None if args.ignore_eos is None else args.ignore_eos
    base = msgspec.structs.replace(llm.default_sampling_params(), max_tokens=args.output_len)
    return msgspec.structs.replace(sampling_params_from_args(args, base), ignore_eos=ignore_eos)


def _finish(
    args: argparse.Namespace,
    config: EngineConfig,
    mode: str,
    outputs: list[RequestOutput],
    batch_times_s: list[float],
    spans: list[Span],
    advice: list[str],
) -> int:
    """Print and write what was measured. Returns: the exit status, 1 if a file could not be written."""
    pipeline = analyse(spans, config.pipeline_parallel_size)
    decodes = [way for way in journeys(spans, config.pipeline_parallel_size) if not way.has_prompt_tokens]
    decode_way = mean_split(decodes, config.pipeline_parallel_size)
    report = BenchReport(mode, config, outputs, batch_times_s, pipeline, advice, decode_way)
    print(format_bench_report(report))
    status = 0
    if args.output:
        result = msgspec.json.format(msgspec.json.encode(report.as_json())) + b"\n"
        if written("--output", args.output, lambda: Path(args.output).write_bytes(result)):
            print(f"result: {args.output}")
        else:
            status = 1
    if args.timeline:
        if written("--timeline", args.timeline, lambda: write_chrome_trace(args.timeline, spans)):
            print(f"timeline: {args.timeline} (opens in ui.perfetto.dev)")
        else:
            status = 1
    return status
