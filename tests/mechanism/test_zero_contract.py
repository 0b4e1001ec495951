"""Every private name of DeepSpeed that we use, by stage: an upgrade that moves one fails here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import Guard
from runner.config.schema import OptimConfig
from runner.data.feed import MicroBatch
from runner.distributed.agreement import Ranks
from runner.distributed.env import RankEnv
from runner.distributed.rendezvous import end_group, start_group
from runner.embed.loop.zero_engine import ZeroState, engine_in
from runner.engine import zero
from runner.engine.optimizer import OptimizerSettings
from runner.engine.protocol import MicroStep
from runner.engine.zero import (
    OF_OPTIMIZERS,
    PASSED,
    REFUSED,
    REFUSED_OFFLOAD,
    REFUSED_ZERO,
    ZeroEngine,
    ZeroPlan,
    build_module,
    check_plan,
    deepspeed_settings,
    stage_of,
)
from runner.fault.inject import Disturbance
from runner.fault.wrap import MicroBatchFaults
from runner.model.blueprint import freeze
from runner.model.decoder import Decoder, DecoderShape
from runner.model.loss import sequence_losses
from runner.model.objective import DecoderObjective
from runner.system.error import CheckpointError, ConfigError
from tests import warm

CPU = torch.device("cpu")
SHAPE = DecoderShape(vocab_size=16, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=32, seq_len=8)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# What of DeepSpeed runner/engine/zero.py touches beside OF_OPTIMIZERS: always, and by the kind of
# its optimizer. "parameter" is one of the model that it wrapped.
ALWAYS = (
    *("deepspeed.DeepSpeedConfig", "deepspeed.DeepSpeedConfigError", "deepspeed.initialize"),
    *("deepspeed.ops.__compatible_ops__", "deepspeed.zero.Init"),
    *("engine.backward", "engine.step", "engine.was_step_applied"),
)
MAPPED = (
    "parameter._hp_mapping.get_hp_fragment",
    "parameter._hp_mapping.hp_fragment_address.numel",
    "parameter._hp_mapping.hp_fragment_address.start",
    "parameter._hp_mapping.lp_fragment_address.start",
)
USED = {
    "BF16_Optimizer": MAPPED,
    "DeepSpeedZeroOptimizer": ("gradients.flat_partition", *MAPPED),
    "DeepSpeedZeroOptimizer_Stage3": (
        *(
            "parameter.ds_id",
            "parameter.ds_numel",
            "parameter.ds_shape",
            "parameter.ds_tensor.data",
        ),
    ),
}
INSIDE = MicroBatchFaults()
OPTIMIZERS = {
    (1, False): "BF16_Optimizer",
    (2, False): "DeepSpeedZeroOptimizer",
    (3, False): "DeepSpeedZeroOptimizer_Stage3",
    (1, True): "DeepSpeedZeroOptimizer",
    (2, True): "DeepSpeedZeroOptimizer",
    (3, True): "DeepSpeedZeroOptimizer_Stage3",
}


def settings_of(stage: int, *, offload: bool) -> dict[str, Any]:
    """What is told to DeepSpeed beyond our own. Stage 3 as on a real model: matrices are cut up,

    norms stay whole on each rank; and there are several groups of flat partitions.
    """
    zero: dict[str, Any] = dict(OFFLOAD) if offload else {}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": SHAPE.dim, "sub_group_size": 500}
    return {"zero_optimization": zero}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    place = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1)
    start_group(place, CPU, timeout_seconds=60)
    linear = torch.nn.functional.linear  # stage 3 replaces it, and for good
    yield
    torch.nn.functional.linear = linear  # type: ignore[assignment]
    end_group()


# Offload of stage 3 is always tried: the others share its code.
STAGES = [
    pytest.param(key, marks=pytest.mark.full if key in ((1, True), (2, True)) else ())
    for key in OPTIMIZERS
]


@pytest.fixture(scope="module", params=STAGES, ids=lambda key: f"{key[0]}-{key[1]}")
def stage(request: pytest.FixtureRequest) -> tuple[int, bool]:
    """(stage, with offload)."""
    key: tuple[int, bool] = request.param
    return key


def plan_of(stage: tuple[int, bool], *, num_micro_batches: int = 1) -> ZeroPlan:
    number, offload = stage
    extra = settings_of(number, offload=offload)
    return ZeroPlan(stage=number, num_micro_batches=num_micro_batches, extra=extra)


def build(
    stage: tuple[int, bool],
    frozen: str = "",
    *,
    num_micro_batches: int = 1,
    settings: OptimizerSettings | None = None,
) -> ZeroEngine:
    """One engine on one rank; parameters whose name has ``frozen`` in it are not trained."""
    plan = plan_of(stage, num_micro_batches=num_micro_batches)
    module = build_module(lambda: Decoder(SHAPE), plan, CPU)
    assert isinstance(module, Decoder)
    if frozen:
        freeze(module, [frozen])
    module.reset_buffers(CPU)
    model = DecoderObjective(module, fp32=True, z_loss=0.0)
    made = ZeroEngine(
        model,
        embedding=module.embedding,
        disturb=INSIDE,
        settings=settings or OptimizerSettings(OptimConfig()),
        plan=plan,
        device=CPU,
        probe=True,
    )
    INSIDE.attach(model, module.embedding)
    return made


@pytest.fixture(scope="module")
def engine(stage: tuple[int, bool]) -> ZeroEngine:
    return build(stage)


def wrapped(engine: ZeroEngine) -> Any:
    return engine._engine.optimizer  # the one place where a test looks inside: it is the contract


def work(first: int) -> MicroStep:
    """A micro-batch of one sequence that counts up from ``first``."""
    ids = torch.arange(first, first + 9).view(1, 9)
    batch = MicroBatch(tokens=ids[:, :-1], targets=ids[:, 1:], segments=None, positions=(0,))
    return MicroStep(batch=batch, seed=0)


def compute(engine: ZeroEngine, *, nan: bool = False) -> float:
    """One micro-batch's gradients; returns their norm."""
    INSIDE.begin([Disturbance(nan_grad=True) if nan else None])
    norm = engine.accumulate([work(0)]).grad_square.sqrt().item()
    INSIDE.begin([])
    return norm


def apply(engine: ZeroEngine, *, skip: bool = False) -> str | None:
    return engine.apply(
        skip=torch.tensor(float(skip)), grad_scale=torch.tensor(1.0), learning_rate=0.01
    )


def state(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return {shard.name: engine.full(shard.name) for shard in engine.shards()}


def begin(engine: ZeroEngine) -> None:
    """Small weights, all different."""
    engine.initialise(
        lambda name, shape, start, count: torch.linspace(-0.3, 0.3 + len(name) / 99, count)
    )


@pytest.fixture(scope="module")
def bare(stage: tuple[int, bool]) -> Iterator[dict[str, Any]]:
    """DeepSpeed as it comes, nothing of ours around it, after one backward pass."""
    plan = plan_of(stage)
    module = build_module(lambda: Decoder(SHAPE), plan, CPU)
    import deepspeed

    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine, wrapped, _, _ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=deepspeed_settings(plan), dist_init_required=False
    )
    tokens = torch.arange(8).view(1, 8)
    engine.backward(engine(tokens).float().square().sum(), scale_wrt_gas=False)
    groups = getattr(wrapped, "averaged_gradients", {})
    yield {
        "deepspeed": deepspeed,
        "engine": engine,
        "optimizer": wrapped,
        "parameter": next(module.parameters()),
        "gradients": next((group for group in groups.values() if group is not None), None),
    }
    engine.destroy()


def moved(root: Any, path: str) -> str | None:
    """The first name along ``path`` that is not there."""
    for name in path.split("."):
        if not hasattr(root, name):
            return f"{name} of {path}"
        root = getattr(root, name)
    return None


def test_deepspeed_has_every_name_that_we_use(
    bare: dict[str, Any], stage: tuple[int, bool]
) -> None:
    kind = OPTIMIZERS[stage]
    assert type(bare["optimizer"]).__name__ == kind
    gone = set()
    for path in (*ALWAYS, *USED[kind], *(f"optimizer.{name}" for name in OF_OPTIMIZERS[kind])):
        root, _, rest = path.partition(".")
        gone.add(moved(bare[root], rest))
    assert gone == {None}, f"deepspeed moved {gone - {None}}, which {kind} had"
    assert "deepspeed_shm_comm" in bare["deepspeed"].ops.__compatible_ops__


# What runner/embed/loop/zero_engine.py asks somebody's engine, and its optimizer.
OF_A_GUEST = (
    "engine.basic_optimizer.param_groups",
    "engine.fp16_enabled",
    "engine.has_moe_layers",
    "engine.is_gradient_accumulation_boundary",
    "engine.module",
    "engine.step",
    "engine.was_step_applied",
    "engine.zero_optimization_stage",
    "optimizer.dp_process_group",
)
OF_STAGE_TWO = ("check_grad_overflow", "compute_grad_norm", "cpu_offload", "dtype")


def test_a_guests_engine_has_what_the_guard_asks(
    bare: dict[str, Any], stage: tuple[int, bool]
) -> None:
    paths = [path for path in OF_A_GUEST if path.startswith("engine") or stage[0] < 3]
    if OPTIMIZERS[stage] == "DeepSpeedZeroOptimizer":
        paths += [f"optimizer.{name}" for name in OF_STAGE_TWO]
    gone = {moved(bare[path.partition(".")[0]], path.partition(".")[2]) for path in paths}
    assert gone == {None}
    # What holds FP32 weights is what torch's own optimizer updates.
    if stage[0] < 3:
        flats = stage_of(bare["optimizer"]).flats()
        params = [p for g in bare["engine"].basic_optimizer.param_groups for p in g["params"]]
        assert [id(flat) for flat in flats] == [id(parameter) for parameter in params]


def test_an_engine_that_cannot_be_guarded_is_refused(
    bare: dict[str, Any], stage: tuple[int, bool], tmp_path: Path
) -> None:
    engine = bare["engine"]
    if stage == (1, False):
        assert engine_in([engine], [bare["optimizer"]]) is engine
        with pytest.raises(ConfigError, match=r"clip=1.0: DeepSpeed clips"):
            Guard(tmp_path, model=engine, optimizer=bare["optimizer"], clip=1.0)
        with pytest.raises(ConfigError, match="give the engine as model="):
            Guard(tmp_path, model=engine.module, optimizer=bare["optimizer"])
        state = ZeroState(engine, Ranks(CPU), CPU)
        with pytest.raises(CheckpointError, match="on 2 ranks, this run has 1"):
            state.expect({"param/optimizer0.0.0": ["torch.float32", [2, 8], None, "cpu"]})
        return
    why = {(3, False): "stage 3", (3, True): "stage 3", (2, False): "check_grad_overflow"}.get(
        stage, "offload"
    )
    with pytest.raises(ConfigError, match=why):
        Guard(tmp_path, model=engine, optimizer=bare["optimizer"])


def test_it_is_imported_only_when_asked_for(tmp_path: Path) -> None:
    """It takes seconds, and needs a compiler on some machines."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, runner.session.session, runner.engine.zero\n"
        "sys.exit('deepspeed' in sys.modules)\n"
    )
    done = warm.finished([sys.executable, str(program)], timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_deepspeed_that_moved_a_name_is_refused_at_the_start() -> None:
    """An upgrade within the supported range may: the tests do not run where it is installed."""
    for kind, names in OF_OPTIMIZERS.items():
        whole = type(kind, (), dict.fromkeys(names))
        stage_of(whole())
        delattr(whole, names[0])
        with pytest.raises(ConfigError, match=rf"DeepSpeed 0.*{kind} has no {names[0]}, which"):
            stage_of(whole())


def test_no_name_is_used_that_is_not_asked_for() -> None:
    used = set(re.findall(r"_wrapped\.(\w+)", Path(zero.__file__).read_text()))
    assert used == {name for names in OF_OPTIMIZERS.values() for name in names}


@pytest.mark.parametrize("offload", [False, True])
def test_stage_3_is_tried_with_parameters_of_both_kinds(offload: bool) -> None:
    """Cut up, and small ones that stay whole; and in several groups."""
    engine = build((3, offload))
    parameters = dict(engine._engine.module.named_parameters())
    whole = {name for name, parameter in parameters.items() if parameter.ds_persist}
    assert whole == {name for name in parameters if "norm" in name}
    assert 0 < len(whole) < len(parameters)
    assert len(wrapped(engine).fp32_partitioned_groups_flat) > 2


def test_shards_cover_every_parameter_as_live_views(engine: ZeroEngine) -> None:
    engine.initialise(lambda name, shape, start, count: torch.full((count,), 0.5))
    for shard in engine.shards():
        assert shard.start == 0 and shard.local.numel() == torch.Size(shard.shape).numel()
        expected = 0.5 if shard.name.startswith("param/") else 0.0
        assert (engine.full(shard.name) == expected).all(), shard.name
        shard.local.fill_(2.0)
        assert (engine.full(shard.name) == 2.0).all(), f"{shard.name} is a copy, not a view"


@pytest.mark.parametrize("frozen", ["", "norm"])
def test_refresh_remakes_every_bf16_parameter(stage: tuple[int, bool], frozen: str) -> None:
    """After a load the computed losses must follow, small persistent parameters included."""
    engine = build(stage, frozen)
    begin(engine)
    before = engine.evaluate([work(0).batch]).losses[0].clone()
    counts = dict.fromkeys(engine.update_counts(), 7)
    for shard in engine.shards():
        if shard.name.startswith("param/") and "norm" in shard.name:
            shard.local.fill_(1.5)
    engine.finish_load(counts)
    assert engine.update_counts() == counts
    after = engine.evaluate([work(0).batch]).losses[0]
    assert not torch.equal(before, after), f"stage {stage}: norms stayed as they were"


def test_the_norm_is_of_the_whole_gradient(engine: ZeroEngine, stage: tuple[int, bool]) -> None:
    """One rank's gradient, as plain autograd has it for the same BF16 weights."""
    begin(engine)
    plain = Decoder(SHAPE)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(engine.full(f"param/{name}"))
    plain.bfloat16()
    ids = torch.arange(9).view(1, 9)
    losses, _ = sequence_losses(plain(ids[:, :-1]), ids[:, 1:], fp32=True, z_loss=0.0)
    losses.sum().backward()
    square = sum(p.grad.float().square().sum() for p in plain.parameters() if p.grad is not None)
    assert compute(engine) == pytest.approx(float(square) ** 0.5, rel=0.02)
    assert apply(engine, skip=True) is None


def test_micro_batches_add_up_in_fp32(stage: tuple[int, bool]) -> None:
    """To their sum, not their mean (scale_wrt_gas), with bits that BF16 has not."""
    found = []
    for works in ([work(0)], [work(3)], [work(0), work(3)]):
        engine = build(stage, num_micro_batches=len(works))
        begin(engine)
        engine.accumulate(works)
        flats = engine._stage.gradients()
        assert {flat.dtype for flat in flats} == {torch.float32}
        found.append(torch.cat(flats).clone())
        assert apply(engine) is None
        assert set(engine.update_counts().values()) == {1}
    first, second, both = found
    torch.testing.assert_close(both, first + second, rtol=1e-6, atol=0)
    assert (both != both.bfloat16().float()).any()


def test_a_closed_gate_changes_nothing_whatever_the_gradient(engine: ZeroEngine) -> None:
    begin(engine)
    compute(engine)
    assert apply(engine) is None
    before, counts = state(engine), engine.update_counts()
    for nan in (True, False):
        assert torch.tensor(compute(engine, nan=nan)).isfinite() == (not nan)
        assert apply(engine, skip=True) is None
        after = state(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.update_counts() == counts
    compute(engine)
    assert apply(engine) is None
    after = state(engine)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_nothing_but_the_gate_decides(engine: ZeroEngine) -> None:
    """DeepSpeed's own look at the norm is off: NaN with an open gate is applied, as told."""
    begin(engine)
    compute(engine, nan=True)
    assert apply(engine) is None
    assert not state(engine)["param/embedding.weight"].isfinite().all()


def test_a_skip_of_its_own_is_told(engine: ZeroEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(engine)
    compute(engine)
    monkeypatch.setattr(wrapped(engine), "step", lambda: setattr(wrapped(engine), "overflow", True))
    assert "DeepSpeed" in str(apply(engine))
    assert apply(engine, skip=True) is None, "the gate was closed anyway"
    monkeypatch.undo()
    compute(engine)
    assert apply(engine) is None


def test_frozen_parameters_keep_their_bits_and_have_no_moments(stage: tuple[int, bool]) -> None:
    engine = build(stage, "embedding|query")
    begin(engine)
    before = state(engine)
    frozen = {name for name in before if "embedding" in name or "query" in name}
    assert frozen == {"param/embedding.weight", "param/blocks.0.attention.query.weight"}
    compute(engine)
    assert apply(engine) is None
    after = state(engine)
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert not any(name.removeprefix("param/") in engine.update_counts() for name in frozen)


def refused(extra: dict[str, Any]) -> str:
    """What the settings end with before anything is built, or when DeepSpeed reads them."""
    plan = ZeroPlan(stage=2, num_micro_batches=1, extra=extra)
    with pytest.raises(ConfigError) as error:
        check_plan(plan)
        build_module(lambda: Decoder(SHAPE), plan, CPU)
    return str(error.value)


def test_every_setting_that_breaks_a_promise_is_refused_with_its_reason() -> None:
    for key, why in REFUSED.items():
        assert refused({key: 1}) == f"parallel.deepspeed.{key}: {why}"
    for key, why in REFUSED_ZERO.items():
        words = refused({"zero_optimization": {key: 1}})
        assert words == f"parallel.deepspeed.zero_optimization.{key}: {why}"
    for key, why in REFUSED_OFFLOAD.items():
        words = refused({"zero_optimization": {"offload_optimizer": {"device": "cpu", key: 1}}})
        assert words == f"parallel.deepspeed.zero_optimization.offload_optimizer.{key}: {why}"


def test_what_is_refused_within_zero_optimization_is_called_so_by_deepspeed() -> None:
    """Under another name the refusal would not be met, and the setting would be."""
    build_module(lambda: Decoder(SHAPE), plan_of((2, False)), CPU)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    assert REFUSED_ZERO.keys() <= DeepSpeedZeroConfig.model_fields.keys()
    assert REFUSED_OFFLOAD.keys() <= DeepSpeedZeroOffloadOptimizerConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"grdient_clipping": 1.0}, f"grdient_clipping: is not passed on; allowed are {PASSED[0]}"),
        ({"zero_optimization": [1]}, "zero_optimization=[1]: must be a mapping"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer={'device': 'nvme'}: must be",
        ),
        ({"zero_optimization": {"overlap_com": True}}, "DeepSpeed refuses overlap_com: Extra"),
        ({"zero_optimization": {"reduce_bucket_size": "many"}}, "refuses reduce_bucket_size: Inp"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "DeepSpeed refuses it: MiCS"),
    ],
)
def test_a_typing_mistake_is_told_by_its_key(extra: dict[str, Any], words: str) -> None:
    assert words in refused(extra)
