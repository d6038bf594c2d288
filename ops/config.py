"""Fills config classes from defaults, a TOML file, the environment and flags, and remembers where each value came from.

What a field means and allows is its class's business (`protocol.settings`); this module only collects.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from protocol.process import PARENT_ENV, WATCHDOG_ENV
from protocol.settings import ENV_PREFIX, SettingError, Spec, convert, specs

C = TypeVar("C")
CONFIG_ENV = ENV_PREFIX + "CONFIG"
DEFAULT_SOURCE = "default"
_COMPOSE_NAMES = (
    *("BASE_IMAGE", "BUILD_NETWORK", "GPU_BASE_IMAGE", "GRAFANA_IMAGE", "MODELS", "MODEL_PACKAGE"),
    *("PROMETHEUS_IMAGE", "PUBLISH", "TAG", "TORCH_INDEX_URL"),
)
RESERVED_ENV = frozenset({CONFIG_ENV, PARENT_ENV, WATCHDOG_ENV, *(ENV_PREFIX + name for name in _COMPOSE_NAMES)})
"""Names with our prefix that are not settings of a config class: ours alone, or only for docker-compose.yml."""
Groups = Mapping[str, type]
"""Table name in the file ("api", "scheduler", …) → config class."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The filled configs by table name, and per table where each field's value came from."""

    configs: Mapping[str, Any]
    sources: Mapping[str, Mapping[str, str]]
    print_requested: bool
    warnings: tuple[str, ...]

    def get(self, table: str, kind: type[C]) -> C:
        """The config of one table, checked to be of the class you expect."""
        config = self.configs[table]
        if not isinstance(config, kind):
            raise TypeError(f"[{table}] is a {type(config).__name__}, not a {kind.__name__}")
        return config

    def given(self, table: str) -> dict[str, Any]:
        """The fields of one table that something other than the default set."""
        config = self.configs[table]
        return {name: getattr(config, name) for name, where in self.sources[table].items() if where != DEFAULT_SOURCE}


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are SettingErrors, so that one place prints them."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(message)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)


def load(
    groups: Groups,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str,
    defaults: Mapping[str, Any] | None = None,
    elsewhere: Callable[[], Groups] = dict,
) -> Loaded:
    """Fill the classes of `groups`. SettingError for a wrong value or an unknown name; SystemExit(0) after `--help`.

    Classes that share a field name share its flag, variable and top-level key; a table in the file sets one class's
    alone. `defaults` replaces defaults for this command. `elsewhere` gives the classes that only other commands use:
    their names in the environment and the file are left alone instead of being errors, so that all containers can
    share one file.
    """
    known = {table: _with_defaults(specs(config), defaults or {}) for table, config in groups.items()}
    parser = _parser(known, prog, description)
    flags = _parse_flags(parser, argv)
    others = _Elsewhere(elsewhere, frozenset(groups))
    values: dict[str, dict[str, tuple[Any, str]]] = {
        table: {name: (spec.default, DEFAULT_SOURCE) for name, spec in fields.items()}
        for table, fields in known.items()
    }
    path = flags.pop("config", None) or environ.get(CONFIG_ENV, "")
    if path:
        _apply_file(Path(path), known, values, others)
    _apply_environment(environ, known, values, others)
    printing = flags.pop("print_config", False)
    _apply_flags(flags, known, values)
    return Loaded(
        configs={table: _build(config, known[table], values[table]) for table, config in groups.items()},
        sources={table: {name: where for name, (_, where) in fields.items()} for table, fields in values.items()},
        print_requested=printing,
        warnings=tuple(_warn_secrets(flags, known)),
    )


def render(loaded: Loaded) -> str:
    """What is in force as TOML that can be fed back, with sources; secrets and unset values are comments."""
    known = {table: specs(type(config)) for table, config in loaded.configs.items()}
    shared: list[str] = []
    apart: dict[str, list[str]] = {table: [] for table in known}
    seen: set[str] = set()
    for table, fields in known.items():
        for name, spec in fields.items():
            holders = [other for other in known if name in known[other]]
            facts = {(repr(getattr(loaded.configs[other], name)), loaded.sources[other][name]) for other in holders}
            line = _line(spec, getattr(loaded.configs[table], name), loaded.sources[table][name])
            if len(holders) > 1 and len(facts) == 1:
                if name not in seen:
                    shared.append(line)
                seen.add(name)
            else:
                apart[table].append(line)
    sections = ["\n".join(shared)] if shared else []
    sections += [f"[{table}]\n" + "\n".join(lines) for table, lines in apart.items() if lines]
    return "\n\n".join(sections) + "\n"


def suggest(name: str, known: Iterable[str]) -> str:
    """` Did you mean X?` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def _with_defaults(fields: Mapping[str, Spec], defaults: Mapping[str, Any]) -> dict[str, Spec]:
    return {name: replace(spec, default=defaults[name]) if name in defaults else spec for name, spec in fields.items()}


class _Elsewhere:
    """Names that other commands know, looked up only when something unknown turns up (it imports their classes)."""

    def __init__(self, groups: Callable[[], Groups], own: frozenset[str]) -> None:
        self._groups = groups
        self._own = own
        self._specs: dict[str, dict[str, Spec]] | None = None

    def tables(self) -> dict[str, dict[str, Spec]]:
        if self._specs is None:
            self._specs = {table: specs(kind) for table, kind in self._groups().items() if table not in self._own}
        return self._specs

    def names(self) -> dict[str, Spec]:
        return {name: spec for fields in self.tables().values() for name, spec in fields.items()}


def _all_names(known: Mapping[str, Mapping[str, Spec]]) -> dict[str, Spec]:
    """Each name once. TypeError if two classes give one name different types, since one flag fills both."""
    names: dict[str, Spec] = {}
    for fields in known.values():
        for name, spec in fields.items():
            first = names.setdefault(name, spec)
            if (first.kind, first.optional) != (spec.kind, spec.optional):
                raise TypeError(f"{name} has two types: {first.kind.__name__} and {spec.kind.__name__}")
    return names


def _parser(known: Mapping[str, Mapping[str, Spec]], prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description=description,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings (env {CONFIG_ENV})")
    parser.add_argument("--print-config", action="store_true", help="print what is in force and its sources, then exit")
    names = _all_names(known)
    owners = {name: [table for table in known if name in known[table]] for name in names}
    for title in ["common", *known]:
        section = parser.add_argument_group(title)
        for name, spec in names.items():
            if title == (owners[name][0] if len(owners[name]) == 1 else "common"):
                _add_flag(section, spec)
    return parser


def _add_flag(section: argparse._ArgumentGroup, spec: Spec) -> None:
    text = f"{spec.help} {_facts(spec)}".replace("%", "%%")
    if spec.kind is bool:
        section.add_argument(spec.flag, dest=spec.name, action="store_const", const="true", default=None, help=text)
        off = "--no-" + spec.flag[2:]
        section.add_argument(off, dest=spec.name, action="store_const", const="false", help=argparse.SUPPRESS)
        return
    metavar = {int: "N", float: "X", tuple: "A,B"}.get(spec.kind, "TEXT")
    section.add_argument(spec.flag, dest=spec.name, default=None, metavar=metavar, help=text)


def _facts(spec: Spec) -> str:
    if spec.secret:
        shown = "hidden" if spec.default else "unset"
    elif spec.kind is bool:
        shown = f"{'on' if spec.default else 'off'}; --no-{spec.flag[2:]} turns it off"
    elif spec.kind is tuple:
        shown = ",".join(spec.default) or "empty"
    else:
        shown = '""' if spec.default == "" else str(spec.default)
        if spec.unit and spec.default is not None:
            shown += f" {spec.unit}"
    facts = [f"default {shown}"]
    if spec.kind is not bool and (spec.choices is not None or spec.minimum is not None or spec.maximum is not None):
        facts.append(spec.allowed())
    return f"[{'; '.join(facts)}]"


def _parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        word = unknown[0].split("=", 1)[0]
        raise SettingError(f"{word}: there is no such flag.{suggest(word, flags)} `{parser.prog} --help` lists all")
    return {name: value for name, value in vars(parsed).items() if value is not None}


def _apply_file(
    path: Path,
    known: Mapping[str, Mapping[str, Spec]],
    values: dict[str, dict[str, tuple[Any, str]]],
    others: _Elsewhere,
) -> None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--config: {path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"--config: {path} is not valid TOML: {error}") from None
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    flat = {key: value for key, value in document.items() if key not in tables}
    for key, raw in flat.items():
        hits = [table for table in known if key in known[table]]
        for table in hits:
            values[table][key] = (convert(known[table][key], raw, f"{path}: {key}"), f"{path}: {key}")
        if not hits and key not in others.names():
            raise SettingError(_unknown_key(f"{path}: {key}", key, [*_all_names(known), *others.names()]))
    for table, content in tables.items():
        fields = known.get(table)
        if fields is None:
            fields = others.tables().get(table)
        if fields is None:
            raise SettingError(_unknown_key(f"{path}: [{table}]", table, [*known, *others.tables()]))
        for key, raw in content.items():
            if key not in fields:
                raise SettingError(_unknown_key(f"{path}: [{table}] {key}", key, fields))
            if table in known:
                where = f"{path}: [{table}] {key}"
                values[table][key] = (convert(fields[key], raw, where), where)


def _unknown_key(where: str, word: str, known: Iterable[str]) -> str:
    return f"{where}: there is no such setting.{suggest(word, known)}"


def _apply_environment(
    environ: Mapping[str, str],
    known: Mapping[str, Mapping[str, Spec]],
    values: dict[str, dict[str, tuple[Any, str]]],
    others: _Elsewhere,
) -> None:
    by_env = {spec.env: name for name, spec in _all_names(known).items()}
    for variable, raw in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in RESERVED_ENV:
            continue
        name = by_env.get(variable)
        if name is None:
            foreign = {spec.env for spec in others.names().values()}
            if variable not in foreign:
                guess = suggest(variable, [*by_env, *foreign, *RESERVED_ENV])
                raise SettingError(f"{variable}: there is no such setting.{guess} `triptych serve --help` lists all")
            continue
        for table, fields in known.items():
            if name in fields:
                values[table][name] = (convert(fields[name], raw, variable), f"env {variable}")


def _apply_flags(
    flags: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Spec]],
    values: dict[str, dict[str, tuple[Any, str]]],
) -> None:
    for name, raw in flags.items():
        for table, fields in known.items():
            if name in fields:
                flag = fields[name].flag
                values[table][name] = (convert(fields[name], raw, flag), f"flag {flag}")


def _build(config: type, known: Mapping[str, Spec], fields: Mapping[str, tuple[Any, str]]) -> Any:
    try:
        return config(**{name: value for name, (value, _) in fields.items()})
    except ValueError as error:
        # A class that checks fields against each other starts its message with a field's name: say where that was set.
        name, _, rest = str(error).partition(":")
        if name not in known:
            raise SettingError(str(error)) from error
        source = fields[name][1]
        raise SettingError(f"{known[name].flag} ({source}):{rest}") from error


def _warn_secrets(flags: Mapping[str, Any], known: Mapping[str, Mapping[str, Spec]]) -> Iterable[str]:
    for name, spec in _all_names(known).items():
        if spec.secret and name in flags:
            yield f"{spec.flag} on the command line can be read by every user of this machine; {spec.env} can't"


def _line(spec: Spec, value: Any, source: str) -> str:
    if value is None:
        return f"# {spec.name} is unset  # {source}"
    if spec.secret and value:
        return f"# {spec.name} is set and hidden  # {source}"
    unit = f", {spec.unit}" if spec.unit else ""
    return f"{spec.name} = {_toml(value)}  # {source}{unit}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in escaped) + '"'
    return repr(value)
