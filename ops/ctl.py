"""`triptych ctl`: orders to a running scheduler and questions about it, over the same link that APIs use.

It decides nothing and keeps nothing: a Control goes out, its answer is printed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from ops.config import suggest
from ops.ctl_text import render
from ops.runtime_dir import live
from protocol import wire
from protocol.channels import AddressError, ClientChannel, new_instance
from protocol.messages import Control, ControlReply, Goodbye, Hello, Refused, SchedulerToApi, Welcome
from protocol.security import LinkSecurity, SecurityError

EXIT_REFUSED, EXIT_USAGE, EXIT_NO_ANSWER = 1, 2, 3
PATIENCE_S = 5.0
POLL_MS = 50
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
REPLICA = "replica="

ACTIONS = {
    "status": "",
    "pause": "[new|all]",
    "resume": "",
    "drain": "",
    "reset-prefix-cache": "[running=true]",
    "set": "NAME=VALUE ...",
    "timeline": "ID",
    "explain": "ID",
}
"""What can be ordered or asked, and what follows it on the command line."""

HELP = """actions:
  status                  what runs and waits, and which strategies and settings are in force
  pause [new|all]         new: let no new request in, those that run go on (the default); all: compute nothing
  resume                  undo pause and drain
  drain                   refuse new requests with 503, let all others end
  reset-prefix-cache      forget cached prefixes; with running=true running requests compute theirs again
  set NAME=VALUE ...      change settings of the scheduler while it runs: all of them or, if one is wrong, none
  timeline ID             what happened to a request; ID is its answer's id, its X-Request-Id or its number
  explain ID              the same in sentences

With several replicas an order is for all of them; replica=N behind it makes it one's alone.

Exit code: 0 done, 1 refused (the message says why), 2 wrong usage, 3 nobody answered within 5 s."""


class NoAnswer(Exception):
    """Nobody answers at the address."""


class RefusedByScheduler(Exception):
    """The scheduler turned down the connection; the message says why."""


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych ctl`."""
    parser = argparse.ArgumentParser(
        prog="triptych ctl",
        description="Gives orders to a running scheduler and asks it questions.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", metavar="ACTION", help="see below")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="what the action needs")
    parser.add_argument("--json", action="store_true", help="print the scheduler's answer as it is")
    place = parser.add_argument_group("which scheduler (default: the one of the newest `triptych serve` of this user)")
    place.add_argument("--runtime-dir", metavar="DIR", help="its private directory (TRIPTYCH_RUNTIME_DIR)")
    place.add_argument("--scheduler-address", metavar="ADDRESS", help="its address (TRIPTYCH_SCHEDULER_ADDRESS)")
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run the command; the exit code."""
    environ = os.environ if environ is None else environ
    parser = build_parser()
    try:
        options = parser.parse_intermixed_args(list(argv))
        attempts = list(controls(options.action, options.arguments))
    except SystemExit as end:
        return int(end.code or 0)
    except ValueError as error:
        print(f"triptych ctl: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        security = LinkSecurity.of(environ.get("TRIPTYCH_CURVE_KEY_FILE", ""))
        reply = _ask_in_turn(_address(options, environ), attempts, security)
    except (AddressError, SecurityError) as error:
        print(f"triptych ctl: {error}", file=sys.stderr)
        return EXIT_USAGE
    except NoAnswer as error:
        print(f"triptych ctl: {error}", file=sys.stderr)
        return EXIT_NO_ANSWER
    except RefusedByScheduler as error:
        print(f"triptych ctl: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if options.json:
        print(reply.body.decode())
    elif reply.ok:
        print(render(options.action, msgspec.json.decode(reply.body)))
    else:
        print(f"triptych ctl: {msgspec.json.decode(reply.body)['message']}", file=sys.stderr)
    return 0 if reply.ok else EXIT_REFUSED


def controls(action: str, words: Sequence[str]) -> Iterator[Control]:
    """The messages to try, one after the other until a request is found. Raises ValueError for wrong usage."""
    usage = ACTIONS.get(action)
    if usage is None:
        raise ValueError(f"there is no action {action!r}.{suggest(action, ACTIONS)}")
    wrong = ValueError(f"usage: triptych ctl {action} {usage}".rstrip())
    chosen = dict(word.split("=", 1) for word in words if word.startswith(REPLICA))
    for control in _controls(action, usage, [word for word in words if not word.startswith(REPLICA)], wrong):
        yield msgspec.structs.replace(control, arguments=control.arguments | chosen)


def _controls(action: str, usage: str, words: Sequence[str], wrong: ValueError) -> Iterator[Control]:
    if usage == "ID":
        if len(words) != 1:
            raise wrong
        for arguments in _names(words[0]):
            yield _control(action, arguments)
    elif action == "pause":
        if len(words) > 1 or (words and words[0] not in ("new", "all")):
            raise wrong
        yield _control(action, {"what": words[0]} if words else {})
    elif usage:
        pairs = dict(_pair(word, wrong) for word in words)
        if (action == "set" and not pairs) or (action == "reset-prefix-cache" and pairs.keys() - {"running"}):
            raise wrong
        yield _control(action, pairs)
    elif words:
        raise wrong
    else:
        yield _control(action, {})


def _control(action: str, arguments: dict[str, str]) -> Control:
    return Control(secrets.randbits(63), action.replace("-", "_"), arguments)


def _pair(word: str, wrong: ValueError) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise wrong
    return name.lstrip("-").replace("-", "_"), value


def _names(name: str) -> Iterator[dict[str, str]]:
    if name.isascii() and name.isdigit():
        yield {"id": name}
    yield {"label": name}
    for prefix in ANSWER_PREFIXES:
        if name.startswith(prefix):
            yield {"label": name.removeprefix(prefix)}


def _address(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Where the scheduler is: flags before environment, an address before a directory. Raises NoAnswer."""
    sources = (
        (options.scheduler_address, options.runtime_dir),
        (environ.get("TRIPTYCH_SCHEDULER_ADDRESS"), environ.get("TRIPTYCH_RUNTIME_DIR")),
    )
    for address, directory in sources:
        if address:
            return str(address)
        if directory:
            return f"ipc://{os.path.abspath(directory)}/scheduler.sock"
    found = live(environ)
    if not found:
        raise NoAnswer("no server of this user is running; name one with --runtime-dir or --scheduler-address")
    if len(found) > 1:
        print(f"triptych ctl: {len(found)} servers are running, this is about {found[0]}", file=sys.stderr)
    return f"ipc://{found[0]}/scheduler.sock"


def _ask_in_turn(address: str, attempts: Sequence[Control], security: LinkSecurity) -> ControlReply:
    """The first answer that is not "no such request", else the first one."""
    first: ControlReply | None = None
    context: zmq.Context[Any] = zmq.Context()
    channel = _channel(context, address, security)
    try:
        for control in attempts:
            reply = _ask(channel, control, time.monotonic() + PATIENCE_S)
            if reply.ok or msgspec.json.decode(reply.body)["code"] != "not_found":
                return reply
            first = first or reply
    finally:
        channel.leave(Goodbye("shutdown", "done"))
        channel.close()
        context.term()
    assert first is not None
    return first


def _channel(context: zmq.Context[Any], address: str, security: LinkSecurity) -> ClientChannel[Any]:
    instance = new_instance()
    try:
        return ClientChannel(
            context,
            address,
            SchedulerToApi,
            lambda: Hello("ctl", wire.PROTOCOL_VERSION, wire.SCHEMA_DIGEST, instance),
            security=security,
        )
    except AddressError:
        context.term()
        raise


def _ask(channel: ClientChannel[Any], control: Control, deadline: float) -> ControlReply:
    """Shake hands if that is still to be done, send, wait."""
    sent = channel.connected
    if sent:
        channel.send(control)
    while time.monotonic() < deadline:
        channel.tick()
        channel.socket.poll(POLL_MS)
        for message in channel.receive():
            if isinstance(message, ControlReply) and message.nonce == control.nonce:
                return message
            if isinstance(message, Refused):
                raise RefusedByScheduler(f"{channel.address} refuses: {message.message}")
            if isinstance(message, Welcome) and not sent:
                sent = True
                channel.send(control)
    raise NoAnswer(f"nobody answered at {channel.address} within {PATIENCE_S:g} s")
