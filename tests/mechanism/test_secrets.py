"""Passwords and tokens stay out of everything a run writes and prints."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from runner.config.compose import compose, flat, to_yaml, value_of
from runner.health.rank_report import Report, stack_of, stacks, write_report
from runner.observe.console import Console
from runner.observe.journal import Journal
from runner.policy.decision.history import Incident
from runner.run_dir.paths import RunDir, keep_for_owner
from runner.system import log
from runner.system.environment import HIDDEN, is_secret, redacted
from runner.system.error import ConfigError
from runner.system.json_lines import LineFile

SECRET = "hf_thisIsNotARealTokenButLooksIt"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "token", "WANDB_API_KEY", "apiKey", "AWS_SECRET_ACCESS_KEY", "db_password",
     "PGPASSWD", "client-secret", "GITHUB_TOKEN", "auth_token", "credentials", "authToken"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "token_dtype", "end_token", "begin_token", "tokens_per_second", "tokens",
     "data.tokenizer", "seed", "key", "keep", "TOKENIZERS_PARALLELISM",
     "AWS_WEB_IDENTITY_TOKEN_FILE", "secretary", "num_tokens"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_no_setting_of_ours_is_taken_for_a_secret() -> None:
    config = compose([])
    assert HIDDEN not in json.dumps(flat(config))
    assert not [name for name in flat(config) if is_secret(name)]


def test_redaction_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "ab")  # in too many words to be hidden
    value = {"a": [1, None, True, 2.5, "about"], "b": (f"x{SECRET}y",), "token": 3, "password": "p"}
    value |= {"credentials": {"user": "me"}, "secret": ""}
    assert redacted(value) == {
        "a": [1, None, True, 2.5, "about"],
        "b": (f"x{HIDDEN}y",),
        "token": 3,
        "password": HIDDEN,
        "credentials": HIDDEN,
        "secret": "",
    }


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By name in a free mapping, and by value where the environment was put into a setting."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    config = compose(
        [
            "parallel=zero2",
            "parallel.deepspeed={monitor:{api_key:not-for-you,user:me}}",
            "data.path=[s3://me:${oc.env:HF_TOKEN}@bucket/corpus]",
        ]
    )
    assert config.parallel.deepspeed["monitor"]["api_key"] == "not-for-you"  # it is still used
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.store_config(config)
    for text in (run_dir.config.read_text(), to_yaml(config), value_of(config, "data.path")):
        assert SECRET not in text and "not-for-you" not in text and HIDDEN in text
    assert "user: me" in run_dir.config.read_text()
    assert run_dir.settings_changed(config) == {}


def test_incidents_and_console(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    said = f"401 for https://user:{SECRET}@hub"
    incident = Incident(
        kind="crash", step=1, decision="restart", reason=said, detail={"traceback": said}
    )
    path = tmp_path / "journal.jsonl"
    Journal((), told_to_skip=(), file=LineFile(path, length=0)).add(incident)
    assert SECRET not in path.read_text() and path.read_text().count(HIDDEN) == 2
    log.begin(as_json=False, rank=0)
    Console(silent=False, every=1).incident(incident)
    assert SECRET not in (text := capsys.readouterr().out) and HIDDEN in text


def fail_with(secret: str) -> None:
    password = secret
    raise ValueError(f"no {len(password)}")


def test_reports_hold_no_values_of_variables(tmp_path: Path) -> None:
    local_token = SECRET
    try:
        fail_with(local_token)
    except ValueError as error:
        found = stack_of(error)
    report = Report(
        rank=0, world_size=1, kind="exception", step=1, phase="x", stacks=[found, *stacks()]
    )
    write_report(tmp_path, report)
    [written] = tmp_path.iterdir()
    assert "fail_with" in written.read_text()
    assert SECRET not in written.read_text()


def test_reports_hide_what_a_message_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    words = f"cannot log in as me:{SECRET}"
    write_report(
        tmp_path,
        Report(
            rank=0,
            world_size=1,
            kind="exception",
            step=1,
            phase="x",
            message=words,
            traceback=words,
        ),
    )
    [written] = tmp_path.iterdir()
    assert SECRET not in written.read_text() and "me:[hidden]" in written.read_text()


# Who may read and write


@pytest.mark.parametrize(
    ("umask", "folder", "file"),
    [(0o002, 0o755, 0o644), (0o000, 0o755, 0o644), (0o077, 0o700, 0o600)],
)
def test_nobody_else_can_write_in_a_run(tmp_path: Path, umask: int, folder: int, file: int) -> None:
    """In a process of its own: the umask is the whole process's."""
    out = tmp_path / "run"
    child = os.fork()
    if child == 0:
        os.umask(umask)
        keep_for_owner()
        made = RunDir(out)
        made.create()
        LineFile(made.journal, length=0).close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [out, *out.iterdir()]}
    assert modes == {"run": folder, "ring": folder, "debug": folder, "journal.jsonl": file}


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o755, False), (0o775, False), (0o777, True), (0o1777, False)]
)
def test_a_directory_that_is_open_to_all_is_told(tmp_path: Path, mode: int, is_open: bool) -> None:
    out = tmp_path / "run"
    out.mkdir()
    out.chmod(mode)
    assert RunDir(out).is_open_to_all is is_open


# Nothing stored is ever made


@pytest.mark.parametrize(
    "text",
    [
        "_target_: {module}.create\n",
        "model:\n  _target_: {module}.create\n  _args_: [x]\n",
        "a: !!python/object/apply:{module}.create []\n",
        "a: !!python/name:{module}.create\n",
        "a: ${{oc.env:HOME}}\nb: ${{oc.create:{module}}}\n",
    ],
)
def test_a_stored_config_makes_nothing(tmp_path: Path, text: str) -> None:
    """A module that would leave a mark if it were so much as imported."""
    (tmp_path / "trap_for_configs.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('sprung').touch()\n"
        "def create(*args): pass\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        run_dir = RunDir(tmp_path / "run")
        run_dir.create()
        run_dir.config.write_text(text.format(module="trap_for_configs"))
        with pytest.raises(ConfigError):
            run_dir.refuse_change(run_dir.settings_changed(compose([])), compose([]))
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "sprung").exists()
    assert "trap_for_configs" not in sys.modules


@pytest.mark.parametrize(
    "override",
    ["+_target_=os.system", "++checkpoint._target_=os.system", "guard._target_=os.system",
     "guard={_target_:os.system}", "parallel._target_=os.system"],
)  # fmt: skip
def test_an_override_cannot_name_code(override: str) -> None:
    with pytest.raises(ConfigError):
        compose([override])


@pytest.mark.parametrize("group", ["data", "model", "optim", "schedule"])
def test_where_code_may_be_named_nothing_is_called_by_composing_or_comparing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """The command may name code; a stored config may not, whatever it says."""
    (tmp_path / "trap_of_data.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = compose([f"{group}._target_=trap_of_data.create", f"{group}.root=/x"])
    own = getattr(named, group)
    assert (own._target_, own.arguments) == ("trap_of_data.create", {"root": "/x"})
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.store_config(named)
    changed = run_dir.settings_changed(compose([]))
    assert changed[f"{group}._target_"] == ("trap_of_data.create", None)
    assert changed[f"{group}.arguments.root"] == ("/x", None)
    assert run_dir.settings_changed(named) == {}
    assert "trap_of_data" not in sys.modules


def test_an_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.config.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="alias"):
        run_dir.settings_changed(compose([]))


def test_a_config_nested_without_end_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.config.write_text("a: " + "{b: " * 100_000)
    with pytest.raises(ConfigError, match="levels deep"):
        run_dir.settings_changed(compose([]))
