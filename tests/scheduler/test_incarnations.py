"""What is late from an ended request can't touch a later one with the same id."""

from __future__ import annotations

import msgspec
import pytest

from protocol.columns import i32, pack_i32
from protocol.messages import RequestStatus, RowError, StepResult
from scheduler import core as core_module
from tests.scheduler.isolated import Isolated, solo_tokens


def resubmitted() -> tuple[Isolated, StepResult]:
    """Request 1 ran; its API went and came back with it while its first step was in flight. That step's result."""
    isolated = Isolated(64, delay=2)
    isolated.add(1, 10, max_tokens=4)
    isolated.step()
    late = isolated.pending.popleft()
    isolated.core.drop_peer(0)
    isolated.add(1, 10, max_tokens=4, peer=7)
    isolated.step()
    return isolated, late


def test_a_late_row_error_does_not_end_the_new_request() -> None:
    isolated, late = resubmitted()
    (former,) = i32(late.incarnations).tolist()
    error = RowError(1, former, "non_finite_logits", "row 0 has NaN")
    isolated.core.update(StepResult(late.epoch, late.step_id, errors=[error]))
    isolated.drain()
    assert isolated.status(1) == RequestStatus.LENGTH
    assert isolated.tokens[1] == solo_tokens(1, 10, 4)


def test_a_late_token_at_the_position_that_is_awaited_is_not_the_new_requests() -> None:
    isolated, late = resubmitted()
    isolated.core.update(msgspec.structs.replace(late, tokens=pack_i32([4242])))
    isolated.collect()
    assert 1 not in isolated.tokens and isolated.core.stats.stale_tokens == 1
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 10, 4)


def test_a_late_end_of_a_transfer_frees_its_pages_and_nothing_else() -> None:
    isolated = Isolated(64)
    isolated.add(1, 40, kv_source="peer/1")
    isolated.step()
    (former,) = isolated.orders()
    isolated.core.drop_peer(0)
    isolated.add(1, 40, kv_source="peer/1", peer=7)
    isolated.step()
    (order,) = isolated.orders()
    isolated.deliver_kv(former, [0] * 40, 0)
    assert isolated.request(1).status == RequestStatus.WAITING_FOR_REMOTE_KV
    isolated.deliver_kv(order, [0] * 40, 0)
    isolated.drain()
    assert isolated.tokens[1] == solo_tokens(1, 40, 4)


@pytest.mark.parametrize("most", [5, 1 << 31])
def test_no_two_residencies_share_a_number_before_the_numbers_begin_again(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "MAX_INCARNATION", most)
    isolated = Isolated(6, max_num_seqs=2)
    for request_id in range(1, 9):
        isolated.add(request_id, 40, max_tokens=30)
    isolated.drain()
    given = [new.incarnation for step in isolated.steps if step for new in step.new]
    assert len(given) > 8, "some came back"
    assert given == [1 + count % most for count in range(len(given))]
    assert isolated.tokens == {i: solo_tokens(i, 40, 30) for i in range(1, 9)}
