"""One world: three processes, their connections, a clock and two clients; what may happen next, and making it happen.

Choices are texts, so that a sequence of them can be printed and replayed. The first is what a calm machine would do.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from protocol.process import EXIT_REPLACED
from tests.exploration.determined import Clock
from tests.exploration.network import Connection, Network
from tests.exploration.processes import Api, Client, Process, RunnerHost, SchedulerHost, Violation
from tests.exploration.scenarios import Ask, Scenario, expected

ROLES: dict[str, Callable[[Network, Clock, int, Scenario], Process]] = {
    "runner": RunnerHost,
    "scheduler": SchedulerHost,
    "api": Api,
}
PLACES = (*ROLES, "heir")
"""Where a process can live: an heir is a scheduler that takes over from the one in its place."""
STUCK_TICKS = 150
HANG_TICKS = 8
"""Longer than any lease and silence of these worlds but the API's, in which nothing has to be detected."""
_expected: dict[Ask, list[int]] = {}


def _tag(frame: bytes) -> bytes:
    """What kind of message a frame holds."""
    length = frame[9] & 0x1F
    return frame[10 : 10 + length]


class World:
    """Begins with three processes that know each other, before the first client comes."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.network = Network()
        self.clock = Clock()
        self.live: dict[str, Process] = {}
        self.lives = dict.fromkeys(ROLES, 0)
        self.down: list[str] = []
        self.frozen: dict[str, int] = {}
        self.clients = [Client(ask, self._expected(index)) for index, ask in enumerate(scenario.asks)]
        self.submitted = 0
        self.calm_since = self.clock.ticks
        self.noted = b""
        for role in ROLES:
            self._start(role)
        while not self._ready():
            self.do((self._deliverable() or ["tick"])[0])
        self.calm_since = self.clock.ticks

    def _expected(self, index: int) -> list[int]:
        ask = self.scenario.asks[index]
        if ask not in _expected:
            _expected[ask] = expected(ask)
        return _expected[ask]

    @property
    def api(self) -> Api:
        """The living API."""
        api = self.live["api"]
        assert isinstance(api, Api)
        return api

    @property
    def scheduler(self) -> SchedulerHost | None:
        """The living scheduler."""
        scheduler = self.live.get("scheduler")
        assert scheduler is None or isinstance(scheduler, SchedulerHost)
        return scheduler

    @property
    def runner(self) -> RunnerHost | None:
        """The living runner."""
        runner = self.live.get("runner")
        assert runner is None or isinstance(runner, RunnerHost)
        return runner

    def _ready(self) -> bool:
        return self.api.engine.chain.ready and not self._deliverable()

    def _start(self, role: str) -> None:
        self.lives[role] += 1
        self.live[role] = ROLES[role](self.network, self.clock, self.lives[role], self.scenario)

    # --- what may happen --------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Every client has what it came for, nothing is under way and nothing is held."""
        return (
            self.submitted == len(self.clients)
            and all(client.outcome for client in self.clients)
            and not self.down
            and not self.frozen
            and "heir" not in self.live
            and not self._deliverable()
            and not self._held()
        )

    def choices(self) -> list[str]:
        """What may happen next of its own accord; the clock moves only when nothing else can."""
        found = []
        if self.submitted < len(self.clients) and self._free("api"):
            found.append(f"submit {self.clients[self.submitted].ask.name}")
        found += self._deliverable() + [f"start {role}" for role in self.down]
        if found:
            return found
        found += [f"thaw {role}" for role, since in self.frozen.items() if self.clock.ticks - since >= HANG_TICKS]
        return found or ["tick"]

    def _free(self, role: str) -> bool:
        return role in self.live and role not in self.frozen

    def _place(self, owner: str) -> str | None:
        """Where the process with this label lives; None if it is dead."""
        return next((place for place, process in self.live.items() if process.label == owner), None)

    def _deliverable(self) -> list[str]:
        found = []
        runner = self.runner
        if runner is not None and self._free("runner") and runner.posted:
            found.append("flush")
        for connection in self.network.connections:
            found += self._moves(connection)
        if runner is not None and self._free("runner") and runner.link.pending:
            found.append("compute")
        return found

    def _moves(self, connection: Connection) -> list[str]:
        found = []
        dealer, router = connection.dealer, connection.router
        told = not dealer.unseen or router is None  # a connection's end is written before what the next one brings
        if connection.down and told and self._alive(dealer.owner):
            found += [f"down {dealer.owner}"] + [f"down {dealer.owner} all"] * (len(connection.down) > 1)
        if connection.up and router is not None and self._alive(router.owner):
            found += [f"up {dealer.owner}"] + [f"up {dealer.owner} all"] * (len(connection.up) > 1)
        if dealer.unseen and self._alive(dealer.owner):
            found.append(f"notice {dealer.owner}")
        if router is None and not dealer.closed and connection.address in self.network.routers:
            found.append(f"reconnect {dealer.owner}")
        return found

    def _alive(self, owner: str) -> bool:
        place = self._place(owner)
        return place is not None and self._free(place)

    def disturbances(self) -> list[str]:
        """What may go wrong now."""
        if self.over:
            return []
        found = []
        for role in ROLES:
            if self._free(role):
                found += [f"kill {role} lost", f"kill {role} kept"]
                if "heir" not in self.live:  # an address in memory can't be taken by force from one that hangs
                    found.append(f"freeze {role}")
        if self._free("scheduler") and "heir" not in self.live:
            found.append("takeover")
        for connection in self.network.connections:
            if connection.router is not None and not connection.dealer.closed:
                found += [f"break {connection.dealer.owner}", f"full {connection.dealer.owner}"]
                if connection.down and self._alive(connection.dealer.owner):
                    found.append(f"twice {connection.dealer.owner}")
                    if _tag(connection.down[0]) == b"step_result":
                        found.append(f"again {connection.dealer.owner}")
        if self._free("api"):
            found += [f"abort {client.ask.name}" for client in self.clients if client.live]
        return found

    # --- making it happen -------------------------------------------------------------------------------------

    def do(self, choice: str) -> None:
        """Make a choice of `choices` or `disturbances` happen. Violation if it leads where nobody may come."""
        verb, _, rest = choice.partition(" ")
        getattr(self, f"_do_{verb}")(*rest.split())
        self._drain()
        for place in ("scheduler", "heir"):
            self._bury(place)
        if self.clock.ticks - self.calm_since > STUCK_TICKS:
            raise Violation(f"stuck: {[(client.ask.name, client.outcome) for client in self.clients]}, {self._held()}")

    def check(self) -> None:
        """Violation if any process's books don't agree."""
        for process in self.live.values():
            process.check()

    def _bury(self, place: str) -> None:
        """A scheduler that has ended by itself is started again, unless another is there. Of two that want the place,
        either may keep it."""
        scheduler = self.live.get(place)
        if not isinstance(scheduler, SchedulerHost) or scheduler.code is None:
            return
        if scheduler.code == EXIT_REPLACED and "heir" not in self.live:
            raise Violation("the only scheduler believes that another has taken over")
        self._end(place, keep=True)

    def _held(self) -> list[str]:
        return self.scheduler.leftovers() if self.scheduler is not None else []

    def _connection(self, owner: str) -> Connection:
        return next(c for c in self.network.connections if c.dealer.owner == owner)

    def _process(self, owner: str) -> Process:
        return next(process for process in self.live.values() if process.label == owner)

    def _do_flush(self) -> None:
        assert self.runner is not None
        self.runner.flush()

    def _do_compute(self) -> None:
        assert self.runner is not None
        self.runner.compute()

    def _do_down(self, owner: str, count: str = "") -> None:
        connection = self._connection(owner)
        frames = list(connection.down)[: None if count else 1]
        self.network.take_down(connection, len(frames))
        self._take_in(self._process(owner), frames)

    def _do_up(self, owner: str, count: str = "") -> None:
        connection = self._connection(owner)
        frames = list(connection.up)[: None if count else 1]
        assert connection.router is not None
        router = connection.router.owner
        self.network.take_up(connection, len(frames))
        self._take_in(self._process(router), frames, owner)

    def _take_in(self, process: Process, frames: list[bytes], sender: str = "") -> None:
        for frame in frames:
            process.note(sender, _masked(frame))
        process.receive()

    def _do_notice(self, owner: str) -> None:
        """Whatever came over the old connection has arrived by the time its end is told."""
        process, connection = self._process(owner), self._connection(owner)
        frames = list(connection.down)
        self.network.take_down(connection, len(frames))
        connection.dealer.reveal()
        process.note("notice")
        self._take_in(process, frames)

    def _do_reconnect(self, owner: str) -> None:
        connection = self._connection(owner)
        connection.establish(self.network.routers[connection.address])

    def _do_start(self, role: str) -> None:
        self.down.remove(role)
        self._start(role)

    def _do_submit(self, name: str) -> None:
        self.api.submit(self.clients[self.submitted])
        self.submitted += 1
        self.calm_since = self.clock.ticks

    def _do_tick(self) -> None:
        self.clock.ticks += 1
        for role, process in list(self.live.items()):
            if role not in self.frozen:
                process.note("tick")
                process.turn()

    # --- disturbances

    def _do_kill(self, role: str, what: str) -> None:
        self._end(role, keep=what == "kept")

    def _end(self, role: str, *, keep: bool) -> None:
        process = self.live.pop(role)
        self.network.kill(process.label, keep=keep)
        if role == "scheduler" and "heir" in self.live:
            self.live["scheduler"] = self.live.pop("heir")
        elif role != "heir":
            self.down.append(role)
        self.calm_since = self.clock.ticks
        if role == "api":
            for client in self.clients:
                if client.live:
                    client.outcome = "lost"

    def _do_freeze(self, role: str) -> None:
        self.frozen[role] = self.clock.ticks

    def _do_thaw(self, role: str) -> None:
        del self.frozen[role]
        self.calm_since = self.clock.ticks

    def _do_takeover(self) -> None:
        self.lives["scheduler"] += 1
        life = self.lives["scheduler"]
        self.live["heir"] = SchedulerHost(self.network, self.clock, life, self.scenario, takeover=True)
        self.calm_since = self.clock.ticks

    def _do_break(self, owner: str) -> None:
        self._connection(owner).break_off()
        self.calm_since = self.clock.ticks

    def _do_full(self, owner: str) -> None:
        self._connection(owner).full = True

    def _do_twice(self, owner: str) -> None:
        connection = self._connection(owner)
        connection.down.appendleft(connection.down[0])

    def _do_again(self, owner: str) -> None:
        """The scheduler applies a result twice."""
        scheduler = self._process(owner)
        assert isinstance(scheduler, SchedulerHost)
        result = scheduler.process.links.runner._codec.decode(self._connection(owner).down[0])[2]
        self._do_down(owner)
        scheduler.again(result)

    def _do_abort(self, name: str) -> None:
        self.api.abort(next(client for client in self.clients if client.ask.name == name))

    # --- what needs no choice ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Signs of life arrive at once: they change nothing but how long ago the peer was heard. So does what the
        runner's computing thread hands over, unless the scheduler that it is for may be dismissed before."""
        while self._drain_one():
            pass

    def _drain_one(self) -> bool:
        runner = self.runner
        if runner is not None and self._free("runner") and runner.posted and not self._dismissal_comes():
            runner.flush()
            return True
        for connection in self.network.connections:
            dealer, router = connection.dealer, connection.router
            if connection.down and _is_idle(connection.down[0]) and self._alive(dealer.owner):
                self._do_down(dealer.owner)
                return True
            if connection.up and _is_idle(connection.up[0]) and router is not None and self._alive(router.owner):
                self._do_up(dealer.owner)
                return True
        return False

    def _dismissal_comes(self) -> bool:
        assert self.runner is not None
        for connection in self.network.connections:
            router = connection.router
            if router is not None and router.owner == self.runner.label:
                return any(_tag(frame) in (b"hello", b"goodbye") for frame in connection.up)
        return False

    # --- which state this is ----------------------------------------------------------------------------------

    def fingerprint(self) -> bytes:
        """The same for two worlds only if whatever can happen in one can happen in the other."""
        digest = blake2b(digest_size=12)
        for role in PLACES:
            digest.update(self.live[role].history if role in self.live else b"-")
        for connection in self.network.connections:
            state = (connection.dealer.owner, connection.router is not None, connection.full, *connection.dealer.unseen)
            digest.update(repr(state).encode())
            for queue in (connection.up, connection.down):
                digest.update(b"|" + b"|".join(_masked(frame) for frame in queue))
        digest.update(repr((self.clock.ticks, self.submitted, self.down, self.frozen)).encode())
        digest.update(repr([client.outcome for client in self.clients]).encode())
        return digest.digest()


def _is_idle(frame: bytes) -> bool:
    return _tag(frame) in (b"heartbeat", b"status")


def _masked(frame: bytes) -> bytes:
    """A heartbeat says when it was sent by the wall clock, which is another one each time."""
    return frame[:8] + b"heartbeat" if _tag(frame) == b"heartbeat" else frame
