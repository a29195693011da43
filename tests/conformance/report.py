"""The report of `conform`: a table of the outcomes, the tests and their reasons, and a JSON file."""

import contextlib
import json
import os
import re
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import torch

from conformance.on_ranks import WORST
from zerolab.measure import tables
from zerolab.run import json_file

OUTCOMES = ("correct", "refused", "wrong", "crash", "hang", "not applicable")
SIGNS = {"refused": "refused", "wrong": "WRONG", "crash": "CRASH", "hang": "HANG"}
BAD = ("wrong", "crash", "hang")


class Report:
    """A pytest plugin. It collects {engine: {test: {"outcome", "says"}}}, of all cases of a test the worst."""

    def __init__(self, config):
        self.config = config
        self.engines = {}
        self.asked = None  # the engine of the last test

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items):
        """One engine after the other, and on each the numbers of ranks one after the other."""
        engines = self.config.getoption("engine")

        def place(item):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if "engine" not in params:
                return len(engines), 0
            return engines.index(params["engine"]), params["ranks"]

        items[:] = [item for item in items if place(item)[0] < len(engines)]  # without the command's own tests
        items.sort(key=place)

    def pytest_runtest_setup(self, item):
        engine = item.callspec.params["engine"]
        if engine != self.asked:
            self.asked = engine
            names = self.config.getoption("engine")
            self.say(f"{self.name_of(engine)} ({names.index(engine) + 1} of {len(names)})")

    def say(self, line):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(line)

    @staticmethod
    def name_of(engine):
        return Path(engine).stem if os.sep in engine else engine

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown" or (report.when == "setup" and report.outcome == "passed"):
            return
        name, _, case = report.nodeid.partition("[")
        name = f"{Path(name.split('::')[0]).stem.removeprefix('test_')}::{name.split('::')[1].removeprefix('test_')}"
        found = dict(report.user_properties)
        engine = found.get("engine")
        outcome, message = found.get("outcome"), found.get("message", "")
        if outcome is None:
            skipped = report.outcome == "skipped"
            outcome = "not applicable" if skipped else "crash"
            message = report.longrepr[2].removeprefix("Skipped: ") if skipped else report.longreprtext
        if outcome in BAD or outcome == "refused":
            message = f"{message}\ncase: [{case}"
        tests = self.engines.setdefault(self.name_of(engine), {})
        one = {"outcome": outcome, "says": without_places(message)}
        if outcome in BAD:
            self.say(f"  {name}[{case}: {SIGNS[outcome]}: {main_line(one['says'])}")
        if name not in tests or WORST.index(outcome) < WORST.index(tests[name]["outcome"]):
            tests[name] = one

    def pytest_sessionfinish(self):
        """The results so far are written, also after Ctrl-C."""
        path = self.config.getoption("conform_json")
        if path:
            found = about() | {"ranks": self.config.getoption("ranks"), "engines": self.engines}
            Path(path).write_text(json.dumps(found, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("conformance")
        for line in self.text().split("\n"):
            terminalreporter.write_line(line)

    def text(self):
        """The counts of each engine, what is not correct, the tests that are correct, and why others do not apply."""
        rows = [["engine", *OUTCOMES]]
        for engine, tests in self.engines.items():
            counts = Counter(found["outcome"] for found in tests.values())
            rows.append([engine, *(str(counts[outcome]) for outcome in OUTCOMES)])
        lines = tables.text(rows)
        for engine, tests in self.engines.items():
            for name, found in sorted(tests.items()):
                if found["outcome"] in (*BAD, "refused"):
                    lines += ["", f"{engine}, {name}: {SIGNS[found['outcome']]}: {main_line(found['says'])}"]
        for engine, tests in self.engines.items():
            correct = [name for name, found in sorted(tests.items()) if found["outcome"] == "correct"]
            lines += ["", f"{engine}, correct: {', '.join(correct) or 'no test'}"]
            reasons = Counter(found["says"] for found in tests.values() if found["outcome"] == "not applicable")
            for reason, count in reasons.items():
                do = "tests do" if count > 1 else "test does"
                lines.append(f"{engine}: {count} {do} not apply: {reason}")
        return tables.wrapped("\n".join(lines))


def main_line(message):
    """The line that says what is wrong, with the ranks: the first `E` of pytest's, or the first line."""
    first = (message.splitlines() or [""])[0]
    errors = [line[1:].strip() for line in message.splitlines() if line.startswith("E ")]
    ranks = re.match(r"rank [\d, ]+: ", first)
    if errors and ranks:
        return (ranks[0] + errors[0])[:300]
    return (errors or [first])[0][:300]


def without_places(message):
    """The message without details of this machine: only the names of files stay, and no addresses."""
    message = re.sub(r"\b0x[0-9a-f]{6,}", "0x...", message)
    return re.sub(r"(?<![\w:/.])/[^\s\"',:;()]+", lambda path: Path(path[0]).name, message)


def about():
    """Where and on which code the tests ran."""
    found = json_file.about(torch.device("cpu"), "conform")
    versions = {"python": found.pop("python"), "torch": found.pop("torch")}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["deepspeed"] = metadata.version("deepspeed")
    return {"versions": versions} | found
