import numpy as np
import pyarrow as pa
import torch

from tasks.models.sequences import Sequences, batch, layout, micro_batches, ragged, score_layout

CPU = torch.device("cpu")


def sequences(*rows):
    return Sequences([np.array(p) for p, _ in rows], [np.array(r) for _, r in rows])


def test_the_output_at_the_position_before_a_token_scores_it():
    # Row 0: prompt 5 6, response 7 8 9; row 1: prompt 5, response 4. Padded to length 5.
    micro = batch(sequences(([5, 6], [7, 8, 9]), ([5], [4])), [0, 1], CPU)
    assert micro.input_ids_BL.tolist() == [[5, 6, 7, 8, 9], [5, 4, 0, 0, 0]]
    assert micro.score_at_N.tolist() == [1, 2, 3, 5]
    assert micro.targets_N.tolist() == [7, 8, 9, 4]
    assert micro.last_at_B.tolist() == [4, 6]
    assert micro.padded(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert [part.tolist() for part in micro.split(torch.tensor([1, 2, 3, 4]))] == [[1, 2, 3], [4]]


def test_ragged_keeps_empty_rows_and_slices():
    table = pa.table({"x": pa.array([[1], [], [2, 3], [4]], pa.list_(pa.int32()))})
    assert [row.tolist() for row in ragged(table, "x")] == [[1], [], [2, 3], [4]]
    assert [row.tolist() for row in ragged(table.slice(1, 2), "x")] == [[], [2, 3]]
    assert ragged(table.slice(0, 0), "x") == []


def test_micro_batches_are_sorted_by_length():
    assert micro_batches([0, 1, 2, 3, 4], [9, 2, 9, 1, 5], 2) == [[3, 1], [4, 0], [2]]


def test_s55_s62_every_epoch_covers_every_row_once_in_an_order_of_its_own(make_config):
    train = make_config(train={"minibatch_size": 4, "micro_batch_size": 4}).train
    epochs = [layout(range(10), [1] * 10, train, seed=7, iteration=0, epoch=e) for e in range(2)]
    for minibatches in epochs:
        rows = [[i for micro in minibatch for i in micro] for minibatch in minibatches]
        assert [len(r) for r in rows] == [4, 4, 2]
        assert sorted(i for r in rows for i in r) == list(range(10))
    assert epochs[0] != epochs[1]
    assert epochs[0] == layout(range(10), [1] * 10, train, seed=7, iteration=0, epoch=0)
    assert epochs[0] != layout(range(10), [1] * 10, train, seed=7, iteration=1, epoch=0)
    assert epochs[0] != layout(range(10), [1] * 10, train, seed=8, iteration=0, epoch=0)


def test_s23_scoring_uses_the_micro_batches_of_the_first_epoch(make_config):
    config = make_config(train={"minibatch_size": 3, "micro_batch_size": 2})
    rows = sequences(*[([1] * (i % 3 + 1), [2] * (i % 4 + 1)) for i in range(9)])
    dropped = [i in (2, 5) for i in range(9)]
    kept = [i for i in range(9) if not dropped[i]]
    trained = layout(kept, rows.lengths, config.train, config.run.seed, iteration=3, epoch=0)
    scored = score_layout(rows, dropped, config, iteration=3)
    assert scored == [micro for minibatch in trained for micro in minibatch] + [[5, 2]]
