"""`python processes.py`: imports what commands need once, then runs each command line in a process forked off it.

Many real processes thus cost one start. Over the socket that is its standard input it is sent a line of JSON with the
arguments and the ends of the pipes that become standard output and standard error; it answers with the child's process
id, and with its exit code once it has ended.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Child:
    """A command that runs in a process of its own."""

    def __init__(self, link: socket.socket, answers: IO[str], args: list[str]):
        (self._out, out), (self._err, err) = os.pipe(), os.pipe()
        socket.send_fds(link, [f"{json.dumps(args)}\n".encode()], [out, err])
        os.close(out)
        os.close(err)
        self.stdout, self.stderr = os.fdopen(self._out, encoding="utf-8"), os.fdopen(self._err, encoding="utf-8")
        self._answers = answers
        self.pid = int(answers.readline())

    def wait(self) -> int:
        """Its exit code."""
        return int(self._answers.readline())


@contextmanager
def starter() -> Iterator:
    """`start(*args)` -> Child; one after the other."""
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A pipe as output from the start: Python then takes what a child's output is replaced by for one, too.
    command = [sys.executable, str(Path(__file__))]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, env=environment)
    theirs.close()
    with process, ours, ours.makefile("r", encoding="utf-8") as answers:
        yield lambda *args: Child(ours, answers, [str(arg) for arg in args])


def serve() -> None:
    import signal

    # What a child would import, before the fork.
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    import forerun.cli.answers
    import forerun.target.load  # noqa: F401
    from forerun.cli.main import main

    # A suite run in the background of a shell inherits SIGINT as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    link = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    while True:
        message, pipes, *_ = socket.recv_fds(link, 1 << 16, 2)
        if not message:
            return
        child = os.fork()
        if child == 0:
            link.close()
            for number, pipe in enumerate(pipes, 1):
                os.dup2(pipe, number)
                os.close(pipe)
            sys.exit(main(json.loads(message)))
        for pipe in pipes:
            os.close(pipe)
        link.sendall(f"{child}\n".encode())
        link.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


if __name__ == "__main__":
    serve()
