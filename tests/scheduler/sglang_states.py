"""Puts the running `sglang` preset into states that were recorded of SGLang, through an isolated scheduler."""

from __future__ import annotations

from typing import Any

from protocol.messages import RequestStatus
from tests.scheduler.isolated import Isolated, limits
from tests.scheduler.sglang_cases import POLICY_NAMES, Case, held, in_pages, known_tokens, tokens_of, urgency

EVERYTHING = 16384
"""Tokens of a step that no case fills: chunking is off."""
BALLAST = 1024
"""Tokens that an idle session holds beside a case, so that no output limit is cut to the size of the small pool."""

RUNNING, WAITING, UNDER_WAY, SESSION = 100, 200, 900, 901


class State:
    """What a case begins with: what is cached, who runs, the prompt under way, and then the preset's own strategies.

    `cached_lens` of a case are sequences that share nothing; requests are numbered by kind and known by name.
    """

    def __init__(self, case: Case, **config: Any) -> None:
        self.case = case
        self.names: dict[int, str] = {}
        size, running, chunk = case["page_size"], case["running"], case.get("chunked")
        cached = [list(tokens_of(entry)) for entry in case.get("cache", [])]
        cached += [
            list(range(50_000 + 300 * i, 50_000 + 300 * i + n)) for i, n in enumerate(case.get("cached_lens", []))
        ]
        tokens = case["available"] + BALLAST + sum(len(entry) // size * size for entry in cached)
        tokens += sum(held(request, size) for request in running)
        tokens += in_pages(chunk["computed_len"], size) if chunk else 0
        self.isolated = Isolated(
            0,
            limit=limits(tokens // size, size, max_model_len=2 * EVERYTHING, vocab_size=100_000),
            preset="sglang",
            admission_policy="optimistic",
            **config,
        )
        self.add(SESSION, {"id": "session"}, list(range(60_000, 60_001 + BALLAST)), open=True)
        self.isolated.step()
        assert self.isolated.request(SESSION).status == RequestStatus.WAITING_FOR_INPUT
        for index, entry in enumerate(cached):
            if len(entry) >= size:
                self.isolated.add(index, entry, max_tokens=1)
                self.isolated.step()
        for index, request in enumerate(running):
            self._add_running(RUNNING + index, request)
        if running:
            self.isolated.step()
        if chunk:
            self.isolated.control("set", max_num_batched_tokens=str(chunk["computed_len"]))
            self.add(UNDER_WAY, chunk, list(range(70_000, 70_000 + chunk["input_len"])))
            self.isolated.step()

    def start(self, **config: str) -> None:
        """From here on the preset's own admission decides."""
        self.isolated.control("set", admission_policy="", **config)

    def add(self, number: int, request: Case, prompt: list[int], **more: Any) -> None:
        self.names[number] = request["id"]
        limit, urgent = request.get("max_new_tokens", 128), urgency(request, self.case.get("low_values_first", False))
        self.isolated.add(number, prompt, max_tokens=limit, priority=urgent, **more)

    def _add_running(self, number: int, request: Case) -> None:
        """All but its newest output is there already; the next step samples that one."""
        first = 80_000 + (number - RUNNING) * 400
        emitted = list(range(first + 300, first + 300 + request["output_len"] - 1))
        self.isolated.tokens[number] = list(emitted)
        more: dict[str, Any] = {"emitted": emitted, "resumed": True} if emitted else {}
        self.add(number, request, list(range(first, first + request["input_len"])), **more)

    def add_waiting(self, *, by_entry: bool) -> None:
        """The waiters of the case, in list order or in order of entry."""
        waiting = list(enumerate(self.case["waiting"]))
        if by_entry:
            waiting.sort(key=lambda pair: pair[1].get("entry_time", 0.0))
        for index, request in waiting:
            self.add(WAITING + index, request, list(known_tokens(request)))

    def running(self) -> list[str]:
        return [self.names[number] for number in self.isolated.running()]

    def waiting(self) -> list[str]:
        """The queue in its order of now."""
        core = self.isolated.core
        return [self.names[request.id] for request in core.waiting.candidates(core.view, core.now())]


def state_before_admission(case: Case) -> State:
    """The state of a recorded prefill pass, its waiters included."""
    queue = POLICY_NAMES.get(case["policy"], case["policy"])
    if case["priority_scheduling"] and queue == "fcfs":
        queue = "priority"
    state = State(
        case,
        queue_policy=queue,
        batch_policy="mixed" if case["mixed_chunk"] else "",
        schedule_conservativeness=case["new_token_ratio"] / 0.7,
        priority_preemption_threshold=case["preemption_threshold"] if case["priority_preemption"] else -1,
    )
    state.start(
        max_num_seqs=str(min(case["rows"], case["max_running"])),
        max_num_batched_tokens=str(case["chunked_prefill_size"] or EVERYTHING),
    )
    state.add_waiting(by_entry=queue in ("priority", "shortest-prefill"))
    return state


def admission(state: State) -> Case:
    """One pass of that state, in the recording's terms."""
    isolated = state.isolated
    before, queue = set(isolated.running()) - {UNDER_WAY}, state.waiting()
    streams = {number: len(stream) for number, stream in isolated.tokens.items()}
    scheduled = isolated.step()
    step = isolated.steps[-1]
    assert step is not None
    starts = {new.id: new.num_computed for new in step.new}
    starts[UNDER_WAY] = (state.case.get("chunked") or {}).get("computed_len", 0)
    batch = [number for number in scheduled if number not in before]
    unfinished = [number for number in batch if len(isolated.tokens.get(number, [])) == streams.get(number, 0)]
    left = [number for number in before if number not in isolated.running() and number not in isolated.finished]
    entered = {state.names[number] for number in batch}
    rows = ({"id": state.names[n], "prefix_len": starts[n], "extend_len": scheduled[n]} for n in batch)
    return {
        "prefill_batch": list(rows),
        "chunked": next((state.names[number] for number in unfinished), None),
        "preempted": sorted(state.names[number] for number in left),
        "running": [state.names[number] for number in sorted(before) if number not in left],
        "waiting": [name for name in queue if name not in entered],
    }
