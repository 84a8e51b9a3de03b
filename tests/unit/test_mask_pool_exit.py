"""The law: the interpreter does not leave while a mask is being computed, nor waits for those that nobody has begun."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, sys, threading
from stageline.grammar.mask_pool import Guide, MaskPool

begun = threading.Event()

class Source:
    def new_matcher(self, spec):
        begun.set()
        # Longer than close() waits, and without the interpreter's lock, as a mask is computed.
        hashlib.pbkdf2_hmac("sha512", b"", b"", 5_000_000)
        print("computed", spec, flush=True)
        return None, None

pool = MaskPool(Source(), lambda: None)
for number in range(3):
    pool.compute(Guide(number))
begun.wait()
"""


@pytest.mark.parametrize("last_words", ["", "pool.close()", "sys.exit(3)", "del pool; raise ValueError"])
def test_a_program_ends_after_the_mask_that_is_being_computed(last_words: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + last_words], capture_output=True, text=True, timeout=120)
    assert done.returncode == {"sys.exit(3)": 3, "del pool; raise ValueError": 1}.get(last_words, 0), done.stderr
    assert done.stdout == "computed 0\n"
