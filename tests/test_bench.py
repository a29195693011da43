"""The benchmark: what it compares. That it runs is held by tests/test_report.py. (No test asserts a time.)"""

import pytest

from harness.measure import bench


def test_ratios_are_of_medians_of_one_run():
    times = {"ddp": [10.0, 20.0, 90.0], "zero3": [30.0, 10.0, 50.0], "fsdp2": [60.0, 60.0, 60.0]}
    rows = {line.split()[0]: line.split()[1:] for line in bench.table(times, "ddp").split("\n")[1:]}
    assert rows["ddp"] == ["20.0", "10.0", "90.0", "1.00"]
    assert rows["zero3"] == ["30.0", "10.0", "50.0", "1.50", "0.50", "x", "fsdp2"]
    assert rows["fsdp2"][3] == "3.00"


@pytest.mark.parametrize(
    "wrong, said",
    (
        (["--width", "10", "--heads", "4"], "got 10 and 4"),
        (["--layers", "0"], "got 0"),
        (["--vocab", "255"], "--vocab must be 256 or more"),
        (["--engines", "zero4"], "zero4"),
        (["--host", "--profile", "zero9"], "zero9"),
    ),
    ids=str,
)
def test_options_that_cannot_work(wrong, said):
    with pytest.raises(ValueError, match=said):
        bench.arguments(wrong)
