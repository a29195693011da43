"""zerolab/run/pool.py: a rank ends when nobody waits for it."""

from zerolab.run import pool


def test_a_rank_of_a_pool_ends_quietly_if_nobody_waits_for_its_result():
    """For example because a check was interrupted. A rank needs seconds to start, so the pipe is closed before."""
    one = pool.Pool(1, timeout=60)
    one.pipes[0].send((int, (), {}))
    one.pipes[0].close()
    one.processes[0].join(60)
    assert one.processes[0].exitcode == 0  # and not 1, of a BrokenPipeError whose traceback is printed
    one.kill()
