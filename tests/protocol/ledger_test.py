"""Every processed token is accounted for exactly once, in its place."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import learner, ledger
from ddiloco.protocol import learner_types as lt
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.schedule import Schedule
from ddiloco.types import Anchor, Apply, Refusal, Wait

LEARNER, LIFE = 3, 2


def verdicts(committed=0, counted=(), refused=(), seen=()):
  """`counted` and `seen` are (round, attempt), `refused` has a reason too."""
  return ledger.Verdicts(
    committed=committed,
    counted={(t, LEARNER, LIFE): n for t, n in counted},
    refused={(t, LEARNER, LIFE, n): why for t, n, why in refused},
    seen={(t, LEARNER, LIFE, n) for t, n in seen},
  )


def life(*facts):
  """A tape of one fragment from ("step", 5), ("answer", t, n), ..."""
  tape, open_tokens = ledger.LifeTape(LEARNER, LIFE, 1), 0
  for what, *numbers in facts:
    match what:
      case "step":
        open_tokens += numbers[0]
        tape.record(lt.StepDone(0, 1, numbers[0], 1, 2.0, 0), ())
      case "answer":
        t, attempt = numbers
        offer = (Contribution(0, 0, 1, open_tokens),)
        encode = lt.Encode(t, attempt, offer, 0, 0, 0, 0, ())
        tape.record(lt.Tick(0), (encode,))
      case "written":
        tape.record(lt.AnswerWritten(0, *numbers), ())
      case "failed":
        tape.record(lt.AnswerFailed(0, *numbers, "no reply"), ())
      case "apply":
        open_tokens = 0
        tape.record(lt.Fetched(0, 1), (lt.ApplyFragments(numbers[0], (0,)),))
  return tape


def account(tape, told, died=False):
  """The account of a tape of one fragment."""
  result = ledger.Account()
  for segment in tape.segments(died=died):
    result.book(segment.tokens, tape.shares(segment, told))
  return result


ANSWERED = [("step", 5), ("answer", 1, 1), ("written", 1, 1), ("step", 7)]
TWICE = [*ANSWERED, ("answer", 1, 2), ("written", 1, 2), ("step", 2)]
NEXT = [("apply", 1), ("step", 3)]


@pytest.mark.parametrize(
  "facts, told, died, merged, pending, lost",
  [
    # The next version was applied.
    ([*ANSWERED, *NEXT], dict(committed=1, counted=[(1, 1)]), False, 5, 3,
     {"overwritten": 7}),
    ([*ANSWERED, *NEXT], dict(committed=1), False, 0, 3,
     {"late": 5, "overwritten": 7}),
    ([*ANSWERED, *NEXT], dict(committed=1, refused=[(1, 1, Refusal.OUTLIER)]),
     False, 0, 3, {"refused:outlier": 5, "overwritten": 7}),
    ([*ANSWERED, *NEXT], dict(committed=1, refused=[(1, 1, Refusal.LATE)]),
     False, 0, 3, {"late": 5, "overwritten": 7}),
    ([("step", 5), *NEXT], dict(committed=1), False, 0, 3, {"unanswered": 5}),
    # The newest attempt tells what became of an answer that was not counted.
    ([*TWICE, *NEXT], dict(committed=1, counted=[(1, 1)]), False, 5, 3,
     {"overwritten": 9}),
    ([*TWICE, *NEXT], dict(committed=1, counted=[(1, 2)]), False, 12, 3,
     {"overwritten": 2}),
    ([*TWICE, *NEXT],
     dict(committed=1, refused=[(1, 1, Refusal.CHECKSUM)]), False, 0, 3,
     {"late": 12, "overwritten": 2}),
    ([*TWICE, *NEXT],
     dict(committed=1, refused=[(1, 2, Refusal.CHECKSUM)]), False, 0, 3,
     {"refused:checksum": 12, "overwritten": 2}),
    # Two rounds from one anchor: the later answer contains the earlier one.
    ([*ANSWERED, ("answer", 2, 1), ("step", 1), ("apply", 2)],
     dict(committed=2, counted=[(1, 1), (2, 1)]), False, 12, 0,
     {"overwritten": 1}),
    ([*ANSWERED, ("answer", 2, 1), ("step", 1), ("apply", 1)],
     dict(committed=1, counted=[(1, 1)]), False, 5, 7, {"overwritten": 1}),
    # What was never written was no answer, unless the syncer got it.
    ([("step", 5), ("answer", 1, 1), ("failed", 1, 1), *NEXT],
     dict(committed=1), False, 0, 3, {"unanswered": 5}),
    ([("step", 5), ("answer", 1, 1), ("failed", 1, 1), *NEXT],
     dict(committed=1, counted=[(1, 1)]), False, 5, 3, {}),
    ([("step", 5), ("answer", 1, 1), ("failed", 1, 1), *NEXT],
     dict(committed=1, seen=[(1, 1)]), False, 0, 3, {"late": 5}),
    ([("step", 5), ("answer", 1, 1), *NEXT], dict(committed=1), False, 0, 3,
     {"late": 5}),
    # The life died.
    ([("step", 5)], {}, True, 0, 0, {"died": 5}),
    (ANSWERED, dict(committed=1, counted=[(1, 1)]), True, 5, 0, {"died": 7}),
    (ANSWERED, dict(committed=1), True, 0, 0, {"late": 5, "died": 7}),
    (ANSWERED, dict(committed=1, refused=[(1, 1, Refusal.SUPERSEDED)]), True,
     0, 0, {"refused:superseded": 5, "died": 7}),
    (ANSWERED, dict(committed=0), True, 0, 5, {"died": 7}),
    ([("step", 5), ("answer", 1, 1)], {}, True, 0, 0, {"died": 5}),
    ([("step", 5), ("answer", 1, 1)], dict(seen=[(1, 1)]), True, 0, 5, {}),
    # The run ended first.
    ([("step", 5)], {}, False, 0, 5, {}),
    (ANSWERED, dict(committed=0), False, 0, 12, {}),
    (ANSWERED, dict(committed=1), False, 0, 12, {}),
    (ANSWERED, dict(committed=1, counted=[(1, 1)]), False, 5, 7, {}),
    ([], {}, False, 0, 0, {}),
  ],
)  # fmt: skip
def test_where_tokens_go(facts, told, died, merged, pending, lost):
  result = account(life(*facts), verdicts(**told), died)
  assert (result.merged, result.pending, result.lost) == (merged, pending, lost)
  assert result.processed == sum(n for what, n, *_ in facts if what == "step")


@pytest.mark.parametrize(
  "facts, told, fates",
  [
    (TWICE, dict(committed=1, counted=[(1, 1)]), {1: "merged"}),
    (TWICE, dict(committed=1, refused=[(1, 2, Refusal.SIZE)]),
     {1: "refused:size"}),
    (TWICE, dict(committed=1), {1: "late"}),
    (TWICE, dict(committed=0), {1: "pending"}),
    ([("step", 1), ("answer", 1, 1), ("failed", 1, 1)], dict(committed=1),
     {1: "unanswered"}),
    ([*TWICE, *NEXT, ("answer", 2, 1)], dict(committed=1),
     {1: "late", 2: "pending"}),
  ],
)  # fmt: skip
def test_what_became_of_answers(facts, told, fates):
  assert life(*facts).answer_fates(verdicts(**told), died=False) == fates


def test_fragments_counted():
  tape = life(*ANSWERED)
  assert tape.fragments_counted(verdicts(1, counted=[(1, 1)])) == {0}
  assert tape.fragments_counted(verdicts(1, counted=[(1, 2)])) == frozenset()


@pytest.mark.parametrize("merged, late", [(7, 5), (0, 23), (8, 15), (23, 0)])
def test_headline_gives_the_remainder_to_pending(merged, late):
  tokens, p = 8, 3
  sums = ledger.Account(
    tokens * p, merged, tokens * p - merged - late, {"late": late}
  )
  head = ledger.headline(sums, p)
  assert (head.processed, head.merged) == (tokens, merged // p)
  assert head.lost == {"late": late // p}
  assert head.merged + head.pending + sum(head.lost.values()) == tokens


def test_an_account_that_does_not_balance_is_a_programmer_error():
  with pytest.raises(AssertionError):
    ledger.Account().book(5, {ledger.MERGED: 4})


# --- Histories of the real machine ------------------------------------------


def make_rules(num_fragments, interval, overlap):
  return Rules(
    run_id="r",
    layout="l",
    codec="f32",
    answer_bytes=(4,) * num_fragments,
    schedule=Schedule(num_fragments, interval, overlap),
    quorum_min=1,
    grace=True,
    grace_margin_permille=900,
    wait=Wait.NEVER,
    anchor=Anchor.CURRENT,
    apply=Apply.WHEN_SEEN,
    outlier_permille=0,
    dead_after_ns=10,
    stop_rounds=0,
    stop_tokens=0,
    checkpoint_every_steps=0,
  )


class History:
  """One life of the learner's machine, with an arbitrary world around it."""

  def __init__(self, rules):
    self.rules, self.now_ns = rules, 0
    p = rules.schedule.num_fragments
    self.tape = ledger.LifeTape(LEARNER, LIFE, p)
    self.processed = 0
    self.offered: dict[int, dict[int, lt.Encode]] = {}
    self.counted: dict[int, int] = {}
    self.refused = {}
    self.fetching: list[int] = []
    self.writing: list[tuple[int, int]] = []
    joined = lt.Joined(0, LEARNER, LIFE, 0, 0, ((0, 1),) * p, 0)
    self.state, commands = learner.start(joined, rules)
    self._take(joined, commands)

  def feed(self, event):
    self.state, commands = learner.step(self.state, event, self.rules)
    self._take(event, commands)

  def _take(self, event, commands):
    self.tape.record(event, tuple(commands))
    for command in commands:
      match command:
        case lt.Encode():
          attempts = self.offered.setdefault(command.round, {})
          attempts[command.attempt] = command
          self.writing.append((command.round, command.attempt))
        case lt.Fetch():
          self.fetching.append(command.round)

  def act(self, what, number):
    self.now_ns += 1
    match what:
      case "step":
        tokens = number % 7 + 1
        self.processed += tokens
        step = self.state.step + 1
        self.feed(lt.StepDone(self.now_ns, step, tokens, 1, 2.0, 0))
      case "commit":
        t = self.rules.schedule.next_round(self.state.seen)
        attempts = sorted(self.offered.get(t, {}))
        attempt = ([0, *attempts] * 2)[number % (len(attempts) + 1)]
        if attempt:
          self.counted[t] = attempt
        elif attempts and number % 3 == 0:
          key = (t, LEARNER, LIFE, attempts[-1])
          self.refused[key] = Refusal.OUTLIER
        self.feed(lt.CommitSeen(self.now_ns, t, 1, attempt, 0))
      case "fetched" if self.fetching:
        t = self.fetching.pop(number % len(self.fetching))
        self.feed(lt.Fetched(self.now_ns, t))
      case "lost" if self.fetching:
        t = self.fetching.pop(number % len(self.fetching))
        self.feed(lt.FetchFailed(self.now_ns, t, "gone"))
      case "written" if self.writing:
        self.feed(lt.AnswerWritten(self.now_ns, *self.writing.pop(0)))
      case "failed" if self.writing:
        self.feed(lt.AnswerFailed(self.now_ns, *self.writing.pop(0), "no"))

  def verdicts(self):
    return ledger.Verdicts(
      committed=self.state.seen,
      counted={(t, LEARNER, LIFE): n for t, n in self.counted.items()},
      refused=self.refused,
      seen=set(self.refused),
    )


ACTIONS = st.lists(
  st.tuples(
    st.sampled_from(
      ["step"] * 4
      + ["commit", "commit", "fetched", "fetched", "written", "lost", "failed"]
    ),
    st.integers(0, 20),
  ),
  max_size=120,
)


@given(
  shape=st.sampled_from(
    [(1, 1, 0), (2, 2, 1), (3, 2, 2), (2, 5, 2), (4, 3, 2)]
  ),
  actions=ACTIONS,
  died=st.booleans(),
)
def test_histories_balance(shape, actions, died):
  history = History(make_rules(*shape))
  for what, number in actions:
    history.act(what, number)
  told, p = history.verdicts(), shape[0]
  accounts = [ledger.Account() for _ in range(p)]
  for segment in history.tape.segments(died=died):
    shares = history.tape.shares(segment, told)
    accounts[segment.fragment].book(segment.tokens, shares)
  # Under anchor = current no token is in two counted answers.
  merged = collections.Counter()
  for t, attempt in history.counted.items():
    for item in history.offered[t][attempt].contributions:
      merged[item.fragment] += item.tokens
  for fragment, result in enumerate(accounts):
    assert result.balanced
    assert result.processed == history.processed
    assert result.merged == merged[fragment]
    if not died:
      assert "died" not in result.lost
  head = ledger.headline(ledger.total(accounts), p)
  assert head.processed == history.processed
  lost = sum(head.lost.values())
  assert head.merged + head.pending + lost == history.processed
