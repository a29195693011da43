"""The report of `conform`: a table of tests by engines, the reasons, and a JSON file."""

import contextlib
import json
import os
import platform
import re
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import torch

from conformance.on_ranks import WORST

OUTCOMES = ("correct", "refused", "wrong", "crash", "hang", "not applicable")
SIGNS = dict(zip(OUTCOMES, ("ok", "refused", "WRONG", "CRASH", "HANG", "-")))
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
            found = {"versions": versions(), "ranks": self.config.getoption("ranks"), "engines": self.engines}
            Path(path).write_text(json.dumps(found, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("conformance")
        terminalreporter.write_line(self.table())
        for engine, tests in self.engines.items():
            for name, found in tests.items():
                if found["outcome"] in (*BAD, "refused"):
                    first = main_line(found["says"])
                    terminalreporter.write_line(f"{engine}, {name}: {SIGNS[found['outcome']]}: {first}")
        reasons = Counter()
        for engine, tests in self.engines.items():
            reasons.update((engine, found["says"]) for found in tests.values() if found["outcome"] == "not applicable")
        for (engine, reason), count in reasons.items():
            terminalreporter.write_line(f"{engine}: {count} tests do not apply: {reason}")

    def table(self):
        rows = [["test", *self.engines]]
        names = dict.fromkeys(name for tests in self.engines.values() for name in tests)
        for name in sorted(names):
            outcomes = [tests.get(name, {}).get("outcome") for tests in self.engines.values()]
            rows.append([name, *(SIGNS.get(outcome, "") for outcome in outcomes)])
        counts = [Counter(found["outcome"] for found in tests.values()) for tests in self.engines.values()]
        rows += [[f"in all: {outcome}", *(str(count[outcome]) for count in counts)] for outcome in OUTCOMES]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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


def versions():
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["deepspeed"] = metadata.version("deepspeed")
    return found
