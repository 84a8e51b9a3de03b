"""What is measured side by side: each side is a process that says when it is ready and then runs a workload on demand.

A side reads lines from its standard input, each a JSON workload, and answers each with a JSON line of times. While one
side runs, the others are stopped by SIGSTOP, so that an idle peer that spins cannot disturb it.
"""
