"""Runs commands as a user types them after ./launch.sh, but in this process, because starting Python takes seconds."""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
import warnings
from itertools import takewhile
from unittest import mock

from zerolab.run import launch, process_group
from zerolab.run.ranks import ROOT


class Started(Exception):
    """Raised in place of starting Python, with its command line."""


def mistake(line: str) -> str:
    """The one line with which `./launch.sh LINE` ends, before it has printed or started anything."""
    status, printed, lines = typed(line)
    assert status == 2 and printed == "", lines
    (message,) = lines.splitlines()
    return message


def note(*line) -> None:
    raise Started(list(line))


def python_arguments(*words: str, **environment: str) -> list[str]:
    """The arguments of the Python that `./launch.sh WORDS` starts. SystemExit if it starts none."""
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(launch, "environment", lambda command: "python"),
        mock.patch.object(launch, "replace_by", note),
        mock.patch.object(launch, "start", lambda line: note(*line)),
        contextlib.chdir(ROOT),
    ):
        try:
            status = launch.main(list(words))
        except Started as line:
            return line.args[0][1:]
        raise SystemExit(status)


def typed(line: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `./launch.sh LINE`, before ranks start. NAME=value works as in a shell."""
    words = shlex.split(line)
    environment = dict(word.split("=", 1) for word in takewhile(re.compile("[A-Z_]+=").match, words))
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(os, "_exit", sys.exit),
        mock.patch.object(process_group.ErrorHandler, "initialize"),  # it would write crashes to `err`
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(action="ignore"),  # the module may be imported already
    ):
        try:
            program = python_arguments(*words[len(environment) :])
            out.seek(0)
            out.truncate()  # which has the command line of torchrun
            start_of_module = program.index("-m", program.index("-m") + 1 if "zerolab.run.torchrun" in program else 0)
            module, *arguments = program[start_of_module + 1 :]
            with mock.patch.object(sys, "argv", [module, *arguments]):
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as leaving:
            status = leaving.code or 0
    return status, out.getvalue(), err.getvalue()
