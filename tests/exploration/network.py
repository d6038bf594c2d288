"""An in-memory ZeroMQ: contexts, ROUTER and DEALER sockets and their monitors, between which an explorer moves frames.

It keeps what ZeroMQ promises and no more: frames of one direction of one connection arrive in order, a connection that
breaks loses what was under way, a ROUTER can't send to who isn't connected, a DEALER queues for who isn't there yet.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

CONNECTED = (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED = (zmq.EVENT_DISCONNECTED,)


class Connection:
    """What lies between one DEALER and the address it connects to. `up` goes to the ROUTER, `down` to the DEALER."""

    def __init__(self, dealer: Socket, address: str) -> None:
        self.dealer = dealer
        self.address = address
        self.router: Socket | None = None
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.full = False  # the next send of the ROUTER finds no room

    @property
    def identity(self) -> bytes:
        """By which the ROUTER knows the DEALER."""
        return bytes(self.dealer.options[zmq.ROUTING_ID])

    def establish(self, router: Socket) -> None:
        """The ROUTER takes the DEALER in. What the DEALER has queued since is under way to it."""
        self.router = router
        self.dealer.tell(CONNECTED)

    def break_off(self) -> None:
        """Whatever is under way is lost; the DEALER will connect again."""
        self.up.clear()
        self.down.clear()
        self.router = None
        self.dealer.tell(DISCONNECTED)


class Network:
    """All sockets of a world, and every connection between live processes (or what is left of one of a dead one)."""

    def __init__(self) -> None:
        self.routers: dict[str, Socket] = {}
        self.connections: list[Connection] = []
        self.numbers = itertools.count(1000)

    def bind(self, router: Socket, address: str) -> None:
        """A ROUTER listens; who waits for it is connected at once."""
        if address in self.routers:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.routers[address] = router
        for connection in self.connections:
            if connection.address == address and not connection.dealer.closed:
                connection.establish(router)

    def connect(self, dealer: Socket, address: str) -> None:
        """A DEALER connects, or will as soon as someone listens."""
        connection = dealer.connection = Connection(dealer, address)
        self.connections.append(connection)
        if address in self.routers:
            connection.establish(self.routers[address])

    def kill(self, owner: str, *, keep: bool) -> None:
        """A process is gone. `keep`: what it had sent still arrives, what was queued for it waits for the next one."""
        for address, router in list(self.routers.items()):
            if router.owner == owner:
                del self.routers[address]
                router.closed = True
        for connection in list(self.connections):
            if connection.dealer.owner == owner:
                connection.dealer.closed = True
                connection.down.clear()
                if not keep:
                    connection.up.clear()
                if not connection.up:
                    self.connections.remove(connection)
            elif connection.router is not None and connection.router.closed:
                if keep:
                    connection.router = None
                    connection.dealer.tell(DISCONNECTED)
                else:
                    connection.break_off()

    def take_up(self, connection: Connection, count: int) -> None:
        """Frames on the way to the ROUTER have arrived."""
        assert connection.router is not None
        for _ in range(count):
            connection.router.arrived.append([connection.identity, connection.up.popleft()])
        if connection.dealer.closed and not connection.up:
            self.connections.remove(connection)

    @staticmethod
    def take_down(connection: Connection, count: int) -> None:
        """Frames on the way to the DEALER have arrived."""
        for _ in range(count):
            connection.dealer.arrived.append([connection.down.popleft()])


class Context:
    """What a process of the world takes for its zmq.Context."""

    def __init__(self, network: Network, owner: str) -> None:
        self.network = network
        self.owner = owner

    def socket(self, kind: int) -> Socket:
        """A ROUTER or a DEALER."""
        assert kind in (zmq.ROUTER, zmq.DEALER)
        return Socket(self.network, self.owner, kind)


class Socket:
    """The part of zmq.Socket that channels use. `arrived` holds what `recv` gives, put there by the explorer."""

    def __init__(self, network: Network, owner: str, kind: int) -> None:
        self.network = network
        self.owner = owner
        self.kind = kind
        self.closed = False
        self.options: dict[int, Any] = {zmq.FD: next(network.numbers)}
        self.arrived: deque[list[bytes]] = deque()
        self.monitor: Socket | None = None
        self.watched = 0
        self.unseen: deque[int] = deque()
        self.connection: Connection | None = None

    def setsockopt(self, option: int, value: Any) -> None:
        """Keep it."""
        self.options[option] = value

    def getsockopt(self, option: int) -> Any:
        """What was set, and the two that an event loop asks for."""
        if option == zmq.EVENTS:
            return zmq.POLLIN if self.arrived else 0
        return self.options[option]

    def bind(self, address: str) -> None:
        """Listen."""
        self.options[zmq.LAST_ENDPOINT] = address.encode()
        self.network.bind(self, address)

    def connect(self, address: str) -> None:
        """Reach whoever listens there, now or later."""
        self.network.connect(self, address)

    def disconnect(self, address: str) -> None:
        """Drop the connection and what is queued on it."""
        assert self.connection is not None
        self.network.connections.remove(self.connection)
        if self.connection.router is not None:
            self.tell(DISCONNECTED)

    def get_monitor_socket(self, events: int, name: str) -> Socket:
        """A socket on which connection events arrive once the explorer lets this process see them."""
        self.monitor = Socket(self.network, self.owner, zmq.PAIR)
        self.watched = events
        return self.monitor

    def disable_monitor(self) -> None:
        """No more events."""
        self.monitor = None

    def tell(self, events: Sequence[int]) -> None:
        """Something has become of the connection; the process doesn't know yet."""
        self.unseen.extend(event for event in events if self.monitor is not None and event & self.watched)

    def reveal(self) -> None:
        """The process may know now what has become of the connection."""
        assert self.monitor is not None
        while self.unseen:
            self.monitor.arrived.append([struct.pack("=hi", self.unseen.popleft(), 0), b""])

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        """The next message that has arrived."""
        if not self.arrived:
            raise zmq.Again
        return self.arrived.popleft()

    def recv(self, flags: int = 0) -> bytes:
        """The next message of one frame."""
        return self.recv_multipart()[0]

    def send(self, frame: bytes, flags: int = 0) -> None:
        """DEALER: queue it for whoever listens, or will."""
        assert self.connection is not None
        self.connection.up.append(bytes(frame))

    def send_multipart(self, frames: Sequence[bytes], flags: int = 0) -> None:
        """ROUTER: to a connected DEALER, else EHOSTUNREACH; EAGAIN if there is no room."""
        identity, frame = frames
        for connection in self.network.connections:
            if connection.router is self and connection.identity == identity:
                if connection.full:
                    connection.full = False
                    raise zmq.Again
                connection.down.append(bytes(frame))
                return
        raise zmq.ZMQError(zmq.EHOSTUNREACH)

    def close(self, linger: int | None = None) -> None:
        """Gone."""
        self.closed = True
