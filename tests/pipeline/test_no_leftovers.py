"""The law: however an engine ends, its stages' processes and the folder of their sockets end with it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipeline.failing import SETTINGS, Program, stop
from tests.tiny_models import TinyModel

pytestmark = pytest.mark.timeout(60)

_OPENING = f"""
import os, signal, sys, threading
from stageline import LLM, SamplingParams
model = sys.argv[1]
settings = dict({SETTINGS!r}, pipeline_parallel_size=2)
long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
def say(word):
    print(word, flush=True)
def wait_for_the_test():
    sys.stdin.read()
"""

IDLE = _OPENING + """
with LLM(model, **settings) as llm:
    llm.generate([1, 2], long)
    say("ready")
    wait_for_the_test()
"""

COMPUTING = _OPENING + """
with LLM(model, **settings) as llm:
    while True:
        for output in llm.stream([1, 2], long):
            if output.outputs[0].token_ids[20:] == []:
                say("ready")
"""

LOADING = _OPENING + """
def told(stage_index, num_bytes_read, num_bytes_total):
    say("ready")
    wait_for_the_test()
LLM(model, on_load_progress=told, **settings)
"""

# The stages' processes are there, but have not come to import torch.
_TELLING = _OPENING + """
import stageline.engine.startup as startup
class TellingExecutor(startup.MultiProcessExecutor):
    def load(self, on_progress=None):
        say("ready")
        return super().load(on_progress)
startup.MultiProcessExecutor = TellingExecutor
"""

STARTING = _TELLING + """
LLM(model, **settings)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel().write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(model: str) -> Iterator[Callable[[str], Program]]:
    """Runs a program in a home of its own. Give it the code; it is destroyed afterwards."""
    programs = []
    with tempfile.TemporaryDirectory(prefix="home-") as home:

        def run(code: str) -> Program:
            programs.append(Program(code, model, home=Path(home)))
            return programs[-1]

        yield run
        for program in programs:
            program.destroy()


Run = Callable[[str], Program]


@pytest.mark.parametrize("code", [STARTING, LOADING, IDLE, COMPUTING], ids=["starting", "loading", "idle", "computing"])
def test_stages_leave_when_their_engine_is_killed(run: Run, code: str) -> None:
    program = run(code)
    program.wait_for_line("ready")
    assert len(program.workers) == 2 and len(list(program.home.iterdir())) == 1
    program.process.kill()
    assert program.leftovers() == []


@pytest.mark.parametrize("code", [LOADING, COMPUTING], ids=["loading", "computing"])
def test_stopped_stages_leave_when_their_engine_is_killed(run: Run, code: str) -> None:
    program = run(code)
    program.wait_for_line("ready")
    for pid in program.workers:
        stop(pid)
    program.process.kill()
    assert program.leftovers() == []


def test_stages_leave_when_their_engine_is_killed_and_a_process_forked_off_it_lives_on(run: Run) -> None:
    program = run(
        IDLE.replace('say("ready")', 'if os.fork() == 0:\n        signal.pause()\n    say("ready")')
    )
    program.wait_for_line("ready")
    assert len(program.workers) == 2
    program.process.kill()
    try:
        assert program.leftovers() == []
    finally:
        os.killpg(program.process.pid, signal.SIGKILL)


def test_stages_leave_when_their_engine_is_terminated(run: Run) -> None:
    program = run(COMPUTING)
    program.wait_for_line("ready")
    program.process.terminate()
    assert program.finish() == (-signal.SIGTERM, "")
    assert program.leftovers() == []


COMMAND = """
from stageline.cli.main import main
flags = "--prompt a --prompt b --max-tokens 480 --ignore-eos -pp 2 --no-bind-cores --kv-cache-memory 8MiB".split()
sys.exit(main(["generate", model, *flags]))
"""


def _telling_command(when: str) -> str:
    """`stageline generate`, with a word before its engine loads or after the first step of its loop."""
    if when == "loading":
        return _TELLING + COMMAND
    return _OPENING + f"""
import stageline.engine.core as core
class TellingCore(core.EngineCore):
    def step(self):
        updates = super().step()
        say("ready")
        return updates
import stageline.engine.startup as startup
startup.EngineCore = TellingCore
{COMMAND}"""


@pytest.mark.parametrize("when", ["loading", "generating"])
def test_ctrl_c_ends_the_command_quietly_and_leaves_nothing(run: Run, when: str) -> None:
    program = run(_telling_command(when))
    program.wait_for_line("ready")
    assert len(program.workers) == 2
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.finish() == (130, "")
    assert program.leftovers() == []


ENDINGS = {
    "an exception in the user's code": (
        'with LLM(model, **settings) as llm:\n    next(iter(llm.stream([1], long)))\n    say("ready")\n'
        "    wait_for_the_test()\n    1 / 0",
        1,
    ),
    "an engine that is never closed": (
        'llm = LLM(model, **settings)\nstream = iter(llm.stream([1], long))\nnext(stream)\nsay("ready")\n'
        "wait_for_the_test()",
        0,
    ),
    "an engine that nobody refers to any more": (
        'llm = LLM(model, **settings)\nsay("ready")\nwait_for_the_test()\ndel llm',
        0,
    ),
    "a thread that ends after it made the engine": (
        "made = []\nmaker = threading.Thread(target=lambda: made.append(LLM(model, **settings)))\nmaker.start()\n"
        'maker.join()\nsay("ready")\nwait_for_the_test()\n'
        "assert len(made[0].generate([1], long)[0].outputs[0].token_ids) == 400",
        0,
    ),
    "a thread that still generates when all others have ended": (
        "llm = LLM(model, **settings)\ndef work():\n    while True:\n        for _ in llm.stream([1], long):\n"
        "            begun.set()\nbegun = threading.Event()\nthreading.excepthook = lambda told: None\n"
        'threading.Thread(target=work, daemon=True).start()\nbegun.wait()\nsay("ready")\nwait_for_the_test()',
        0,
    ),
    "two engines at once": (
        "one, two = LLM(model, **settings), LLM(model, **settings)\n"
        "streams = [iter(one.stream([1], long)), iter(two.stream([1], long))]\n"
        "for _ in range(30):\n    assert len({tuple(next(s).outputs[0].token_ids) for s in streams}) == 1\n"
        'one.close()\nassert len(list(streams[1])) > 300\nsay("ready")\nwait_for_the_test()',
        0,
    ),
    "sys.exit": (
        'llm = LLM(model, **settings)\nnext(iter(llm.stream([1], long)))\nsay("ready")\nwait_for_the_test()\n'
        "sys.exit(7)",
        7,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_in_order_whatever_it_did(run: Run, ending: str) -> None:
    """One stage is enough: it is the program that ends."""
    code, status = ENDINGS[ending]
    program = run(_OPENING + "settings['pipeline_parallel_size'] = 1\n" + code)
    program.wait_for_line("ready")
    assert len(program.workers) == 1
    found_status, stderr = program.finish()
    assert found_status == status, stderr
    assert ("ZeroDivisionError" in stderr) == (status == 1)
    assert stderr == "" or status == 1
    assert program.leftovers() == []
