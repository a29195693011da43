"""Run the tests in tests/conformance with any engine: does it train correctly, raise an error, or is it silently wrong?

./launch.sh conform                  our engines, the chapters, torch's own, DeepSpeed if installed
./launch.sh conform fsdp2 mine.py 3  these, on three ranks where a test supports it (default: two)
./launch.sh conform zero2.py zero2   a chapter, and the engine that builds on it

It is pytest. Each test runs on ranks over gloo, and has one of these outcomes for each engine: "correct", "refused" (an
error with a message), "wrong" (it trains, but the results differ), "crash" (an error without a message, or the process
died), "hang", or "not applicable" (the engine does not document the feature). The exit status is 0 if no engine is
wrong, crashes or hangs.
"""

import os
import sys
from pathlib import Path

from zerolab.run.ranks import ROOT

FOLDER = ROOT / "tests" / "conformance"
PATIENCE = 20  # seconds that a collective may take; then it is a hang


def engines_of(given):
    """The engines by the names and absolute paths that `--engine` of pytest gets. Raises ValueError."""
    from zerolab.run import engine_file, engines
    from zerolab.run import names as registered

    chapters = [f"{name}.py" for name in engines.CHAPTERS]
    names = given or [*chapters, *filter(engines.installed, registered.engines_of("conform"))]
    found = []
    for name in names:
        if name.endswith(".py") and name not in chapters:
            path = str(Path(name).resolve())
            engine_file.enter([path])
            found.append(path)
        else:
            found += [name] if name in chapters else engines.chosen(name, "conform")
    return list(dict.fromkeys(found))


def main():
    from tests.conformance import conform_options
    from zerolab.run.command_line import one_line

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are connected by gloo, and compute on the CPU
    with one_line(ValueError, OSError):
        options = conform_options.arguments()
        names = engines_of(options.engines)
    import pytest

    arguments = [str(FOLDER), "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    arguments += ["-q", "--tb=no", "-rN", "--ranks", str(options.ranks), "--patience", str(PATIENCE)]
    for name in names:
        arguments += ["--engine", name]
    arguments += ["-k", options.only] if options.only else []
    arguments += ["-m", ""] if options.thorough else []
    arguments += ["--conform-json", str(Path(options.json).resolve())] if options.json else []
    sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    main()
