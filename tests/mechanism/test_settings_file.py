"""``--config FILE`` is the same as its settings typed; the Tab key and ``holdfast docs``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.__main__ import main
from runner.command import COMMANDS
from runner.command.help import words
from runner.config.compose import compose, expanded, to_yaml
from runner.launch.torchrun import settings
from runner.system.error import ConfigError

TYPED = [
    "out=runs/x", "model=tiny", "epochs=2", "optim.lr=2e-4", "data.path=[a b.txt,\"c's\"]",
    'data.end_token="<a \\"b\\">"', "data.val_path={one: x, two: [y, z]}", "checkpoint.every=auto",
    "faults=[kill@step=12,rank=0]", "optim.groups=[{match: embed, rate: 0.1}]", "guard=palm",
]  # fmt: skip
WRITTEN = r"""
out: runs/x
model: tiny
epochs: 2
optim.lr: 2e-4
data:
  path: [a b.txt, "c's"]
  end_token: '<a "b">'
  val_path: {one: x, two: [y, z]}
checkpoint: {every: auto}
faults: ["kill@step=12,rank=0"]
optim: {groups: [{match: embed, rate: 0.1}]}
guard: palm
"""


def test_a_file_says_what_typed_settings_say(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(WRITTEN)
    assert compose(expanded(["--config", str(file)])) == compose(TYPED)
    later = expanded([f"--config={file}", "optim.lr=1", "--", "--config", "theirs.yaml"])
    assert later[-4:] == ["optim.lr=1", "--", "--config", "theirs.yaml"]
    assert settings([*later[:-3]]).optim.lr == 1


def test_of_steps_and_epochs_the_command_line_replaces_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("steps: 9\nmodel: tiny\n")
    assert compose(expanded(["--config", str(file), "epochs=2"])).epochs == 2
    kept = compose(expanded(["--config", str(file), "epochs=null"]))
    assert kept.steps == 9 and kept.epochs is None
    file.write_text("epochs: 9\n")
    told = compose(expanded(["--config", str(file), "steps=4"]))
    assert told.steps == 4 and told.epochs is None
    with pytest.raises(ConfigError, match="in place of steps"):
        compose(expanded(["--config", str(file), "steps=4", "epochs=2"]))


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["model=llama_8b", "data=hf", "parallel=zero3", "optim=muon", "debug=off"],
        ["model._target_=pkg.Net", "model.width=3", "model.dim=wide", "data._target_=pkg.open",
         "data.root=a b", "optim._target_=torch.optim.NAdam", "optim.betas=[0.9,0.95]"],
    ],
)  # fmt: skip
def test_the_settings_that_a_run_leaves_start_another(given: list[str], tmp_path: Path) -> None:
    config = compose(given)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert compose(expanded(["--config", str(file)])) == config


@pytest.mark.parametrize("text", [None, "- a\n- b\n", "a: &x 1\nb: *x\n", "{", "stepps: 3\n"])
def test_what_is_no_file_of_settings_is_named(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"my\.yaml|stepps"):
        compose(expanded(["--config", str(file)]))


def test_epochs_and_steps_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="in place of steps; leave one out"):
        compose(["epochs=3", "steps=100"])


def test_the_tab_key_completes_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    for typed, answers in [
        ("holdfast prefl", ["preflight"]),
        ("holdfast launch guard.pers", ["guard.persist="]),
        ("holdfast optim=mu", ["muon"]),
    ]:
        ask = f'. {script}; COMP_LINE="{typed}" COMP_POINT={len(typed)}; _holdfast; '
        shell = ["bash", "-c", ask + 'printf "%s\\n" "${COMPREPLY[@]}"']
        got = subprocess.run(shell, capture_output=True, text=True, check=True)
        assert (got.stdout.split(), got.stderr) == (answers, "")
    assert {"train", *COMMANDS, "out=", "model=tiny", "optim.lr="} <= set(words())


def test_pages_and_settings_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*word: str) -> str:
        assert main(["docs", *word]) == 0
        return capsys.readouterr().out

    assert "  loop " in told()
    assert told("loop") == told("docs/loop.md") and told("loop").startswith("# A loop of your own")
    assert told("optim.lr").startswith("optim.lr=0.003  (float > 0) peak learning rate\n")
    assert "holdfast docs loop " in told("GradScaler")
    assert main(["docs", "nonsense_word"]) == 2
