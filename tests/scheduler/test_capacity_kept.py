"""A limit that is lowered while running is a limit, not the size of what the process was built for."""

from __future__ import annotations

from tests.scheduler.isolated import Isolated, limits, solo_tokens


def test_a_lowered_limit_of_running_requests_outlives_a_lost_runner_and_can_be_raised_again() -> None:
    isolated = Isolated(64, max_num_seqs=8)
    isolated.control("set", max_num_seqs="2")
    for request_id in range(1, 8):
        isolated.add(request_id, 8, max_tokens=12)
    isolated.step()
    isolated.lose_runner()
    isolated.step()
    assert len(isolated.running()) == 2
    isolated.control("set", max_num_seqs="7")
    isolated.step()
    assert len(isolated.running()) == 7
    isolated.drain()
    assert isolated.tokens == {i: solo_tokens(i, 8, 12) for i in range(1, 8)}


def test_a_smaller_runner_bounds_the_limit_for_as_long_as_it_is_there() -> None:
    isolated = Isolated(64, max_num_seqs=8)
    isolated.lose_runner(limits(64, max_num_seqs=3))
    assert "3" in isolated.refused_control("set", max_num_seqs="4")["message"]
    isolated.lose_runner(limits(64))
    isolated.control("set", max_num_seqs="8")
    for request_id in range(1, 9):
        isolated.add(request_id, 8)
    isolated.step()
    assert len(isolated.running()) == 8
    isolated.drain()
