"""Hand-made tapes in an exchange that is a dict."""

import dataclasses
import json
from typing import NamedTuple

from ddiloco.config import Config, LiveConfig, StopConfig, SyncConfig
from ddiloco.protocol import keys, messages, tape, wire
from ddiloco.protocol import learner_types as lt
from ddiloco.protocol import syncer_types as sy
from ddiloco.protocol.messages import Contribution, Counted, FragmentState
from ddiloco.types import Wait

UNIX_NS = 1_800_000_000 * 1_000_000_000  # when every history starts
RUN = "c0ffee00c0ffee00"
PART_BYTES, PARAMS_BYTES, TOKENS = 40, 100, 6


def s(seconds):
  """Seconds in ns."""
  return round(seconds * 1_000_000_000)


def ms(milliseconds):
  """Milliseconds in ns."""
  return s(milliseconds / 1000)


class Item(NamedTuple):
  value: bytes


class History:
  """An exchange and a workdir, filled actor by actor. Times in seconds."""

  def __init__(self, *, fragments=2, quorum=1, wait="never", **config):
    sync = SyncConfig(
      num_fragments=fragments,
      interval_steps=fragments,
      overlap_steps=1,
      quorum_min=quorum,
      wait=Wait(wait),
    )
    live, stop = LiveConfig(dead_after_s=5), StopConfig(rounds=100)
    self.config = Config(sync=sync, live=live, stop=stop, **config)
    self.fragments, self.objects = fragments, {}
    self.layout = '{"tensors":[]}'
    self.commit(0)

  # What a report calls.

  def get(self, key):
    return Item(self.objects[key]) if key in self.objects else None

  def list(self, prefix):
    return sorted(key for key in self.objects if key.startswith(prefix))

  # What fills it.

  def make_commit(self, t, counted=(), refused=()):
    """A commit; `counted` and `refused` as (learner, life, attempt, ...)."""
    genesis = None
    if t == 0:
      text = wire.canonical_json(self.config.to_dict()).decode()
      genesis = messages.Genesis(text, self.config.digest, self.layout, "1")
    state = FragmentState(t, 1, PARAMS_BYTES, "", 0, "")
    return messages.Commit(
      run_id=RUN,
      round=t,
      epoch=1,
      previous="",
      counted=tuple(Counted(*life, ()) for life in counted),
      refused=tuple(messages.Refused(*life) for life in refused),
      fragments=(state,) * self.fragments,
      tokens=0,
      progress=(),
      vector_clock=(),
      genesis=genesis,
    )

  def commit(self, t, counted=(), refused=()):
    commit = self.make_commit(t, counted, refused)
    self.objects[keys.commit(t)] = messages.encode(commit)
    return commit

  def learner(self, learner, life=1, at=0.0):
    return LearnerTape(self, tape.learner_actor(learner), learner, life, at)

  def syncer(self, life=1, at=0.0):
    return SyncerTape(self, tape.SYNCER, None, life, at)


class _Tape:
  """Records of one life; its own clock began at 1000 s."""

  def __init__(self, history, actor, learner, life, at):
    self.history, self.actor = history, actor
    self.learner, self.life, self.at = learner, life, at
    self.records = []
    config = history.config
    self.header = tape.Header(
      run_id=RUN,
      actor=actor,
      incarnation=life,
      seed=0,
      config=json.dumps(config.to_dict()),
      config_sha256=config.digest,
      code_version="1",
      backend="cpu",
      devices=1,
      processes=1,
      threads=1,
      cpu_features="",
      libraries=(),
      started_unix_ns=UNIX_NS + s(at),
      started_ns=s(1000),
    )

  def now(self, at):
    """The life's own clock at a time of the history."""
    return s(1000) + s(at) - s(self.at)

  def record(self, event, *commands):
    self.records.append(tape.Record(len(self.records), event, commands))
    return self

  def write(self, segments=1):
    """Writes the tape in so many segments."""
    size = -(-len(self.records) // segments)
    for number in range(segments):
      self.history.objects[self.key(number)] = tape.encode_segment(
        self.actor,
        self.life,
        number,
        None if number else self.header,
        self.records[number * size : (number + 1) * size],
      )
    return self.history

  def key(self, segment):
    return keys.tape(self.actor, self.life, segment)


class LearnerTape(_Tape):
  """A learner's life."""

  steps, tokens = 0, 0

  def join(self, at, seen=0):
    versions = ((seen, 1),) * self.history.fragments
    event = lt.Joined(
      self.now(at), self.learner, self.life, seen, 0, versions, 0
    )
    return self.record(event, self._next())

  def _next(self):
    return lt.Step(self.steps + 1, 0, 0, 0)

  def step(self, at, *commands, tokens=TOKENS, exchange=0, hold=False, loss=2):
    """A step is done; the next one is dispatched unless the learner holds."""
    self.steps += 1
    self.tokens += tokens
    done = lt.StepDone(
      self.now(at), self.steps, tokens, 1, float(loss), exchange
    )
    return self.record(done, *commands, *([] if hold else [self._next()]))

  def go(self, at, *commands):
    """A held learner goes on."""
    return self.record(lt.Tick(self.now(at)), *commands, self._next())

  def seen(self, at, t, counted=0, fetch=()):
    commands = [lt.Fetch(t, 1, tuple(fetch))] if fetch else []
    return self.record(lt.CommitSeen(self.now(at), t, 1, counted, 0), *commands)

  def fetched(self, at, t):
    return self.record(lt.Fetched(self.now(at), t))

  def written(self, at, t, attempt=1):
    return self.record(lt.AnswerWritten(self.now(at), t, attempt))

  def stop(self, at, reason="completed"):
    return self.record(lt.StopRequested(self.now(at), reason), lt.Stop(reason))


def encode(t, *fragments, tokens=TOKENS, attempt=1):
  """The command of an answer."""
  offer = tuple(Contribution(p, 0, 1, tokens) for p in fragments)
  return lt.Encode(t, attempt, offer, 0, 0, 1, tokens, ())


def apply(t, *fragments):
  """The command of an apply."""
  return lt.ApplyFragments(t, fragments)


class SyncerTape(_Tape):
  """A syncer's life."""

  def open(self, at, commit):
    return self.record(sy.Opened(self.now(at), self.life, commit, "digest"))

  def follow(self, at, commit):
    """Another shard's commit is there."""
    return self.record(sy.Followed(self.now(at), commit, "digest"))

  def answer(self, at, t, learner, life=1, attempt=1, check=True, **fields):
    """An answer's header is there, and is admitted if `check`."""
    history = self.history
    due = t % history.fragments
    header = messages.AnswerHeader(
      run_id=RUN,
      round=t,
      learner=learner,
      incarnation=life,
      attempt=attempt,
      contributions=(Contribution(due, max(t - history.fragments, 0), 1, 6),),
      layout=wire.sha256(history.layout.encode()),
      codec="int4/64",
      parts=(messages.PartRef(PART_BYTES, ""),),
      step_ns=1,
      fetch_ns=1,
      life_steps=9,
      life_tokens=99,
      vector_clock=(),
      metrics=(),
      mac="",
    )
    header = dataclasses.replace(header, **fields)
    key = (t, learner, life, attempt)
    commands = [sy.Check(*key)] if check else []
    return self.record(sy.AnswerSeen(self.now(at), key, header), *commands)

  def checked(self, at, t, learner, life=1, attempt=1, *, reason=None, then=()):
    key = (t, learner, life, attempt)
    event = sy.AnswerChecked(self.now(at), *key, reason, ())
    return self.record(event, *then)

  def merged(self, at, t, digest="digest"):
    event = sy.Merged(self.now(at), t, ())
    return self.record(event, tape.CommitDigest(t, digest))

  def committed(self, at, t, won=True, then=()):
    return self.record(sy.Committed(self.now(at), t, won, "digest"), *then)

  def whole_round(self, t, at, learners, life=1):
    """A round from its answers to its commit, 40 ms later."""
    for i, learner in enumerate(learners):
      self.answer(at + i / 1000, t, learner, life)
    counted = tuple(Counted(learner, life, 1, ()) for learner in learners)
    for i, learner in enumerate(learners):
      last = i + 1 == len(learners)
      merge = (sy.Merge(t, counted),) if last else ()
      self.checked(at + 0.01 + i / 1000, t, learner, life, then=merge)
    return self.merged(at + 0.03, t).committed(at + 0.04, t)

  def stop(self, at, reason="completed"):
    return self.record(sy.StopRequested(self.now(at), reason), sy.Stop(reason))


def journal(path, *lines):
  """Writes launch.jsonl from (seconds, what, fields)."""
  with open(path / "launch.jsonl", "a", encoding="utf-8") as file:
    for at, what, fields in lines:
      line = {"unix_ns": UNIX_NS + s(at), "what": what, **fields}
      file.write(json.dumps(line) + "\n")


def killed_run(path):
  """Two learners; learner 1 is killed at 6 s and trains again at 9 s.

  The launcher started at 0 s; rounds 1 to 4 commit at 2.04 s, 4.04 s, 5.04 s
  and 10.04 s.
  """
  history = History()
  sync = history.syncer(at=0.2).open(0.5, history.make_commit(0))
  sync.whole_round(1, 2, [0, 1]).whole_round(2, 4, [0]).whole_round(3, 5, [0])
  sync.whole_round(4, 10, [0], life=1).stop(10.05).write(segments=3)
  l0 = history.learner(0, at=0.5).join(1)
  l0.step(2, encode(1, 1)).written(2.01, 1)
  l0.seen(2.05, 1, 1, fetch=[1]).fetched(2.06, 1)
  l0.step(3, apply(1, 1), exchange=ms(5))
  l0.step(4, encode(2, 0, tokens=18), exchange=ms(7)).written(4.01, 2)
  l0.seen(4.05, 2, 1, fetch=[0]).fetched(4.06, 2)
  l0.step(5, apply(2, 0), encode(3, 1, tokens=18)).written(5.01, 3)
  l0.seen(5.05, 3, 1, fetch=[1]).fetched(5.06, 3)
  for at in (6, 7, 8, 9):
    l0.step(at)
  l0.step(10, apply(3, 1), encode(4, 0, tokens=30)).seen(10.05, 4, 1)
  l0.stop(10.05).write(segments=2)
  l1 = history.learner(1, at=0.5).join(1)
  l1.step(2, encode(1, 1)).written(2.01, 1).seen(2.05, 1, 1, fetch=[1])
  l1.fetched(2.06, 1).step(3, apply(1, 1)).step(4).step(5).write(segments=2)
  again = history.learner(1, life=2, at=8).join(9, seen=3)
  again.step(10, encode(4, 0)).stop(10.05).write()
  who = {"who": "learner 1"}
  fault = {
    "at": {"s": 6},
    "who": "learner 1",
    "what": "kill",
    "for": {"s": 1.5},
  }
  evidence = {"pid": 12, "exit_code": -9, "back_after_s": 3.0}
  journal(
    path,
    (0, "start", {"who": "syncer", "pid": 10}),
    (0.1, "start", {"who": "learner 0", "pid": 11}),
    (0.1, "start", {**who, "pid": 12}),
    (6, "exit", {**who, "pid": 12, "code": -9}),
    (7.5, "start", {**who, "pid": 13}),
    (9, "fault",
     {**who, "fault": fault, "took_effect": True, "evidence": evidence}),
    (10.1, "exit", {**who, "pid": 13, "code": 0}),
    (10.1, "exit", {"who": "learner 0", "pid": 11, "code": 0}),
    (10.2, "end", {"status": "completed", "reason": ""}),
  )  # fmt: skip
  with open(path / "eval.jsonl", "w", encoding="utf-8") as file:
    for t, tokens, loss in ((0, 0, 5.5), (4, 84, 2.25)):
      line = {"unix_ns": UNIX_NS + s(11), "round": t, "tokens": tokens}
      line |= {"loss": loss, "bits_per_byte": loss / 0.6931, "final": t == 4}
      file.write(json.dumps(line | {"params_digest": f"d{t}"}) + "\n")
  return history
