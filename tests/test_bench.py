"""The benchmark: what it compares. That it runs is held by tests/test_report.py. (No test asserts a time.)"""

from harness.measure import bench


def test_ratios_are_of_medians_of_one_run():
    times = {"ddp": [10.0, 20.0, 90.0], "zero3": [30.0, 10.0, 50.0], "fsdp2": [60.0, 60.0, 60.0]}
    rows = {line.split()[0]: line.split()[1:] for line in bench.table(times, "ddp").split("\n")[1:]}
    assert rows["ddp"] == ["20.0", "10.0", "90.0", "1.00"]
    assert rows["zero3"] == ["30.0", "10.0", "50.0", "1.50", "0.50", "x", "fsdp2"]
    assert rows["fsdp2"][3] == "3.00"
