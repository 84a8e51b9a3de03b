"""The law: the interpreter does not leave while a mask is being computed, nor waits for those that nobody has begun."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, hashlib, sys, threading
from stageline.grammar.mask_pool import Guide, MaskPool

begun, leaving = threading.Event(), threading.Event()

class Source:
    def new_matcher(self, spec):
        begun.set()
        leaving.wait()
        # Longer than an interpreter takes to leave, and without its lock, as a mask is computed.
        hashlib.pbkdf2_hmac("sha512", b"", b"", 500_000)
        print("computed", spec, flush=True)
        return None, None

pool = MaskPool(Source(), lambda: None)
for number in range(3):
    pool.compute(Guide(number))
begun.wait()
atexit.register(leaving.set)  # the last one registered is called first
"""


LAST_WORDS = {"": 0, "pool.close()": 0, "sys.exit(3)": 3, "del pool; raise ValueError": 1}
"""How programs end, and the exit status of each."""


def test_a_program_ends_after_the_mask_that_is_being_computed() -> None:
    commands = [[sys.executable, "-c", PROGRAM + words] for words in LAST_WORDS]
    pipe = subprocess.PIPE
    programs = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands]
    said = [program.communicate(timeout=120) for program in programs]
    for program, (stdout, stderr), status in zip(programs, said, LAST_WORDS.values(), strict=True):
        assert program.returncode == status, stderr
        assert stdout == "computed 0\n"
