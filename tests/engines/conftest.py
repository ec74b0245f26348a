"""A batch to train on: random responses, and the experience that scoring them with a learner would give."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from schemas import experience, rollouts
from tasks.engines.learner import Learner
from tasks.models.sequences import Sequences, score_layout


@dataclass
class TrainingData:
    rollouts: pa.Table
    experience: pa.Table


@pytest.fixture(scope="session")
def training_data():
    """`make(learner, config)` gives rollouts of 10 rows and their experience, random advantages and returns."""

    def make(learner, config, *, rows=10, iteration=0, drop=(), seed=0):
        random = np.random.default_rng(seed)
        prompts = [random.integers(3, 259, random.integers(2, 9)).tolist() for _ in range(rows)]
        responses = [random.integers(3, 259, random.integers(1, 13)).tolist() for _ in range(rows)]
        sample_ids = [f"s-{i}" for i in range(rows)]
        generated = _table(rollouts.TABLE, sample_id=sample_ids, prompt_token_ids=prompts, response_token_ids=responses)
        sequences = Sequences.from_table(generated)
        dropped = [i in drop for i in range(rows)]
        layout = score_layout(sequences, dropped, config, iteration)
        old_value, _ = learner.values(sequences, layout)
        noise = [[random.normal(size=len(r)).astype(np.float32) for r in responses] for _ in range(2)]
        yes = [[True] * len(r) for r in responses]
        return TrainingData(
            generated,
            _table(
                experience.TABLE,
                sample_id=sample_ids,
                action_mask=yes,
                value_mask=yes,
                old_logp=learner.logp(sequences, layout),
                sampled_kl=[[0.0] * len(r) for r in responses],
                old_value=old_value,
                advantage=noise[0],
                returns=[v + n for v, n in zip(old_value, noise[1], strict=True)],
                importance_weight=[1.0] * rows,
                token_weight=[None] * rows,
                outcome_raw=[None] * rows,
                kl_sum=[0.0] * rows,
                dropped=["stale" if d else None for d in dropped],
            ),
        )

    return make


def _table(table, **columns):
    return pa.table({name: pa.array(list(values), table[name].type) for name, values in columns.items()})


@pytest.fixture
def open_learner():
    """`open(config)` gives the learner of version 0; all are closed when the test ends."""
    opened = []

    def open_one(config, folder=None):
        opened.append(Learner.initial(config) if folder is None else Learner.load(config, folder))
        return opened[-1]

    yield open_one
    for learner in opened:
        learner.close()
