"""How one waiter enters in a pass: tests, lookup, blocks and the size of its first chunk, as one decision.

Who is tried, and in what order, is the pass's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.policies.admission import AdmissionTest, Candidate
from scheduler.request import Request

if TYPE_CHECKING:
    from scheduler.passes import Pass


def enter(this: Pass, request: Request) -> AdmissionTest | None:
    """Test, look up, allocate and size the first chunk as one decision. The test that binds, or None."""
    bound = this.limits_hold()
    if bound is not None:
        return bound
    core, pool, size = this.core, this.core.pool, this.core.block_size
    known = request.num_tokens
    held = request.blocks
    hit = held or core.find_hit(request)
    start = request.kept // size * size if held else len(hit) * size
    fetch = bool(request.kv_source) and not held
    if fetch:
        count, first = 0, max(0, (known - 1) // size - len(hit))
    else:
        count = min((known - 1 if request.open else known) - start, this.cap, this.budget)
        first = max(0, -(-(start + count) // size) - len(hit)) if not core.strategies.admission.reserves else 0
    offered = candidate(this, request, hit, first)
    bound = core.strategies.admission.test(offered, pool.num_free, pool.num_blocks, this.others)
    if bound is not None:
        return bound
    if not core.suspension.may_stay(request):
        return AdmissionTest.BLOCKS
    if count > 0 and (extent := core.strategies.admission.extent(count)) < count:
        count = extent
        first = max(0, -(-(start + count) // size) - len(hit))
    if not held:
        pool.hold(hit)
    taken = pool.take(first)
    if fetch:
        core.external.fetch_kv(request, hit + taken, len(hit))
        return None
    if count == 0:  # an open request with nothing to compute before its next part
        core.external.wait_for_input(request, hit + taken, start)
        return None
    core.strategies.admission.admitted(offered)
    this.begin(request, hit + taken, start, count)
    return None


def candidate(this: Pass, request: Request, hit: list[int], first: int) -> Candidate:
    """A waiter with these leading blocks, its own or cached ones, and `first` more to take now."""
    pool, size = this.core.pool, this.core.block_size
    reused = 0 if request.blocks else pool.count_free(hit)
    return Candidate(
        now=first + reused,
        whole=max(0, -(-request.num_tokens // size) - len(hit)) + reused,
        prompt_tokens=request.num_prompt,
        known_tokens=request.num_tokens,
        total_tokens=request.max_total,
        matched_tokens=request.kept // size * size if request.blocks else len(hit) * size,
        reused=reused,
        tenant=this.core.tenant_number(request.tenant),
    )


def bring_back(this: Pass, request: Request) -> AdmissionTest | None:
    """Bring a swapped request back: new pages, and copies into them before this step reads."""
    core, pool, size = this.core, this.core.pool, this.core.block_size
    known, kept = request.num_tokens, request.kept
    count = min(known - kept, this.cap, this.budget)
    if count <= 0:
        return AdmissionTest.TOKENS  # the token that its last step sampled is still in flight
    now, whole = -(-(kept + count) // size), -(-known // size)
    offered = Candidate(
        now=now,
        whole=whole,
        prompt_tokens=request.num_prompt,
        known_tokens=known,
        total_tokens=request.max_total,
        matched_tokens=kept // size * size,
        reused=kept // size,
        tenant=core.tenant_number(request.tenant),
    )
    bound = core.strategies.admission.test(offered, pool.num_free, pool.num_blocks, this.others)
    if bound is not None:
        return bound
    if not core.suspension.may_stay(request):
        return AdmissionTest.BLOCKS
    count = core.strategies.admission.extent(count)
    blocks = pool.take(-(-(kept + count) // size))
    for device, host in zip(blocks, request.host_blocks, strict=False):
        this.swap_in += (device, host)
    core.strategies.admission.admitted(offered)
    this.begin(request, blocks, kept, count)
    return None
