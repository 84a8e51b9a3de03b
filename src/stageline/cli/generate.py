"""`stageline generate`: complete prompts and print what came out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

import msgspec

from stageline.cli.opening import OpenLLM, SubParsers, add_command, open_llm, read_prompts
from stageline.cli.sampling_flags import add_sampling_flags, check_sampling_flags, sampling_params_from_args
from stageline.config.flags import add_engine_flags, engine_config_from_args
from stageline.errors import ConfigError
from stageline.outputs import RequestOutput
from stageline.sampling import UpTo

DEFAULT_MAX_TOKENS = UpTo(256)
_USAGE = "stageline generate MODEL --prompt TEXT [--prompt TEXT ...] [-pp STAGES] [options]"
_EXAMPLE = """example:
  stageline generate ./SmolLM2-135M-Instruct --prompt "The capital of France is" -pp 2 --temperature 0
"""


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "generate", "complete one or more prompts", _USAGE, _EXAMPLE)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt (may be repeated)")
    parser.add_argument("--prompt-file", metavar="FILE", help="a file with one prompt per line; - is standard input")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message: apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt instead of the text")
    add_engine_flags(parser)
    add_sampling_flags(parser, defaults={"max_tokens": DEFAULT_MAX_TOKENS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, open_llm: OpenLLM = open_llm) -> int:
    config = engine_config_from_args(args)
    check_sampling_flags(args)
    prompts: list[str] = [*args.prompt, *(read_prompts(args.prompt_file) if args.prompt_file else [])]
    if not prompts:
        raise ConfigError("no prompt; give --prompt TEXT or --prompt-file FILE")
    with open_llm(config) as llm:
        params = sampling_params_from_args(args, llm.default_sampling_params())
        use_tqdm = sys.stderr.isatty()
        if args.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(conversations, params, use_tqdm=use_tqdm)
        else:
            outputs = llm.generate(list(prompts), params, use_tqdm=use_tqdm)
    if args.json:
        _print_json(outputs, sys.stdout)
    else:
        _print_text(prompts, outputs, sys.stdout)
    return 0


def _print_json(outputs: Sequence[RequestOutput], stream: TextIO) -> None:
    for output in outputs:
        print(msgspec.json.encode(output).decode(), file=stream)


def _print_text(prompts: Sequence[str], outputs: Sequence[RequestOutput], stream: TextIO) -> None:
    """A single completion is printed bare, so that it can be piped on; several get their prompts as headings."""
    if len(outputs) == 1 and len(outputs[0].outputs) == 1:
        print(outputs[0].outputs[0].text, file=stream)
        return
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"=== {prompt}", file=stream)
        for completion in output.outputs:
            if len(output.outputs) > 1:
                print(f"--- completion {completion.index}", file=stream)
            print(completion.text, file=stream)
        print(file=stream)
