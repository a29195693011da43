"""Commands as a user types them, without the seconds of a start: launch.sh, whose Python only says what it is given.

What launch.sh would have started then runs in this process.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import warnings
from itertools import takewhile
from pathlib import Path
from unittest import mock

import forked

from zerolab.run import process_group
from zerolab.run.ranks import ROOT

SAYS_WHAT_IT_IS_GIVEN = """#!/bin/bash
[ "$1" != -c ] || exit 0  # whether torch is there
printf '%s\\n' "${{ZERO_PREFLIGHT:-}}" "$@" . >>{told}
[ -z "${{ZERO_PREFLIGHT:-}}" ] || printf '3\\nbecause\\n'
"""


def starts(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[tuple[str, list[str]]]]:
    """How launch.sh ended, and (ZERO_PREFLIGHT or "", arguments) of each start of Python on the way."""
    with tempfile.TemporaryDirectory() as folder:
        fake, told = Path(folder, "python"), Path(folder, "told")
        fake.write_text(SAYS_WHAT_IT_IS_GIVEN.format(told=told))
        fake.chmod(0o755)
        told.touch()
        ended = forked.launch(*arguments, **{"PYTHON": str(fake), **environment})
        calls = [call.split("\n") for call in told.read_text().split("\n.\n")[:-1]]
        return ended, [(preflight, words) for preflight, *words in calls]


def typed(line: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of what `./launch.sh LINE` starts first; NAME=value before it, as in a shell.

    Where launch.sh itself refuses the line, they are its own.
    """
    words = shlex.split(line)
    environment = dict(word.split("=", 1) for word in takewhile(re.compile("[A-Z_]+=").match, words))
    ended, calls = starts(*words[len(environment) :], **environment)
    if not calls:
        return ended.returncode, ended.stdout, ended.stderr
    preflight, program = calls[0]
    status, out, err = _run(program, environment | {"ZERO_PREFLIGHT": preflight} if preflight else environment)
    return (2 if preflight and status else status), out, err  # launch.sh makes it 2


def _run(program: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """`python PROGRAM`, a script or `-m module` and its arguments, in this process."""
    out, err, module = io.StringIO(), io.StringIO(), program[0] == "-m"
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", program[module:]),
        mock.patch.object(os, "_exit", sys.exit),
        mock.patch.object(process_group, "record", lambda main: main),  # torch's: it would have crashes told to `err`
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(action="ignore"),  # that the module is imported already
    ):
        try:
            if module:
                runpy.run_module(program[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program[0], run_name="__main__")
            status = 0
        except SystemExit as leaving:
            status = leaving.code or 0
    return status, out.getvalue(), err.getvalue()
