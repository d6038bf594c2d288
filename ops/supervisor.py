"""Keeps a few child processes running as one: starts, watches, restarts with backoff, and ends them in order.

It sleeps in one `select` on exits, output, signals and deadlines, and looks every few seconds whether a child hangs.
What the programs are and when they are ready is told by its caller.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.child import Child, Program
from ops.deaths import Coroner, Death
from protocol.process import EXIT_REPLACED, StopSignal

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
PROBE_INTERVAL_S = 0.1
LOOK_INTERVAL_S = 0.2
TAKEOVER_PATIENCE_S = 2.0
"""How long the process that replaced a child may take to be found in its place."""
SUCCESSOR_PATIENCE_S = 1.0
"""The same for one that replaced a stranger, which makes way only when the next one is there."""
START_LIMIT = 3
"""Failures in a row of one process that end all of it before it was ever ready: there are no streams to save yet."""
SIGNAL_ECHO_S = 0.3
LOOKS = 4
"""So many looks without a sign of life in a row are a hang: time in which all stood still, we too, isn't one."""
SLOWEST_TIMES = 10


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to start a program again: at once, from the second quick failure on after `backoff_s`, doubled each time.

    Failures are quick when the process lived less than `stable_after_s` or never got ready; `limit` in a row end all.
    One that was ended from outside has not failed, however often that happens. One that has given signs of life counts
    as hung, and is killed, when there was none for `hang_timeout_s` (0: never). So does one that isn't ready
    `start_timeout_s` after its start, or, when the program has been ready before, after `SLOWEST_TIMES` its slowest
    start and no less than `hang_timeout_s`.
    """

    limit: int = 3
    backoff_s: float = 0.5
    backoff_max_s: float = 10.0
    stable_after_s: float = 30.0
    start_timeout_s: float = 600.0
    hang_timeout_s: float = 10.0


class _Slot:
    """A program's place: the process in it, when the next one is due, or the stranger (`watched`, a pidfd) that has it.

    While it isn't known who has the place, it is looked for at `look_at`, until `patience_until`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.child: Child | None = None
        self.starts = 0
        self.slowest_start_s = 0.0
        self.quick_failures = 0
        self.due: float | None = None
        self.watched = -1
        self.look_at: float | None = None
        self.patience_until = 0.0


class Supervisor:
    """Runs `programs` (in start order; they are stopped in reverse) until a signal or a failure that repeats.

    `probe` is asked, in a thread, whether all is ready; `on_ready` is then called once. `on_stop` is called before the
    first is told to end, `cleanup` after the last has. `write` prints a line; the last one says why all has ended.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        write: Callable[[str], None],
        probe: Callable[[], bool],
        on_ready: Callable[[float], None],
        policy: RestartPolicy | None = None,
        on_stop: Callable[[], None] = lambda: None,
        cleanup: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = [_Slot(program) for program in programs]
        self._write = write
        self._probe = probe
        self._on_ready = on_ready
        self._policy = policy or RestartPolicy()
        self._on_stop = on_stop
        self._cleanup = cleanup
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._began = clock()
        self._ready = False
        self._exit = EXIT_OK
        self._why = ""
        self._stopping = False
        self._coroner = Coroner()
        self._stop: StopSignal | None = None
        self._asked: list[_Slot] = []
        self._kill_at: float | None = None
        self._next_look = self._began + self._policy.hang_timeout_s / LOOKS
        self._probe_reader, self._probe_writer = socket.socketpair()
        self._probe_done = threading.Event()

    def run(self) -> int:
        """Supervise until all has ended; the exit code. Call in the main thread."""
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        with StopSignal(signals, on_second=self._kill_now, echo_s=SIGNAL_ECHO_S) as self._stop:
            self._selector.register(self._stop, selectors.EVENT_READ, self._stop_requested)
            self._selector.register(self._probe_reader, selectors.EVENT_READ, self._probed)
            try:
                for slot in self._slots:
                    if not self._stopping:
                        self._start(slot)
                threading.Thread(target=self._probe_until_ready, name="readiness", daemon=True).start()
                while not self._finished():
                    self._take_events()
                    self._on_time()
            except Exception as error:
                self._kill_all()
                for line in traceback.format_exc().splitlines():
                    self._say(line)
                self._exit, self._why = EXIT_FAILED, f"an error of the supervisor's own: {error!r}"
            except BaseException:
                self._kill_all()
                raise
            finally:
                self._probe_done.set()
                self._selector.close()
                self._probe_reader.close()
                self._cleanup()
        self._say(f"ended: {self._why}")
        return self._exit

    def _take_events(self) -> None:
        for key, _ in self._selector.select(self._timeout()):
            if self._selector.get_map().get(key.fd) is not key:
                continue  # one before it in this round has closed this descriptor
            handler, *arguments = key.data if isinstance(key.data, tuple) else (key.data,)
            handler(*arguments)

    # --- starting and ending

    def _start(self, slot: _Slot) -> None:
        slot.due = None
        slot.starts += 1
        try:
            child = Child(slot.program, self._write, self._clock(), again=slot.starts > 1)
        except OSError as error:
            self._failed(slot, f"could not be started ({error})")
            return
        slot.child = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, (self._exited, slot))
        self._selector.register(child.output, selectors.EVENT_READ, (self._pump, child))
        if slot.program.beats:
            self._selector.register(child.watchdog, selectors.EVENT_READ, (self._got_ready, slot, child))

    def _got_ready(self, slot: _Slot, child: Child) -> None:
        self._selector.unregister(child.watchdog)
        child.silent_looks()
        slot.slowest_start_s = max(slot.slowest_start_s, self._clock() - child.started_at)

    def _pump(self, child: Child) -> None:
        if not child.pump():
            self._selector.unregister(child.output)

    def _exited(self, slot: _Slot) -> None:
        child = slot.child
        assert child is not None
        slot.child = None
        for descriptor in (child.pidfd, child.output, child.watchdog):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        by_us = child.killed  # reaping kills what is left of its group
        status = child.reap()
        death = self._coroner.judge(status, by_us=by_us)
        if self._stopping:
            self._stopped(slot, status, death)
        elif status == EXIT_REPLACED:
            self._say(f"{slot.program.role} was replaced by a process that is not ours; it is left alone")
            if self._was_stable(slot, child):
                slot.quick_failures = 0
            self._find_stranger(slot)
        elif status == EXIT_CONFIG and not slot.slowest_start_s:  # what has been ready before was configured well
            self._give_up(f"{slot.program.role} can't start as configured", child, EXIT_CONFIG)
        elif death.from_outside:
            self._ended_from_outside(slot, child, death)
        else:
            self._failed(slot, death.text, child)

    # --- places that others have

    def _find_stranger(self, slot: _Slot) -> None:
        slot.patience_until = self._clock() + TAKEOVER_PATIENCE_S
        slot.look_at = self._clock() + LOOK_INTERVAL_S

    def _look_for_stranger(self, slot: _Slot) -> None:
        now = self._clock()
        pid = slot.program.holder()
        slot.look_at = now + LOOK_INTERVAL_S
        if pid is None and now >= slot.patience_until:
            slot.look_at = None
            self._say(f"nobody has the place of {slot.program.role}: starting it again")
            self._start(slot)
        elif pid is not None:
            slot.patience_until = now  # from now on an empty place is empty
            self._watch_stranger(slot, pid)

    def _watch_stranger(self, slot: _Slot, pid: int) -> None:
        try:
            slot.watched = os.pidfd_open(pid)
        except OSError:
            return  # it can't be told from here, or has just ended: looked at again
        slot.look_at = None
        self._selector.register(slot.watched, selectors.EVENT_READ, (self._stranger_left, slot))
        self._say(f"pid {pid} has the place of {slot.program.role}")

    def _stranger_left(self, slot: _Slot) -> None:
        self._forget_stranger(slot)
        slot.look_at = self._clock()
        if not slot.program.abandoned():  # another one may have replaced it in turn, and is about to be there
            slot.patience_until = self._clock() + SUCCESSOR_PATIENCE_S

    def _forget_stranger(self, slot: _Slot) -> None:
        slot.look_at = None
        if slot.watched >= 0:
            self._selector.unregister(slot.watched)
            os.close(slot.watched)
            slot.watched = -1

    # --- failing

    def _failed(self, slot: _Slot, what: str, child: Child | None = None) -> None:
        slot.quick_failures = 1 if self._was_stable(slot, child) else slot.quick_failures + 1
        limit = self._policy.limit if self._ready else min(self._policy.limit, START_LIMIT)
        if slot.quick_failures >= limit:
            times = f"{slot.quick_failures} times in a row" if slot.quick_failures > 1 else "at once"
            self._give_up(f"{slot.program.role} failed {times}; it {what}", child, EXIT_FAILED)
            return
        again = slot.quick_failures - 2
        wait = min(self._policy.backoff_s * 2**again, self._policy.backoff_max_s) if again >= 0 else 0.0
        self._start_in(wait, slot, what, child, f"failure {slot.quick_failures} of {limit}")

    def _ended_from_outside(self, slot: _Slot, child: Child, death: Death) -> None:
        stable = self._was_stable(slot, child)
        if stable:
            slot.quick_failures = 0
        wait = 0.0 if stable or child.begun else self._policy.backoff_s
        self._start_in(wait, slot, death.text, child, "no failure")

    def _was_stable(self, slot: _Slot, child: Child | None) -> bool:
        if child is None:
            return False
        lived = self._clock() - child.started_at
        return lived >= self._policy.stable_after_s and (child.begun or not slot.program.beats)

    def _start_in(self, wait: float, slot: _Slot, what: str, child: Child | None, counted: str) -> None:
        slot.due = self._clock() + wait
        lived = f" after {self._clock() - child.started_at:.1f} s" if child is not None else ""
        when = f"in {wait:g} s" if wait else "now"
        self._say(f"{slot.program.role} {what}{lived}; starting it again {when} ({counted})")

    def _give_up(self, reason: str, child: Child | None, code: int) -> None:
        self._say(f"giving up: {reason}")
        for line in list(child.last_lines)[-3:] if child is not None else ():
            self._say(f"  its last words: {line}")
        self._exit = code
        self._begin_stop(reason)

    # --- readiness

    def _probe_until_ready(self) -> None:
        told = ""
        while not self._probe_done.is_set():
            try:
                if self._probe():
                    break
            except Exception as error:  # or nobody would ever ask again
                if (failure := repr(error)) != told:
                    told = failure
                    self._say(f"can't tell whether all is ready: {failure}")
            self._probe_done.wait(PROBE_INTERVAL_S)
        self._probe_writer.close()

    def _probed(self) -> None:
        self._selector.unregister(self._probe_reader)
        if not self._stopping:
            self._ready = True
            self._on_ready(self._clock() - self._began)

    # --- stopping

    def _stop_requested(self) -> None:
        # The descriptor stays readable; it has told all it can.
        for key in list(self._selector.get_map().values()):
            if key.data == self._stop_requested:
                self._selector.unregister(key.fileobj)
        if not self._stopping:
            self._say("stopping (again to stop at once)")
            self._begin_stop(f"told to by {self._signal_name()}")

    def _signal_name(self) -> str:
        signum = self._stop.signum if self._stop is not None else None
        return signal.Signals(signum).name if signum is not None else "itself"

    def _begin_stop(self, why: str) -> None:
        self._stopping = True
        self._why = why
        self._probe_done.set()
        self._on_stop()
        for slot in self._slots:
            slot.due = None
            if slot.watched >= 0:
                self._say(f"the process in the place of {slot.program.role} is not ours: it is left running")
            self._forget_stranger(slot)
        self._stop_next()

    def _stop_next(self) -> None:
        """Ask the last started program that still runs to end, and its group. The others wait: it may need them."""
        if any(slot.child is not None for slot in self._asked):
            return  # another one ended meanwhile; a second signal would cut the draining of these short
        running = [slot for slot in self._slots if slot.child is not None]
        self._asked, self._kill_at = running[-1:], None
        if not running:
            return
        program = running[-1].program
        if program.group:
            self._asked = [slot for slot in running if slot.program.group == program.group]
        self._kill_at = self._clock() + program.stop_grace_s
        for slot in self._asked:
            if slot.child is not None:
                slot.child.signal(signal.SIGTERM)

    def _stopped(self, slot: _Slot, status: int, death: Death) -> None:
        if status not in (EXIT_OK, -signal.SIGTERM):  # one that was still starting has no handler yet
            self._say(f"{slot.program.role} {death.text} while stopping")
            self._exit = self._exit or EXIT_FAILED
        self._stop_next()

    # --- time

    def _timeout(self) -> float | None:
        deadlines = [at for slot in self._slots for at in (slot.due, slot.look_at) if at is not None]
        if not self._stopping:
            deadlines += [at for slot in self._slots if (at := self._start_ends(slot)) is not None]
            deadlines += [self._next_look] if self._policy.hang_timeout_s else []
        if self._kill_at is not None:
            deadlines.append(self._kill_at)
        if not self._ready and not self._stopping:
            deadlines.append(self._began + self._policy.start_timeout_s)
        return max(min(deadlines) - self._clock(), 0.0) if deadlines else None

    def _on_time(self) -> None:
        now = self._clock()
        if self._stopping:
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_overdue()
            return
        if not self._ready and now >= self._began + self._policy.start_timeout_s:
            why = f"not ready after {self._policy.start_timeout_s:g} s (--start-timeout-s)"
            self._say(f"giving up: {why}")
            self._exit = EXIT_FAILED
            self._begin_stop(why)
            return
        for slot in self._slots:
            if slot.due is not None and now >= slot.due:
                self._start(slot)
            if slot.look_at is not None and now >= slot.look_at:
                self._look_for_stranger(slot)
            if (start_ends := self._start_ends(slot)) is not None and now >= start_ends:
                self._kill_unready(slot)
        if self._policy.hang_timeout_s and now >= self._next_look:
            self._next_look = now + self._policy.hang_timeout_s / LOOKS
            self._kill_hung()

    def _start_ends(self, slot: _Slot) -> float | None:
        """When a start that is under way counts as hung."""
        child, policy = slot.child, self._policy
        if child is None or child.begun or child.killed or not slot.program.beats:
            return None
        usual_s = max(SLOWEST_TIMES * slot.slowest_start_s, policy.hang_timeout_s)
        known = slot.slowest_start_s and policy.hang_timeout_s
        return child.started_at + (min(policy.start_timeout_s, usual_s) if known else policy.start_timeout_s)

    def _kill_unready(self, slot: _Slot) -> None:
        assert slot.child is not None
        since = self._clock() - slot.child.started_at
        self._say(f"{slot.program.role} hangs (not ready {since:.1f} s after its start), killing it")
        slot.child.kill_group()

    def _kill_hung(self) -> None:
        for slot in self._slots:
            if slot.child is not None and slot.child.silent_looks() >= LOOKS:
                silent = f"no sign of life for {self._policy.hang_timeout_s:g} s"
                self._say(f"{slot.program.role} hangs ({silent}), killing it")
                slot.child.kill_group()

    def _kill_overdue(self) -> None:
        self._kill_at = None
        for slot in self._asked:
            if slot.child is not None:
                self._say(f"{slot.program.role} did not end within {slot.program.stop_grace_s:g} s, killing it")
                self._exit = self._exit or EXIT_FAILED
                slot.child.kill_group()

    def _finished(self) -> bool:
        return self._stopping and self._finished_all()

    def _finished_all(self) -> bool:
        return all(slot.child is None and slot.due is None and slot.look_at is None for slot in self._slots)

    def _kill_all(self) -> None:
        for slot in self._slots:
            if slot.child is not None:
                slot.child.kill_group()

    def _kill_now(self) -> None:
        """The second signal: no ceremony, but nothing left behind either."""
        self._kill_all()
        self._cleanup()
        self._say("ended at once: told to a second time")

    def _say(self, text: str) -> None:
        self._write(f" triptych | {text}")
