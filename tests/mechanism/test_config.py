"""Settings: every preset composes, every mistake is told by key, value and what is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runner.__main__ import main
from runner.config import compose as compose_module
from runner.config import foreign_keys, unknown_key
from runner.config.compose import (
    compose,
    digest,
    fields,
    flat,
    from_yaml,
    packaged_configs,
    to_yaml,
    trajectory,
)
from runner.config.schema import RunConfig
from runner.config.validate import check, check_extras
from runner.fault.spec import parse_faults
from runner.launch.torchrun import settings
from runner.system.error import ConfigError
from scripts import gpu_check, screenshot, soak, soak_trace
from tests import golden

PRESETS = sorted(packaged_configs().glob("*/*.yaml"))
KEYS = [name for name, _, _ in fields(RunConfig())]


def settle(*overrides: str, world_size: int = 1, config_dir: Path | None = None) -> RunConfig:
    """What the command line does with overrides before anything starts."""
    config = compose(overrides, config_dir=None if config_dir is None else str(config_dir))
    check(config, world_size=world_size)
    parse_faults(config.faults)
    return config


def refusal(*overrides: str, world_size: int = 1, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        settle(*overrides, world_size=world_size, config_dir=config_dir)
    assert caught.value.exit_code == 2
    return str(caught.value)


# What Hydra, OmegaConf and the YAML reader say is theirs to change.
_FOREIGN = re.compile(r"(?<=: )(?!no such preset).*(?=\. (?:Allowed:|Write key))")


def same(text: str) -> None:
    if text.startswith(("cannot compose", "In '")):
        text = text.partition(": ")[0]
    golden.same(_FOREIGN.sub("...", text, count=1))


@cache
def composed(path: Path) -> RunConfig:
    told = f"{path.parent.name}={path.stem}"
    return compose([told, *(["model.path=here"] if told == "model=hf" else [])])


def preset(folder: Path, name: str, text: str) -> Path:
    """A user's own ``model=NAME`` under ``folder``."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / f"{name}.yaml").write_text(text)
    return folder


class TestPresets:
    @pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}={path.stem}")
    def test_each_composes_to_the_schema(self, path: Path) -> None:
        config = composed(path)
        assert type(config) is RunConfig
        check(config, world_size=1)

    @pytest.mark.parametrize(
        ("override", "key", "value"),
        [
            ("model=tiny", "model.dim", "32"),
            ("data=synthetic", "data.kind", "DataKind.synthetic"),
            ("parallel=hsdp", "parallel.reduce_each_micro_batch", "False"),
            ("guard=off", "guard.enabled", "False"),
            ("schedule=wsd", "schedule.kind", "ScheduleKind.wsd"),
            ("debug=off", "debug.kind", "DebugKind.off"),
            ("track=tensorboard", "track.tensorboard", "True"),
        ],
    )
    def test_a_preset_changes_its_group(self, override: str, key: str, value: str) -> None:
        values = {name: str(value) for name, _, value in fields(compose([override]))}
        assert values[key] == value

    def test_without_overrides_the_schema_rules(self) -> None:
        assert flat(compose([])) == flat(RunConfig())


# What is refused


@pytest.mark.parametrize(
    "override",
    [
        "stepz=3", "optim.lrr=1", "guard.wholly_other=1", "modle=tiny", "model=huge",
        "parallel=tensor", "steps=abc", "steps=null", "steps=", "optim.lr=fast", "model.dim=1.5",
        "model.tied_head=maybe", "compute.precision=fp16", "model.precision=fp32",
        "+model.frozen=[a]", "resume.allow=[model.frozen]", "data.path={a:1}", "data.path=3",
        "data.path=null", "optim.lr=-1", "optim.lr=nan", "optim.eps=inf", "data.held_out=1",
        "steps=0", "seed=-1", "debug.replica_check_every=111", "checkpoint.memory_slots=1",
        "checkpoint.memory_limit_gib=0", "checkpoint.write_mib_per_second=-1",
        "checkpoint.every=5", "checkpoint.every=often", "checkpoint.every=2.5",
        "checkpoint.every=true", "checkpoint.every=0", "checkpoint.every=-3",
        "checkpoint.every=[1]", "checkpoint.every=null", "checkpoint.every=Auto",
        "checkpoint.auto_most=7", "guard.min_history=999", "guard.pair_floor=1", "schedule.total=3",
        "data.skip=[[5,2]]", "data.skip=[[-1,2]]", "data.skip=[[1,2],7]", "data.skip=[[1,2,3]]",
        "data.skip=[[false,true]]", "data.skip=7", "faults=[melt@step=3]", "faults=[kill@rank=1]",
        "faults=null", "out=", "parallel.device=tpu", "hydra.run.dir=x", "+hydra.verbose=true",
        "+new=1", "+guard.extra=1", "++guard.extra=1", "steps", "data.path=[a", "data.path=",
        "data.path=[a,' ']", "data.val_path=", "data.sources=[{name: a, path: ''}]", "out=a=b",
        "steps=1,2", "data.path=a,b", "out=a,b", "~eval", "~evl.every", "~model", "lr=1e-4",
        "clip=3", "every=3", "steps=1e3", "batch.micro_size=2.0", "steps=1.5e0", "steps=1e99",
        "resume.allow=[optim.lrr]", "resume.allow=[track.every]", "steps=${nope}",
        "steps=${steps}", "eval=false", "resume=true", "guard=false", "model=null",
        "checkpoint=10", "faults=kill@step=3,rank=0", "data=mydir/", "=3", "guard=null", "+=[]",
        "model.rope_scaling=[8]", "model.rope_scaling={rope_type:yarn}",
        "model.rope_scaling={factor:8}", "model.rope_scaling={beta:8}",
        "model.lora={r:8,targets:[q_proj]}", "model.path=here", "model.kind=gpt",
    ],
)  # fmt: skip
def test_a_mistake_is_told(override: str) -> None:
    same(refusal(override))


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ("batch.global_size=3", 4),
        ("parallel=single", 2),
        ("checkpoint.memory_every=0 checkpoint.memory_mirror=true", 2),
        ("checkpoint.memory_every=0 checkpoint.memory_slots=3", 2),
        ("optim=muon parallel=zero1", 1),
        ("parallel=hsdp parallel.shard_size=3", 4),
    ],
)
def test_a_misfit_with_the_ranks_is_told(overrides: str, world_size: int) -> None:
    same(refusal(*overrides.split(), world_size=world_size))


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["batch.global_size=4"], 4),
        (["parallel=single"], 1),
        (["parallel=hsdp", "parallel.shard_size=2"], 4),
        (["checkpoint.every=10", "checkpoint.clean_after=10"], 1),
    ],
)
def test_just_within_the_bounds_is_taken(overrides: list[str], world_size: int) -> None:
    settle(*overrides, world_size=world_size)


@pytest.mark.parametrize("override", ["model.dim=64,128", "out=x,y", "data.suffixes=.a,.b"])
def test_no_remedy_is_one_that_is_refused(override: str) -> None:
    words = refusal(override)
    assert "multirun" not in words
    for text in re.findall(r"'(out=.*)'|list is (\S+\])", words):
        settle(*filter(None, text))


def test_a_schedule_may_end_within_the_warm_up_where_the_run_does() -> None:
    """A run of 6 steps within a warm-up of 20 is continued to 12 by the schedule that it had."""
    settle("steps=12", "schedule.total=6", "schedule.warmup=20")
    refusal("steps=21", "schedule.total=6", "schedule.warmup=20")


def test_all_problems_are_told_at_once() -> None:
    told = refusal("steps=0", "optim.lr=-1", "data.skip=[[2,1]]").splitlines()
    assert len(told) == 3


# What is understood


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("faults=[]", []),
        ("faults=[nan_grad@step=20,rank=1]", ["nan_grad@step=20,rank=1"]),
        (
            "faults=[nan_grad@step=20,rank=1,kill@step=30, spike@samples=4-7,scale=2]",
            ["nan_grad@step=20,rank=1", "kill@step=30", "spike@samples=4-7,scale=2"],
        ),
        ("faults=['kill@step=2,rank=1','kill@step=3']", ["kill@step=2,rank=1", "kill@step=3"]),
        ("data.path=/corpus/a.bin", ["/corpus/a.bin"]),
        ("data.path=[/corpus/a.bin,b]", ["/corpus/a.bin", "b"]),
        ("data.path='/with space/a,b'", ["/with space/a,b"]),
        ("data.path=[]", []),
        ("data.skip=[[0,1],[400,432]]", [[0, 1], [400, 432]]),
        ("checkpoint.every=auto", "auto"),
        ("checkpoint.every=25", 25),
        ("resume.allow=[optim.lr,schedule.total]", ["optim.lr", "schedule.total"]),
        ("resume.allow=[data.path,guard]", ["data.path", "guard"]),
        ("resume.allow=[optim]", ["optim"]),
        ("resume.allow=[steps]", ["steps"]),
    ],
)  # fmt: skip
def test_what_is_understood(override: str, expected: Any) -> None:
    """Faults need no quotes, a path may be one, and groups may be allowed as settings are."""
    assert flat(settle(override))[override.partition("=")[0]] == expected


def test_the_last_override_counts() -> None:
    assert settle("steps=40", "steps=50").steps == 50
    assert settle("model.dim=48", "model=tiny").model.dim == 48


@pytest.mark.parametrize(
    "words",
    [*(one.SETTINGS.split() for one in (soak, soak_trace, screenshot)), gpu_check.TINY],
    ids=["soak", "trace", "screenshot", "gpu_check"],
)
def test_the_settings_of_a_script_are_settings(words: Sequence[str]) -> None:
    compose([*words, "out=unused"])


class TestOwnPresets:
    def test_one_is_added_beside_ours(self, tmp_path: Path) -> None:
        own = preset(tmp_path, "mine", "dim: 48\n")
        assert settle("model=mine", config_dir=own).model.dim == 48
        assert settle("model=tiny", config_dir=own).model.dim == 32
        assert "mine" in refusal("model=other", config_dir=own)

    def test_one_builds_on_ours(self, tmp_path: Path) -> None:
        own = preset(tmp_path, "mine", "defaults: [tiny, _self_]\nlayers: 3\n")
        config = settle("model=mine", config_dir=own)
        assert (config.model.dim, config.model.layers) == (32, 3)

    @pytest.mark.parametrize("name", ["with space", "it's", "a,b", 'quo"te', "back\\slash"])
    def test_the_folder_may_have_any_name(self, tmp_path: Path, name: str) -> None:
        own = preset(tmp_path / name, "mine", "dim: 48\n")
        assert settle("model=mine", config_dir=own).model.dim == 48

    @pytest.mark.parametrize(
        "text",
        ["dimm: 48\n", "dim: wide\n", "dim: [\n", "\x00", "- 1\n", "defaults: [nope]\n",
         "? {a: b}\n: 3\n"],
    )  # fmt: skip
    def test_a_bad_one_is_told(self, tmp_path: Path, text: str) -> None:
        same(refusal("model=mine", config_dir=preset(tmp_path, "mine", text)))

    def test_no_such_folder(self, tmp_path: Path) -> None:
        assert str(tmp_path / "nowhere") in refusal(config_dir=tmp_path / "nowhere")


# Identity


def test_the_digest_is_of_the_values() -> None:
    same = [flat(compose([])), flat(compose(["seed=0"])), flat(compose(["model=nano"]))]
    assert len({digest(values) for values in same}) == 1
    changed = [flat(compose([o])) for o in ("seed=1", "model=tiny", "data.path=a", "out=b")]
    assert len({digest(values) for values in [same[0], *changed]}) == 5


@pytest.mark.parametrize(
    "override",
    [
        "batch.micro_size=3", "parallel=ddp", "parallel.timeout_seconds=9", "checkpoint.every=77",
        "out=elsewhere", "eval.every=7", "data.workers=5", "track.every=9",
        "resume.allow_change=true", "schedule.kind=constant,steps=999",
        "schedule.total=400,steps=999",
    ],
)  # fmt: skip
def test_the_trajectory_does_not_depend_on(override: str) -> None:
    *before, last = override.split(",")
    assert trajectory(compose([*before, last])) == trajectory(compose(before))


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=1", "seed=1", "steps=999", "batch.global_size=64", "model.dim=64",
        "data.skip=[[1,2]]", "guard.loss_sigmas=3", "schedule.kind=constant", "data.path=a",
        "compute.precision=fp32", "compute.deterministic=true",
    ],
)  # fmt: skip
def test_the_trajectory_depends_on(override: str) -> None:
    assert trajectory(compose([override])) != trajectory(compose([]))


# As text and back


AWKWARD = ["a b", "yes", "null", "1e3", "0x1f", "12:30", "- a", "é",
           "'", "#x", "{", "x: y", " ", "~"]  # fmt: skip


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_leaf_survives_yaml(path: Path, tmp_path: Path) -> None:
    config = composed(path)
    leaves = dict(compose_module._flatten(flat(config)))  # of mappings, too
    assert from_yaml(to_yaml(config), source=tmp_path) == leaves


@pytest.mark.parametrize("word", AWKWARD)
def test_awkward_words_survive_yaml(word: str, tmp_path: Path) -> None:
    data = dataclasses.replace(RunConfig().data, path=[word, "b"], skip=[[1, 2]])
    config = dataclasses.replace(RunConfig(), out=word, faults=[word], data=data)
    assert from_yaml(to_yaml(config), source=tmp_path) == flat(config)


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n", "3: {\n", "\x00"])
def test_a_broken_settings_file_names_itself(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        from_yaml(text, source=tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "key", ["guard.skip", "guard.widen", "guard.cooldown", "checkpoint.mtbf_hours"]
)
def test_a_key_that_is_constant_now_is_answered(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}=1: is no setting any more; it is always \w"):
        compose([f"{key}=1"])


def test_every_leaf_is_json() -> None:
    values = flat(compose([]))
    assert json.loads(json.dumps(values)) == values
    assert list(values) == KEYS


def test_what_other_trainers_keys_are_here_exists() -> None:
    ours = {name for name, _, _ in fields(RunConfig())}
    assert not foreign_keys.answers().keys() & {name.partition(".")[0] for name in ours}
    answers = {said for _, said in foreign_keys._entries()}
    assert len(answers) > 100
    rules = [rule.words for rule in foreign_keys._rules()]
    assert not [words for words in rules if rules.count(words) > 1]  # the second says nothing
    for answer in answers:
        named = set(re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", answer))
        no_keys = {name for name in named if name.endswith((".md", ".json", ".jsonl", ".guard"))}
        assert named - no_keys <= ours, (answer, named)


def _slips(key: str) -> Iterator[str]:
    """A key with each letter missed, doubled, swapped with the next, and taken for a neighbour."""
    rows = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
    beside = {a: b for row in rows for a, b in itertools.pairwise(row)}
    for at, letter in enumerate(key):
        before, after = key[:at], key[at + 1 :]
        yield before + after
        yield before + 2 * letter + after
        yield before + after[:1] + letter + after[1:]
        yield before + beside.get(letter, letter) + after


def test_a_slip_of_the_hand_is_answered_with_the_key() -> None:
    """Of the whole key; of a key without its group, in another's, in camel case, or with "-"."""
    ours = [name for name, _, _ in fields(RunConfig())]
    parts = {*ours, *(name.partition(".")[0] for name in ours)}
    typed = {(slip, key) for key in ours for slip in list(_slips(key))[::7]}
    for key in ours:
        ending = key.rpartition(".")[2]
        camel = re.sub(r"_(\w)", lambda letter: letter[1].upper(), key)
        others = {camel, key.replace("_", "-"), key + "s", ending, f"trainer.{ending}"}
        typed |= {(one, key) for one in others}
    wrong = []
    for one, key in sorted(typed):
        same = {k for k in ours if k.rpartition(".")[2] == key.rpartition(".")[2]}
        if one not in parts and not any(k in unknown_key.answer(one, ours) for k in same):
            wrong.append((one, key))
    assert len(typed) > 2000 and len(wrong) <= len(typed) // 200, wrong


def test_every_setting_of_the_large_trainers_is_answered() -> None:
    """A release may add a few; a name of a group or key of ours needs no table."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    theirs = [spec.name for spec in dataclasses.fields(transformers.TrainingArguments)]
    theirs += [name for name in inspect.signature(lightning.Trainer).parameters if name != "self"]
    ours = {part for name, _, _ in fields(RunConfig()) for part in name.split(".")}
    missing = [
        key
        for key in theirs
        if key not in ours and not (foreign_keys.our_key(key) or foreign_keys.likely_key(key))
    ]
    assert len(theirs) > 120 and len(missing) <= len(theirs) // 20, missing


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("learning_rate=3e-4", "'learning_rate'. Here: optim.lr."),
        ("optim.learning_rate=3e-4", "Did you mean optim.lr?"),
        ("trainer.max-epochs=3", "Here: epochs, in place of steps"),
        ("gradient_accumulation_steps=4", "say how often gradients accumulate"),
        ("gradiant_accumulation_steps=4", "say how often gradients accumulate"),
        ("fp16=true", "Here: compute.precision is bf16 or fp32; FP16"),
        ("resume_from_checkpoint=x", "same out=DIR resumes by itself"),
        ("optim=AdamW", "Did you mean optim=adamw?"),
        ("training.steps=9", "Did you mean steps?"),
        ("lr_max=1e-3", "Here: optim.lr."),
        ("use_bf16=true", "Here: compute.precision"),
        ("optimizer_params.lr=1", "Did you mean optim.lr?"),
        ("lora.r=8", "Here: model.lora, such as"),
        ("model.name=gpt2", "Here: model=hf model.path=FOLDER"),
        ("checkpoint.steps=9", "Here: checkpoint.every"),
        ("data.files=x", "Here: data.path"),
        ("trainer.devices=2", "`holdfast launch --nproc N`"),
        ("SOLVER.WARMUP_ITERS=9", "Perhaps: schedule.warmup"),  # the words of the name alone
        ("numTrainEpochs=9", "Here: epochs"),
        ("profiler.output_dir=x", "Perhaps: `holdfast profile`"),  # a group that decides
        ("data.val_max_samples=9", "Perhaps: eval.samples"),  # of two that fit, evaluation's
        ("restore_callback_states_from_checkpoint=true", "same out=DIR"),  # the first of many words
        ("split=969,30,1", "Here: data.held_out"),
        ("num_machines=2", "`holdfast launch --nproc N`"),
        ("model.lr=1e-3", "Perhaps: optim.lr."),  # a word, and no slip of model.lora
        ("clipnorm=1", "Perhaps: optim.clip."),  # two words in one
        ("checkpoint.keep.every=9", "Did you mean checkpoint.keep_every?"),
        ("checkpoint.every_steps=9", "Perhaps: checkpoint.every"),  # two names share the words
        ("optimization.update_freq=[4]", "say how often gradients accumulate"),
        ("datasets.a.vis_processor.train.name=x", "Perhaps: data._target_"),  # the nearest group
        ("model.encoder.freeze_layers=3", "Perhaps: compute.frozen."),
        ("dataset_local_cache_dir=x", "Perhaps: data.cache."),  # the words that stand last
        ("warmup_epochs=1", "Here: schedule.warmup"),
        ("validation_steps=9", "Here: eval.every"),
        ("eval_iters=9", "Here: eval.samples"),
        ("reward_model=x", "None here: a run trains on a loss; preference"),
        ("moe_router_topk=2", "None here: put runner.Guard"),
        ("spatial_merge_size_for_vit=2", "No setting here is like it"),
        ("deepspeed=x", "Here: parallel=zero1, zero2 or zero3"),
        ("resume=true", "same out=DIR resumes by itself"),
        ("gpus=2", "`holdfast launch --nproc N`"),
        ("steps=abc", "steps=abc: is no whole number. Allowed: int >= 1"),
        ("optim.lr=fast", "optim.lr=fast: is no number. Allowed"),
        ("compute.compile=yess", "compute.compile=yess: is neither true nor false. Allowed"),
    ],
)
def test_a_foreign_key_names_ours(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        compose([typed])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--version"], "holdfast 0."),
        (["version"], "holdfast 0."),
        (["help"], "--help GROUP"),
        (["help", "ring"], "usage: python -m runner ring"),
    ],
)
def test_plain_words(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    with contextlib.suppress(SystemExit):  # argparse's own --help
        assert main(words) == 0
    printed = capsys.readouterr().out
    assert told in printed and "``" not in printed


def test_usage_names_the_program_as_it_was_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/holdfast"])
    with pytest.raises(SystemExit):
        main(["ring", "--help"])
    printed = capsys.readouterr().out
    assert "usage: holdfast ring" in printed and "python -m runner" not in printed


@pytest.mark.parametrize("words", [["-m", "seed=1,2"], ["--multirun", "seed=1,2"], ["sweep"]])
def test_a_sweep_is_told_where_it_is(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    assert "`holdfast docs sweeps` has it" in capsys.readouterr().err


def test_what_is_not_there_is_told_as_that(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such folder; give a run's out" in capsys.readouterr().err


def test_train_is_the_command_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "job"]) == 0
    named = capsys.readouterr().out
    assert main(["--cfg", "job"]) == 0
    assert capsys.readouterr().out == named


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.end_token=<stop>"], "'data.end_token=\"<stop>\"'"),
        (["model.dim=130"], "model.heads=4 does not work"),
        (["model=hf", "model.path=meta-llama/L-1B", "data=hf"], "hf download meta"),
        (["data.tokenizer=gpt2"], "`hf download gpt2 --local-dir DIR`, then data.tokenizer=DIR"),
        (["data.path=someone/texts"], "hf download someone/texts --repo-type dataset"),
        (["eval.metric=accuracy"], "eval.metric=eval_accuracy?"),
        (["--cfg", "job"], "comes first: holdfast --cfg ..."),
        (["--nproc-per-node", "2"], "`holdfast launch --nproc N`"),
    ],
)  # fmt: skip
def test_what_newcomers_type_is_answered_with_what_to_type(
    overrides: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        config = settings(overrides)
        check(config, world_size=1)
        check_extras(config)
    assert words in str(refused.value)
