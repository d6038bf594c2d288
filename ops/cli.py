"""The `triptych` command: picks the subcommand, loads its settings, and calls the process's own entry point.

Imports are late on purpose: `triptych scheduler` must work without torch, and `--help` must be quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ops import config as settings_sources
from ops.config import Groups, Loaded, suggest
from protocol.process import die_with_parent, ensure_private_dir, setup_logging
from protocol.settings import SettingError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
STANDALONE_RUNTIME_DIR = "/tmp/triptych"

CONFIG_CLASSES = {
    "api": ("services.config", "ApiConfig"),
    "scheduler": ("scheduler.config", "SchedulerConfig"),
    "runner": ("runner.config", "RunnerConfig"),
    "serve": ("ops.serve_config", "ServeConfig"),
}
ENTRY_POINTS = {"api": "services.main", "scheduler": "scheduler.main", "runner": "runner.main"}

HELP = """\
usage: triptych COMMAND [OPTIONS]

Triptych serves large language models in three processes.

commands:
  serve       API service, scheduler and runner on this machine, watched by one supervisor
  api         one API service: HTTP and text
  scheduler   one scheduler: decides what runs
  runner      one runner: holds the weights and computes
  ctl         pause, drain, change settings of a running scheduler, ask what it does (`triptych ctl --help`)
  explain     why a request took as long as it did (`triptych explain ID`)
  replay      recorded traffic through the scheduler on a virtual clock: presets compared (`triptych replay --help`)
  bench       load generators and measurements (`triptych bench --help`)
  calibrate   measure a running server's steps and fit the cost model for replays
  keygen      make the key pair that processes on several machines share (`triptych keygen FILE`)
  costs       what KV memory, recompute and swap cost for a model, and where the last two tie
  version     print the version

`triptych COMMAND --help` lists a command's options with their defaults and units. Each option can also be given as an
environment variable (--max-num-seqs: TRIPTYCH_MAX_NUM_SEQS) or in a TOML file (--config FILE; max_num_seqs = 64).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code (0 fine, 1 failed, 2 wrong settings, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    if command in ("version", "--version", "-V"):
        print(f"triptych {version()}")
        return 0
    handler = _COMMANDS.get(command)
    if handler is None:
        print(f"triptych: there is no command {command!r}.{suggest(command, _COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return handler(arguments)
    except SettingError as error:
        print(f"triptych {command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def version() -> str:
    """The installed version, or the source tree's own when it was not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("triptych")
    except PackageNotFoundError:
        return "0+source"


def _bench(argv: list[str]) -> int:
    from ops.bench.cli import main as bench

    return bench(argv)


def _calibrate(argv: list[str]) -> int:
    from ops.calibrate.cli import main as calibrate

    return calibrate(argv)


def _costs(argv: list[str]) -> int:
    from ops.costs import main as costs

    return costs(argv)


def _keygen(argv: list[str]) -> int:
    from ops.keygen import main as keygen

    return keygen(argv)


def _ctl(argv: list[str]) -> int:
    from ops.ctl import main as ctl

    return ctl(argv)


def _explain(argv: list[str]) -> int:
    return _ctl(["explain", *argv])


def _replay(argv: list[str]) -> int:
    from ops.replay.cli import main as replay

    return replay(argv)


def _serve(argv: list[str]) -> int:
    loaded = _load("serve", ("serve", "api", "scheduler", "runner"), argv, {"runtime_dir": ""})
    if loaded.print_requested:
        return 0
    from ops import serve

    return serve.run(loaded, os.environ)


def _role(role: str) -> Callable[[list[str]], int]:
    def command(argv: list[str]) -> int:
        die_with_parent()
        loaded = _load(role, (role,), argv, {"runtime_dir": STANDALONE_RUNTIME_DIR})
        if loaded.print_requested:
            return 0
        config = _with_model(loaded, role)
        setup_logging(role, config.log_level)
        try:
            ensure_private_dir(config.runtime_dir)
        except OSError as error:
            raise SettingError(f"--runtime-dir: {error}") from error
        try:
            entry = importlib.import_module(ENTRY_POINTS[role])
        except ModuleNotFoundError as error:
            extra = " (pip install 'triptych[cpu]')" if role == "runner" else ""
            print(f"triptych {role}: needs the Python package {error.name}{extra}", file=sys.stderr)
            return EXIT_FAILED
        code: int = entry.run(config)
        return code

    return command


def _with_model(loaded: Loaded, role: str) -> Any:
    """The role's config with its model's name turned into a path, where the role has a model."""
    config = loaded.configs[role]
    if not hasattr(config, "model"):
        return config
    from ops.models import model_and_name

    given = "served_model_name" in loaded.given(role)
    path, name = model_and_name(config.model, config.served_model_name if given else "")
    return replace(config, model=str(path), served_model_name=name)


def _load(command: str, tables: Sequence[str], argv: list[str], defaults: dict[str, Any]) -> Loaded:
    loaded = settings_sources.load(
        _classes(tables),
        argv,
        os.environ,
        prog=f"triptych {command}",
        description=next(line.split(None, 1)[1] for line in HELP.splitlines() if line.startswith(f"  {command} ")),
        defaults={"model": "smollm2-135m-instruct", **defaults},
        elsewhere=lambda: _classes(tuple(CONFIG_CLASSES)),
    )
    for warning in loaded.warnings:
        print(f"triptych {command}: warning: {warning}", file=sys.stderr)
    if loaded.print_requested:
        print(settings_sources.render(loaded), end="")
    return loaded


def _classes(tables: Sequence[str]) -> Groups:
    return {
        table: getattr(importlib.import_module(module), name)
        for table, (module, name) in CONFIG_CLASSES.items()
        if table in tables
    }


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "api": _role("api"),
    "scheduler": _role("scheduler"),
    "runner": _role("runner"),
    "ctl": _ctl,
    "explain": _explain,
    "replay": _replay,
    "bench": _bench,
    "calibrate": _calibrate,
    "costs": _costs,
    "keygen": _keygen,
}

if __name__ == "__main__":
    sys.exit(main())
