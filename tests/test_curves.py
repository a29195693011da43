"""The training runs of docs/train.md, small."""

import json

import pytest

from zerolab.measure import curves


@pytest.mark.long
def test_all_runs_train_alike_also_after_a_kill(tmp_path):
    file = tmp_path / "curves.json"
    curves.main([str(tmp_path / "runs"), "--preset", "toy", "--steps", "48", "--json", str(file)])
    runs = json.loads(file.read_text())["runs"]
    ddp = runs["DDP"]["losses"]
    assert len(ddp) == 48 and ddp[-1] < 0.9 * ddp[0]
    for name, run in runs.items():
        apart = max(abs(loss - other) for loss, other in zip(run["losses"], ddp, strict=True))
        assert (apart > 1e-3) if "Muon" in name else (apart < 1e-4), name
    (continued,) = runs["ZeRO-3, killed, then ZeRO-2"]["continued"]
    assert continued in (24, 28, 32), (
        "the newest checkpoint before the kill, which comes after step 26 or a little later"
    )
    assert len({tuple(run["text"]) for name, run in runs.items() if "Muon" not in name}) == 1
