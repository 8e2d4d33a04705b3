"""A fixed global batch is shared out exactly, whoever is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError, from_dict
from ddiloco.protocol.shares import Share, make_shares, samples


def make(faults="", **learners):
  config = {"stop": {"rounds": 100}, "faults": faults, "learners": learners}
  return make_shares(from_dict(config))


@given(
  st.integers(1, 10**6),
  st.lists(
    st.tuples(st.integers(1, 64), st.integers(0, 9), st.integers(1, 9)),
    min_size=1,
    max_size=8,
  ),
  st.integers(0, 20),
)
def test_no_sample_is_left_over(total, drawn, seen):
  shares = [Share(m, w, ((b, b + n),)) for m, (w, b, n) in enumerate(drawn)]
  present = [s.learner for s in shares if s.present(seen)]
  taken = [samples(shares, total, m, seen) for m in present]
  assert sum(taken) == (total if present else 0)
  weights = [shares[m].weight for m in present]
  for own, weight in zip(taken, weights, strict=True):
    assert abs(own - total * weight / sum(weights)) < 1


def test_without_a_global_batch_everybody_takes_its_own():
  assert make(count=2) == ()
  assert samples((), 0, 1, 7) == 0


def test_who_is_there_is_in_the_fault_script():
  shares = make(
    "at round 20 start learner 2; at round 50 stop learner 0",
    count=3,
    batch_size=(8, 4, 4),
    global_batch=8,
  )
  per_round = {
    t: [samples(shares, 8, m, t) for m in range(3)] for t in (0, 20, 50)
  }
  assert per_round[0][:2] == [5, 3]
  assert per_round[20] == [4, 2, 2]
  assert per_round[50][1:] == [4, 4]


def test_a_script_that_is_no_text_is_refused():
  with pytest.raises(ConfigError, match="faults = 'f.txt'.*script's own text"):
    make("f.txt", count=2, global_batch=8)
  assert make("f.txt", count=2) == ()


def test_who_comes_back_takes_its_part_again():
  shares = make(
    "at round 9 stop learner 1; at round 20 start learner 1;"
    "at round 30 stop learner 1; at round 12 start learner 2",
    count=3,
    batch_size=(8, 8, 8),
    global_batch=8,
  )
  there = {
    t: [m for m in range(3) if shares[m].present(t)] for t in (0, 9, 15, 20, 30)
  }
  assert there == {0: [0, 1], 9: [0], 15: [0, 2], 20: [0, 1, 2], 30: [0, 2]}
  assert samples(shares, 8, 0, 9) == 8
  assert [samples(shares, 8, m, 20) for m in range(3)] == [2, 3, 3]


def test_a_time_is_refused_as_nobody_else_knows_it():
  with pytest.raises(ConfigError, match="'at 2s stop learner 1' is at a time"):
    make("at 2s stop learner 1", count=3, batch_size=(8,), global_batch=12)
  assert make("at 2s kill learner 1", count=2, global_batch=12)
  assert make("at 2s stop learner 1", count=3) == ()


def test_a_share_beyond_what_an_island_holds_is_refused():
  with pytest.raises(ConfigError) as error:
    make(
      "at round 30 stop learner 1", count=2, batch_size=(6,), global_batch=12
    )
  text = str(error.value)
  assert "from round 30 on learner 0 takes 12" in text
  assert "learners.batch_size is 6" in text
