"""``holdfast preflight key=value ...``: tests the model and data of a run before it begins.

Takes the settings of the run, as ``check-model`` does, without training it: copies of the
model are tested for what they attend to, overfit a few samples, and are compared in FP64, FP32 and
BF16. It takes about a minute, and uses the GPU if there is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.command.check_model import print_checks, print_json
from runner.config.compose import compose
from runner.config.schema import RunConfig
from runner.config.validate import check as check_settings
from runner.data.cursor import SampleStream
from runner.data.dataset import Dataset
from runner.data.feed import few_of
from runner.engine.optimizer import OptimizerSettings
from runner.session import parts
from runner.session.corpus import open_dataset, open_validation, prepare_data, sample_stream
from runner.startup.checks import Check
from runner.startup.preflight import hardware, learning, probes
from runner.startup.preflight.corpus_trials import TrialCorpus, corpus_checks
from runner.startup.preflight.subject import Subject, Trial, tried
from runner.train.evaluate import spread_over

_SECONDS = 45.0  # time limit for the model's trials; a trial that has begun is finished
_BATCHES, _ROWS = 16, 8
_HELD_OUT = 2000
_MOST_INDICES = 200_000
TRIALS = (
    Trial(name="no look at later tokens", try_it=probes.future, needs_tokens=True),
    Trial(name="earlier tokens matter", try_it=probes.context, needs_tokens=True),
    Trial(name="the label of a position is predicted from its token", try_it=probes.own_token,
          needs_tokens=True),
    Trial(name="the order of tokens matters", try_it=probes.order, needs_tokens=True),
    Trial(name="documents do not see each other", try_it=probes.documents, needs_tokens=True),
    Trial(name="the loss takes the labels", try_it=probes.labels_count, needs_tokens=True),
    Trial(name="first loss against ln V", try_it=learning.first_loss, needs_tokens=True),
    Trial(name="each trained parameter changes", try_it=learning.trained),
    Trial(name="gradients are those of the loss", try_it=learning.gradients),
    Trial(name="BF16 gives the same step as FP32", try_it=learning.low_precision),
    Trial(name="one batch is learned by heart", try_it=learning.by_heart),
    Trial(name="the rate is in range", try_it=learning.rate_range),
    Trial(name="hardware", try_it=hardware.hardware),
)  # fmt: skip


def preflight_command(arguments: Sequence[str]) -> int:
    """Parse, run the trials, print a table; returns 0 if nothing fails (warnings do not), else 2.

    Raises:
        ConfigError: the settings, the model or the data cannot be used at all.
        DataError: likewise.
    """
    parser = Parser("preflight", __doc__)
    parser.flag("--json", "a JSON line for each check")
    parser.add_settings()
    options = parser.parse_args(arguments)
    began = time.monotonic()
    config = compose([*options.overrides, "parallel=single"], config_dir=options.config_dir)
    check_settings(config, world_size=1)
    with Bar("preparing the data", 0) as bar:
        dataset = open_dataset(config, progress=lambda what, done, total: bar.at(done, total))
    checks = []
    with Bar("trying", len(TRIALS), unit="checks") as bar:
        for check in _checks(config, dataset):
            checks.append(check)
            bar.at(len(checks), max(len(TRIALS), len(checks) + 1))
    if options.json:
        return print_json(checks)
    return print_checks("preflight", "what was tried", checks, time.monotonic() - began)


def _checks(config: RunConfig, dataset: Dataset) -> Iterator[Check]:
    has_gpu = config.parallel.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    stream = sample_stream(config, dataset)
    corpus = _corpus(config, dataset, stream)
    return chain(
        tried(TRIALS, _subject(config, dataset, corpus, device), _SECONDS), corpus_checks(corpus)
    )


def _corpus(config: RunConfig, dataset: Dataset, stream: SampleStream) -> TrialCorpus:
    """Training samples in an order spread over all of them, and the held-out samples."""
    generator = np.random.default_rng(config.seed)
    num_samples = len(dataset)
    indices = (
        generator.permutation(num_samples)
        if num_samples <= _MOST_INDICES
        else generator.integers(0, num_samples, _MOST_INDICES)
    ).astype(np.int64)
    training = indices[~stream.order.is_held_out(indices)]
    if config.data.val_path is None:
        return TrialCorpus(
            dataset=dataset,
            held_out_from=dataset,
            training=training,
            held_out=stream.held_out_indices(_HELD_OUT),
        )
    prepared = [str(one.place) if one else "" for one in prepare_data(config, lambda *_: None)]
    validation = open_validation(config, prepared)
    assert validation is not None
    return TrialCorpus(
        dataset=dataset,
        held_out_from=validation,
        training=training,
        held_out=spread_over(validation, _HELD_OUT).indices,
    )


def _subject(
    config: RunConfig, dataset: Dataset, corpus: TrialCorpus, device: torch.device
) -> Subject:
    indices = corpus.training[: _BATCHES * _ROWS].tolist()
    batches = few_of(dataset, config.data.seq_len, indices, _ROWS)
    return Subject(
        config=config,
        blueprint=parts.blueprint(config, dataset),
        batches=[batch.to(device) for batch in batches],
        device=device,
        vocab_size=getattr(dataset, "vocab_size", 0) or 0,
        optimizer=OptimizerSettings.of(config.optim),
    )
