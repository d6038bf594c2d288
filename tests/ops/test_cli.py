"""The `triptych` command as people type it: help, errors, sources of settings. Real processes, no servers."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness import ROOT

WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "flashinfer", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from ops.cli import main
sys.exit(main(sys.argv[1:]))
"""


def triptych(
    *arguments: str, env: dict[str, str] | None = None, program: str = "", cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
    start = ["-c", program] if program else ["-m", "ops.cli"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
    )


def test_help_lists_the_commands() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        done = triptych(*arguments)
        assert done.returncode == 0
        for command in ("serve", "api", "scheduler", "runner", "bench", "version"):
            assert f"\n  {command} " in done.stdout


def test_version_prints_one() -> None:
    done = triptych("version")
    assert done.returncode == 0
    assert done.stdout.startswith("triptych ")


def test_an_unknown_command_is_refused_with_a_guess() -> None:
    done = triptych("schedular")
    assert done.returncode == 2
    assert "Did you mean scheduler?" in done.stderr


@pytest.mark.parametrize("command", ["serve", "api", "scheduler", "runner"])
def test_a_commands_help_shows_defaults_and_units(command: str) -> None:
    done = triptych(command, "--help")
    assert done.returncode == 0
    assert "[default 10.0 s; a number (s), at least" in " ".join(done.stdout.split())
    assert "--log-interval-s X" in done.stdout


@pytest.mark.parametrize("command", ["serve", "api", "scheduler", "runner"])
def test_a_command_needs_no_torch_to_read_its_settings(command: str) -> None:
    done = triptych(command, "--print-config", program=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr


def test_an_unknown_flag_is_refused_with_a_guess() -> None:
    done = triptych("api", "--prot", "1")
    assert done.returncode == 2
    assert done.stderr == (
        "triptych api: --prot: there is no such flag. Did you mean --port? `triptych api --help` lists all\n"
    )


@pytest.mark.parametrize("arguments", [("--port", "70000"), ("--port=x",), ("--port", "-1")])
def test_a_wrong_value_names_the_flag_the_value_and_what_is_allowed(arguments: tuple[str, ...]) -> None:
    done = triptych("serve", *arguments)
    assert done.returncode == 2
    assert "--port: got '" in done.stderr
    assert "allowed is a whole number from 0 to 65535" in done.stderr


def test_a_wrong_environment_variable_is_named() -> None:
    done = triptych("scheduler", env={"TRIPTYCH_MAX_NUM_SEQS": "none"})
    assert done.returncode == 2
    assert "TRIPTYCH_MAX_NUM_SEQS: got 'none'" in done.stderr


def test_a_misspelt_environment_variable_is_refused_with_a_guess() -> None:
    done = triptych("scheduler", env={"TRIPTYCH_MAX_NUM_SEQ": "3"})
    assert done.returncode == 2
    assert "Did you mean TRIPTYCH_MAX_NUM_SEQS?" in done.stderr


def test_a_variable_for_another_process_is_left_alone() -> None:
    done = triptych("scheduler", "--print-config", env={"TRIPTYCH_DTYPE": "float32", "TRIPTYCH_PORT": "1234"})
    assert done.returncode == 0, done.stderr
    assert "port = 1234" not in done.stdout


def test_each_source_overrides_the_one_below_it_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(
        "max_num_seqs = 3\nblock_size = 32\nport = 1111\nlog_level = 'error'\n[scheduler]\nlog_level = 'debug'\n"
    )
    env = {"TRIPTYCH_CONFIG": str(file), "TRIPTYCH_PORT": "2222", "TRIPTYCH_MAX_NUM_SEQS": "4"}
    done = triptych("serve", "--print-config", "--port", "3333", env=env)
    assert done.returncode == 0, done.stderr
    assert "port = 3333  # flag --port\n" in done.stdout
    assert "max_num_seqs = 4  # env TRIPTYCH_MAX_NUM_SEQS, requests\n" in done.stdout
    assert f"block_size = 32  # {file}: block_size, tokens\n" in done.stdout
    printed = tomllib.loads(done.stdout)
    assert printed["scheduler"]["log_level"] == "debug"
    assert printed["api"]["log_level"] == "error"
    assert printed["runner"]["dtype"] == "auto"


def test_what_is_printed_can_be_read_back(tmp_path: Path) -> None:
    first = triptych("serve", "--print-config", "--port", "81", "--allowed-origins", "http://a,http://b")
    file = tmp_path / "t.toml"
    file.write_text(first.stdout)
    second = triptych("serve", "--print-config", "--config", str(file))
    assert second.returncode == 0, second.stderr
    assert tomllib.loads(second.stdout) == tomllib.loads(first.stdout)


def test_secrets_are_not_printed_and_on_the_command_line_they_are_warned_about() -> None:
    from_env = triptych("serve", "--print-config", env={"TRIPTYCH_API_KEY": "hunter2"})
    assert from_env.returncode == 0
    assert "hunter2" not in from_env.stdout + from_env.stderr
    assert "# api_key is set and hidden  # env TRIPTYCH_API_KEY" in from_env.stdout
    assert from_env.stderr == ""
    from_flag = triptych("serve", "--print-config", "--api-key", "hunter2")
    assert "hunter2" not in from_flag.stdout + from_flag.stderr
    assert "TRIPTYCH_API_KEY can't" in from_flag.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_num_seq = 3", "max_num_seq: there is no such setting. Did you mean max_num_seqs?"),
        ("[scheduler]\nblock_size = 3", "[scheduler] block_size: there is no such setting."),
        ("[schedular]\nx = 3", "[schedular]: there is no such setting. Did you mean scheduler?"),
        ("max_num_seqs = 'many'", "max_num_seqs: got 'many', allowed is a whole number (requests), at least 1"),
        ("max_num_seqs = true", "max_num_seqs: got True"),
        ("= 3", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "t.toml"
    file.write_text(text)
    done = triptych("serve", "--config", str(file), "--print-config")
    assert done.returncode == 2
    assert expected in done.stderr
    assert str(file) in done.stderr


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    done = triptych("serve", "--config", str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert "No such file" in done.stderr


def test_a_table_for_another_process_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[runner]\ndtype = 'float32'\n[serve]\nrestart_limit = 9\n[scheduler]\nmax_num_seqs = 7\n")
    done = triptych("scheduler", "--config", str(file), "--print-config")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["scheduler"]["max_num_seqs"] == 7


def test_a_no_flag_turns_a_default_off() -> None:
    done = triptych("scheduler", "--no-enable-prefix-caching", "--print-config")
    assert "enable_prefix_caching = false  # flag --enable-prefix-caching" in done.stdout


def test_fields_that_contradict_each_other_name_the_flag() -> None:
    done = triptych("runner", "--backend", "sim", "--sim-eos-token-id", "60000")
    assert done.returncode == 2
    assert "--sim-eos-token-id (flag --sim-eos-token-id): got 60000, must be below 49152" in done.stderr


def test_a_runtime_directory_that_others_can_enter_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "open").mkdir()
    (runtime_dir / "open").chmod(0o755)
    done = triptych("scheduler", "--runtime-dir", str(runtime_dir / "open"))
    assert done.returncode == 2
    assert "--runtime-dir: " in done.stderr
    assert "expected 0700" in done.stderr
