"""The run's directory: where each file lies, and whether this command may continue it."""

from __future__ import annotations

import hashlib
import operator
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.compose import digest, flat, from_yaml, to_yaml, trajectory
from runner.config.schema import Precision, ResumeConfig, RunConfig
from runner.system.error import ConfigError
from runner.system.files import make_folder, read_bounded, write_durably
from runner.system.json_lines import read_object
from runner.system.parsing import parse_json, whole

ENDLESS = 1 << 53  # steps of a user's loop, which ends when it likes
_CONFIG_BYTES = _SUMMARY_BYTES = 4 << 20
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_ID_BYTES = 4096
_NOT_FOR_OTHERS = 0o022
# Mappings with arbitrary keys, which decide the trajectory; an entry may be removed.
_ARGUMENT = re.compile(r"((?!track\.)[a-z]+\.arguments|model\.lora|model\.rope_scaling)\.")
# Another value changes the tensors, so that no checkpoint of the run can be loaded.
_RESHAPING = frozenset(
    [
        *(f"model.{name}" for name in ("dim", "layers", "kv_heads", "ffn_dim", "vocab_size")),
        *(f"model.{name}" for name in ("tied_head", "qk_norm", "kind")),
        "compute.frozen",
        *(f"optim.{name}" for name in ("_target_", "kind", "ema")),
    ]
)


class RunDir:
    """Names of the files that a run leaves in ``out``."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.config = out / "config.yaml"
        self.journal = out / "journal.jsonl"
        self.metrics = out / "metrics.jsonl"
        self.layers = out / "layers.jsonl"
        self.rank_times = out / "ranks.jsonl"
        self.ring_lines = out / "ring.jsonl"
        self.summary = out / "summary.json"
        self.ring = out / "ring"
        self.faults = out / "faults"
        self.debug = out / "debug"
        self.tensorboard = out / "tensorboard"
        self.incarnation = out / "incarnation"
        self.incidents = out / "incidents"
        self.explanations = out / "explanations"
        self.run_id = out / "run_id"
        self.pretrained = out / "pretrained"
        self.alerts = self.debug / "alerts.json"

    def stored_summary(self) -> dict[str, Any] | None:
        """What ``summary.json`` holds; None where there is none that can be read."""
        return read_object(self.summary, _SUMMARY_BYTES, follow=True) or None

    def incident(self, number: int) -> Path:
        """The folder for the failure reports of an incarnation."""
        return self.incidents / f"{number:06d}"

    def explanation(self, number: int) -> Path:
        """The evidence of a bad step, by the number of its journal line."""
        return self.explanations / f"{number:06d}"

    def observer_note(self, name: str | int) -> Path:
        """What a start leaves that ends in an observer; by rank, or what was explained."""
        return self.debug / f"observer-{name}.json"

    def attempts(self, tracker: str) -> Path:
        """The file with the number of steps attempted so far, for a tracker."""
        return self.debug / f"attempts-{tracker}.json"

    def fatal(self, number: int, rank: int) -> Path:
        """The log of a fatal signal of one rank; removed at an orderly end."""
        return self.debug / f"fatal-{number:06d}-rank-{rank:05d}.txt"

    def create(self) -> None:
        """Make the directory.

        Raises:
            ConfigError: it cannot be made or written.
        """
        try:
            make_folder(self.ring)
            self.debug.mkdir(exist_ok=True)
            probe = self.out / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"out={self.out}: cannot be written ({error})") from None

    def identity(self) -> str:
        """The run's random name, made at its first start."""
        name = self.known_identity()
        if name is None:
            name = secrets.token_hex(16)
            write_durably(self.run_id, name.encode() + b"\n")
        return name

    def known_identity(self) -> str | None:
        """The run's random name if it has been made; only reads."""
        try:
            name = read_bounded(self.run_id, _ID_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        return name if _RUN_ID.fullmatch(name) else None

    @property
    def alert_name(self) -> str:
        """What begins the keys of the run's messages; equal for all who tell of it."""
        path = self.out.absolute()
        return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"

    @property
    def is_open_to_all(self) -> bool:
        """Whether other users may write there, and so decide what the next start loads."""
        mode = self.out.stat().st_mode
        return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX

    def settings_changed(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Keys that decide the trajectory and differ from the stored ones: (was, is)."""
        if not self.config.exists():
            return {}
        return settings_differing(self.stored_settings(), config)

    def stored_settings(self) -> dict[str, Any]:
        """Dotted keys of the settings in ``out``; empty before there are any.

        Without ``steps`` where they are :data:`ENDLESS`.

        Raises:
            ConfigError: the file is not one of settings.
        """
        if not self.config.exists():
            return {}
        settings = from_yaml(_text(self.config), source=self.config)
        return {key: one for key, one in settings.items() if (key, one) != ("steps", ENDLESS)}

    def refuse_change(
        self, changed: dict[str, tuple[Any, Any]], config: RunConfig, place: str = ""
    ) -> None:
        """
        Args:
            place: where the stored settings are; ``out`` by default.

        Raises:
            ConfigError: something changed that ``config.resume`` does not allow; every such key is
                named, with what to type to go on.
        """
        refused = {
            key: values for key, values in changed.items() if not is_allowed(key, config.resume)
        }
        if refused:
            raise ConfigError(
                f"{place or f'out={self.out}'} holds a run with other settings:\n"
                f"{_told(refused)}\n{_remedies(refused, config)}"
            )

    def refuse_other_tensors(
        self,
        stored: Mapping[str, tuple[int, ...]],
        wanted: Mapping[str, tuple[int, ...]],
        changed: dict[str, tuple[Any, Any]],
    ) -> None:
        """
        Args:
            stored: names of a checkpoint's tensors and their shapes.
            wanted: those of the model of these settings. With parameters alone, of which nobody
                knows yet what the optimizer keeps beside them, parameters alone are compared.

        Raises:
            ConfigError: they differ. Nothing in ``out`` was touched.
        """
        is_param = operator.methodcaller("startswith", "param/")
        if all(map(is_param, wanted)):
            stored = {name: shape for name, shape in stored.items() if is_param(name)}
        names = sorted(stored.keys() | wanted.keys(), key=lambda name: (not is_param(name), name))
        differing = [name for name in names if stored.get(name) != wanted.get(name)]
        if not differing:
            return
        name = differing[0]
        blamed = {
            key: values
            for key, values in changed.items()
            if key.startswith(("model.", "compute.frozen"))
        }
        raise ConfigError(
            f"out={self.out}: its checkpoints are of another model than that of these settings: "
            f"{len(differing)} tensors differ, first {name}: {_shape(stored.get(name))} there, "
            f"{_shape(wanted.get(name))} here"
            + (f"\n{_told(blamed)}" if blamed else "")
            + "\nA run keeps its tensors, whatever resume.allow says: give the old values, or "
            "another out, which `holdfast export` and `holdfast import` begin with these weights"
        )

    def store_config(self, config: RunConfig) -> None:
        """Write the resolved settings, with their digest on top."""
        write_durably(self.config, _stored(config).encode())

    def has_settings(self, config: RunConfig) -> bool:
        """Whether its last start began with just these settings.

        What ``epochs`` are in steps the data alone says, and that start counted.
        """
        if config.epochs is not None:
            config = replace(config, steps=self.stored_settings().get("steps", config.steps))
        given = config.compute.precision
        settled = Precision if given is Precision.auto else [given]
        computes = (replace(config.compute, precision=precision) for precision in settled)
        text = _text(self.config) if self.config.exists() else ""
        return any(_stored(replace(config, compute=compute)) == text for compute in computes)


def _stored(config: RunConfig) -> str:
    """``epochs`` as a comment: the file may begin another run, which takes ``steps`` or these."""
    given = "" if config.epochs is None else f"# epochs={config.epochs!r}\n"
    config = replace(config, epochs=None)
    return f"# settings sha256 {digest(flat(config))}\n{given}{to_yaml(config)}"


def is_allowed(key: str, resume: ResumeConfig) -> bool:
    """Whether a setting may differ from the run's."""
    if resume.allow_change:
        return True
    allowed = [*resume.allow, *(["schedule.total"] if "steps" in resume.allow else [])]
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in allowed)


def _told(changed: dict[str, tuple[Any, Any]]) -> str:
    return "\n".join(
        f"  {key}: was {_shown(was)}, now {_shown(now)}" for key, (was, now) in changed.items()
    )


def _remedies(refused: dict[str, tuple[Any, Any]], config: RunConfig) -> str:
    """The overrides to type instead; each of them works."""
    keys = [*config.resume.allow, *(key for key in refused if key not in _RESHAPING)]
    fixed = [key for key in refused if key in _RESHAPING]
    lines = []
    if fixed:
        lines.append(f"{', '.join(fixed)}: cannot change, the checkpoints hold other tensors.")
    else:
        lines.append(
            f"To continue with the new values add 'resume.allow=[{','.join(keys)}]' (or "
            "resume.allow_change=true for whatever has changed); each change is journalled."
        )
    was, _ = refused.get("schedule.total", (None, None))
    warmup = config.schedule.warmup
    # Not a number: the stored settings are a file that a person may have edited.
    follows = isinstance(was, int) and was > 0 and config.schedule.total is None
    if follows and (was > warmup or config.steps <= warmup):
        then = (
            "trains on at the rate that the schedule ended with"
            if config.steps > was
            else "ends sooner, on the schedule as it was"
        )
        given = "steps" if config.epochs is None else "epochs"
        lines.append(
            f"schedule.total follows {given} where it is not given: "
            f"{given}={getattr(config, given)} schedule.total={was} {then}."
        )
    return "\n".join([*lines, "Or give the old values, or another out."])


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def settings_differing(stored: dict[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that decide the trajectory and differ: (was, is). ``stored`` is left changed."""
    stored["schedule.total"] = _stored_total(stored)
    if stored.get("compute.precision") == "auto":  # from an import, which has not trained
        stored["compute.precision"] = config.compute.precision.value
    current = trajectory(config)
    taken_away = {name: None for name in stored if _ARGUMENT.match(name) and name not in current}
    return {
        name: (stored.get(name), value)
        for name, value in {**current, **taken_away}.items()
        if stored.get(name) != value
    }


def keep_for_owner() -> None:
    """Set the umask so that nobody else can write what this process makes.

    Who may write in a run directory decides what the next start loads. Who may read there is
    left to the user's umask: people read each other's runs.
    """
    os.umask(os.umask(_NOT_FOR_OTHERS) | _NOT_FOR_OTHERS)


def _shown(value: object) -> str:
    """A stored value for a terminal: shortened, and without control characters."""
    text = "null" if value is None else str(value)[:200]
    return text if text.isprintable() else repr(text)


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _CONFIG_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a settings file ({error})") from None


def _stored_total(stored: dict[str, Any]) -> Any:
    """The schedule's length as :func:`runner.config.compose.trajectory` counts it."""
    if stored.get("schedule.kind") == "constant":
        return None
    return stored.get("schedule.total") or stored.get("steps")


# Reads the evidence of bad steps in ``OUT/explanations``, which a run leaves there.


INCIDENT, SAMPLES = "incident.json", "samples.txt"
MOST_JSON = 16 << 20  # bytes
VERSION = 1


def read_explanation(folder: Path) -> dict[str, Any]:
    """Read what a run left in a folder of a bad step.

    Raises:
        ValueError: it is not a bundle of this version.
        OSError: it cannot be read, or is too large.
    """
    tree = parse_json(read_bounded(folder / INCIDENT, MOST_JSON))
    if not isinstance(tree, dict) or tree.get("version") != VERSION:
        raise ValueError(f"{folder / INCIDENT} is not evidence of version {VERSION}")
    finding = tree.get("finding")
    if not isinstance(finding, dict) or not isinstance(tree.get("probes"), dict):
        raise ValueError(f"{folder / INCIDENT} has no finding")
    whole(tree.get("step"), "step")
    return tree


def explanations(folder: Path) -> list[int]:
    """The numbers of the bundles in ``OUT/explanations``, oldest first."""
    names = {path.parent.name for path in folder.glob(f"*/{INCIDENT}")}
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())
