"""Names of objects: distinct, sorted, and read back from listings."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import keys

NUMBERS = st.integers(0, 10**6)


@given(st.integers(0, 999_999_999))
def test_commit_keys_are_read_back(t):
  assert keys.commit_round(keys.commit(t)) == t


@given(st.integers(0, 999_999), st.integers(1, 999_999_999))
def test_member_keys_are_read_back(learner, incarnation):
  life = learner, incarnation
  assert keys.member_life(keys.member(*life)) == life


@pytest.mark.parametrize(
  "key",
  [
    "",
    "commit/",
    "commit/1",
    "commit/0000000001",
    "commit/00000000x",
    "commit/000000001.tmp",
    "xcommit/000000001",
    "commit/000000001\n",
    "members/1.1",
  ],
)
def test_other_keys_are_no_commits(key):
  assert keys.commit_round(key) is None


@pytest.mark.parametrize(
  "key",
  [
    "",
    "members/",
    "members/1",
    "members/1.",
    "members/-1.1",
    "members/1.1.tmp",
    "members/1.1\n",
    "members/a.b",
    "commit/000000001",
  ],
)
def test_other_keys_are_no_members(key):
  assert keys.member_life(key) is None


def test_no_two_objects_share_a_key():
  numbers = (1, 2, 11, 12, 21, 111)
  names = [keys.commit(t) for t in numbers] + [keys.lease(0)]
  for a, b in itertools.product(numbers, repeat=2):
    names.append(keys.member(a, b))
    for c in numbers:
      names += [keys.params(a, b, c), keys.outer_state(a, b, c)]
      names += [keys.answer_header(1, a, b, c), keys.answer_part(1, a, b, c, 0)]
      names.append(keys.tape(f"learner-{a}", b, c))
  assert len(names) == len(set(names))


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_a_prefix_covers_its_own_objects_only(t, u, a, b, c, part):
  header = keys.answer_header(t, a, b, c)
  assert header.startswith(keys.answers(t))
  assert keys.answer_part(t, a, b, c, part).startswith(keys.answers(t))
  assert header.startswith(keys.answers(u)) == (t == u)
  params, outer = keys.params(t, a, b), keys.outer_state(t, a, b)
  for name in (params, outer):
    assert name.startswith(keys.states(t, a))
    assert name.startswith(keys.states(t, c)) == (a == c)
    assert name.startswith(keys.states(u, a)) == (t == u)


@given(*[st.integers(0, 10**6)] * 3)
def test_objects_of_a_version_tell_what_they_are(t, p, epoch):
  for kind, key in (
    ("params", keys.params(t, p, epoch)),
    ("outer", keys.outer_state(t, p, epoch)),
    ("step", keys.step(t, p, epoch)),
  ):
    assert keys.state_parts(key) == (t, p, kind)
    assert keys.state_parts(key + "x") is None
    assert keys.state_parts(key.replace("state", "store")) is None


@given(st.lists(st.integers(0, 999_999_999), unique=True))
def test_listings_are_in_the_order_of_rounds(rounds):
  names = sorted(keys.commit(t) for t in rounds)
  assert [keys.commit_round(name) for name in names] == sorted(rounds)
