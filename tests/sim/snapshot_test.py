"""Snapshots in virtual time: what they hold, replays and runs from them."""

import dataclasses

import pytest

from ddiloco.config import ConfigError
from ddiloco.engine.learner_arrays import LearnerArrays
from ddiloco.engine.ports import run_calls
from ddiloco.engine.sealing import RunKey, SealedExchange
from ddiloco.engine.snapshots import complete_rounds, finish
from ddiloco.live import restore
from ddiloco.protocol import keys, messages, snapshots, wire
from ddiloco.protocol.learner_types import Encode, Joined, Resumed
from ddiloco.protocol.learner_types import Snapshot as Recorded
from ddiloco.protocol.messages import Commit, Contribution
from ddiloco.protocol.snapshots import Attempt, Manifest
from ddiloco.sim import history as history_lib
from ddiloco.sim import replay, swarm
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.history import BadTape
from ddiloco.sim.jax_compute import JaxCompute
from ddiloco.sim.world import World
from ddiloco.types import Exit
from tests.sim import runs
from tests.sim.small import MemoryStore, make_config

CODECS = {"up": "int4", "down": "int8", "down_full_every": 2}


def snapped(**groups):
  return make_config(
    **{
      "learners": {"count": 3, "slowdown": (1.0, 1.5, 2.2)},
      "snapshot": {"every_rounds": 17, "keep": 3},
      "sync": {"overlap_steps": 2},
      "codec": CODECS,
      # What a later life goes on from is then never older than a snapshot.
      "live": {"checkpoint_every_steps": 0},
    }
    | groups
  )


def play(workdir, config, faults="", seed=5):
  code, store = runs.run(workdir, config, seed=seed, faults=faults)
  assert code is Exit.OK
  return store


@pytest.fixture(scope="module")
def played(tmp_path_factory):
  """A run with a death before, between and after its snapshots."""
  workdir = tmp_path_factory.mktemp("played")
  faults = "; ".join(
    [
      "at round 18 kill learner 1 for 0.2s",
      "at round 25 kill syncer for 0.5s",
      "at round 54 kill learner 0 for 1s",
    ]
  )
  return play(workdir, snapped(), faults).objects


@pytest.fixture
def store(played):
  return MemoryStore(played)


def manifest(store, t):
  data = store.objects[keys.manifest(keys.snapshot(t))]
  return snapshots.decode(Manifest, data)


# --- A replay that begins with one ------------------------------------------


@pytest.mark.parametrize("t", [17, 34, 51])
def test_what_follows_a_snapshot_follows_from_it(store, t):
  assert complete_rounds(store.list("snapshot/")) == [17, 34, 51]
  result = runs.replay(store, since=t)
  assert result["first_mismatch"] is None
  assert result["matched"] == result["commits"] == 60 - t


@pytest.mark.parametrize(
  "sync",
  [
    {"wait": "exact", "quorum_min": 3, "overlap_steps": 0},
    {"wait": "exact", "apply": "at_overlap", "overlap_steps": 2},
    {"anchor": "any", "apply": "own", "num_fragments": 1},
  ],
  ids=str,
)
def test_under_every_policy(tmp_path, sync):
  config = snapped(sync=sync, stop={"rounds": 30}, snapshot={"every_rounds": 9})
  store = play(tmp_path, config)
  rounds = complete_rounds(store.list("snapshot/"))
  assert rounds
  for t in rounds:
    result = runs.replay(store, since=t)
    assert result["first_mismatch"] is None
    assert result["matched"] == result["commits"] > 0


def test_answers_on_their_way_are_part_of_it(store):
  """A learner's, which no record after its snapshot offers again."""
  counted_from_it = 0
  for t in (17, 34, 51):
    for header in manifest(store, t).learners:
      state = header.state
      life = state.learner, state.incarnation
      offered = {(item.round, item.attempt) for item in header.attempts}
      chain = history_lib.load(store, t)
      found: dict[str, Commit] = {}
      assert replay.redecide_all(chain, found) is None
      for commit in found.values():
        attempt = commit.counted_attempt(*life)
        counted_from_it += (commit.round, attempt) in offered
  assert counted_from_it


@pytest.mark.parametrize("lost", ["residuals", "encoded"])
def test_a_snapshot_that_lacks_something_is_found_out(
  tmp_path, monkeypatch, lost
):
  whole = LearnerArrays.capture

  def partly(self):
    captured = whole(self)
    if lost == "residuals":
      zeros = tuple(
        tuple(0 * x for x in residual) for residual in captured.residuals
      )
      return captured._replace(residuals=zeros)
    return captured._replace(encoded={})

  monkeypatch.setattr(LearnerArrays, "capture", partly)
  config = snapped(stop={"rounds": 30})
  store = play(tmp_path, config)
  monkeypatch.undo()
  if lost == "encoded":
    with pytest.raises(BadTape, match="before the answer: it is from before"):
      runs.replay(store, since=17)
  else:
    result = runs.replay(store, since=17)
    assert result["first_mismatch"]["what"] == "parameters"


def test_a_replay_from_no_snapshot_says_which_there_are(store):
  with pytest.raises(BadTape, match="no complete snapshot.*17, 34, 51"):
    runs.replay(store, since=20)


def test_a_replay_from_a_damaged_snapshot_names_the_object(store):
  store.objects[keys.snapshot_params(keys.snapshot(34), 1)] = b"other"
  with pytest.raises(BadTape, match="parameters of fragment 1 in the snapshot"):
    runs.replay(store, since=34)


# --- Which there are --------------------------------------------------------


def test_only_the_newest_ones_are_kept(tmp_path):
  config = snapped(snapshot={"every_rounds": 10, "keep": 2})
  store = play(tmp_path, config)
  assert complete_rounds(store.list("snapshot/")) == [40, 50]
  rounds = {keys.snapshot_round(name)[0] for name in store.list("snapshot/")}
  assert rounds == {40, 50}


def test_a_torn_manifest_takes_no_whole_ones_place(store):
  """Of 34, 51 and a later one two are kept, and 51 is none."""
  key = keys.manifest(keys.snapshot(51))
  store.objects[key] = store.objects[key][:-9]
  commit = dataclasses.replace(manifest(store, 34).commit, round=60)
  later = dataclasses.replace(manifest(store, 34), commit=commit)
  run_calls(finish(later, keep=2), store)
  rounds = {keys.snapshot_round(name)[0] for name in store.list("snapshot/")}
  assert rounds == {34, 60}


def test_a_dead_learner_is_left_out_and_its_data_position_kept(tmp_path):
  config = snapped(
    snapshot={"every_rounds": 30, "patience_s": 1.0},
    live={"checkpoint_every_steps": 0, "dead_after_s": 100.0},
  )
  store = play(tmp_path, config, "at round 20 kill learner 1 for 60s")
  there = manifest(store, 30)
  assert [item.state.learner for item in there.learners] == [0, 2]
  assert there.left_out == (1,)
  (member,) = [m for m in there.members if m.learner == 1]
  assert member.next_sample > 0
  (listed,) = restore.listing(store)
  assert listed.left_out == (1,) and listed.learners == (0, 2)


def test_one_whose_syncer_died_is_none_and_is_cleaned(tmp_path):
  """The syncer waits for a dead learner, and dies over it."""
  faults = (
    "at round 19 kill learner 1 for 60s; at round 22 kill syncer for 0.5s"
  )
  config = snapped(
    snapshot={"every_rounds": 20, "patience_s": 1.0},
    live={"dead_after_s": 100.0},
  )
  store = play(tmp_path / "a", with_rounds(config, 30), faults)
  names = store.list(keys.snapshot(20))
  assert names and complete_rounds(names) == []
  assert restore.listing(store) == []
  store = play(tmp_path / "b", config, faults)
  assert complete_rounds(store.list("snapshot/")) == [40]
  assert not store.list(keys.snapshot(20))


def with_rounds(config, rounds):
  stop = dataclasses.replace(config.stop, rounds=rounds)
  return dataclasses.replace(config, stop=stop)


# --- A run that begins with one ---------------------------------------------


def restored_into(target, source, t, config):
  found = restore.find(source, t, config)
  restore.restore(source, found, target, config)


def go_on(source, t, config, compute=JaxCompute, faults=(), world_seed=9):
  """The world of a restored run at its end, and its exchange."""
  target = MemoryStore()
  restored_into(target, source, t, config)
  if compute is JaxCompute:
    arrays = JaxCompute(config, "")
  else:
    arrays = NullCompute(config)
  world = World(config, arrays, seed=world_seed, code_version="x", logs=True)
  world.adopt(target.objects)
  for name in (*world.syncers, *(f"learner-{i}" for i in learners_of(config))):
    world.start(name)
  for after_ns, name in faults:
    world.heap.after(after_ns, lambda name=name: world.crash(name))
  assert world.run(lambda: world.ended, events_max=20_000)
  world.run(lambda: False, events_max=2_000)  # everybody says good-bye
  world.audit.finish(world.lives, world.machines)
  names = world.exchange.names("")
  return world, MemoryStore({name: world.exchange.peek(name) for name in names})


def learners_of(config):
  return range(config.learners.count)


def first_events(world):
  lives = (life.log[0][0] for life in world.lives if life.log)
  return {
    f"learner-{event.learner}, life {event.incarnation}": event
    for event in lives
    if isinstance(event, Joined | Resumed)
  }


def code_versions_agree(monkeypatch):
  monkeypatch.setattr("ddiloco.sim.replay.code_version", lambda: "x")


def test_a_restored_run_goes_on_and_is_replayed(store, monkeypatch):
  code_versions_agree(monkeypatch)
  world, after = go_on(store, 34, snapped())
  before = manifest(store, 34)
  assert world.audit.newest == 60
  events = first_events(world)
  assert sorted(events) == [
    f"learner-{h.state.learner}, life {h.state.incarnation + 1}"
    for h in before.learners
  ]
  for header in before.learners:
    state = header.state
    event = events[f"learner-{state.learner}, life {state.incarnation + 1}"]
    assert isinstance(event, Resumed) and event.state == state
    assert state.step > 0 and state.next_sample > 0
  result = runs.replay(after)
  assert result["first_mismatch"] is None
  assert result["matched"] == result["commits"] == 60 - 34
  assert world.commits[60].tokens > before.commit.tokens


def test_no_token_is_counted_twice_or_lost(store):
  """All work of a learner, as the restored run's commits tell it."""
  world, _ = go_on(store, 34, snapped())
  before = {item.learner: item for item in manifest(store, 34).commit.progress}
  last = {item.learner: item for item in world.commits[60].progress}
  for header in manifest(store, 34).learners:
    m, state = header.state.learner, header.state
    now = last[m]
    assert now.incarnation == state.incarnation + 1
    assert now.earlier_tokens == before[m].earlier_tokens
    process = world.processes[f"learner-{m}"].actor.state
    assert process.tokens >= now.tokens >= state.tokens
    assert process.tokens == 12 * process.step  # of the very same life


def test_its_first_answers_are_those_that_were_on_their_way(store):
  _, after = go_on(store, 34, snapped())
  again = 0
  for header in manifest(store, 34).learners:
    state = header.state
    name = f"learner-{state.learner}, life {state.incarnation + 1}"
    (life,) = [x for x in history_lib.load(after).lives if x.name == name]
    offered = [c for c in life.records[0].commands if isinstance(c, Encode)]
    for answer, command in zip(state.answers, offered, strict=False):
      assert command.round == answer.round
      assert command.attempt == answer.attempts + 1
      assert command.contributions == answer.contributions
      again += 1
  assert again


@pytest.mark.parametrize("count", [1, 5])
def test_with_fewer_or_more_learners(store, count):
  config = snapped(learners={"count": count})
  world, after = go_on(store, 51, config)
  assert world.audit.newest == 60
  kinds = {name: type(event) for name, event in first_events(world).items()}
  assert list(kinds.values()).count(Resumed) == min(count, 3)
  assert list(kinds.values()).count(Joined) == max(count - 3, 0)


def test_with_other_shards_of_the_syncer(store):
  config = snapped(syncer={"shards": 3})
  world, _ = go_on(store, 51, config)
  epochs = {commit.epoch for commit in world.commits.values() if commit.epoch}
  assert world.audit.newest == 60 and epochs == {1, 2, 3}


def test_a_life_after_the_restored_one_starts_as_any_does(store):
  world, after = go_on(store, 34, snapped(), faults=[(22 * 10**8, "learner-2")])
  kinds = [
    type(event)
    for name, event in sorted(first_events(world).items())
    if name.startswith("learner-2")
  ]
  assert kinds == [Resumed, Joined]


def test_a_heartbeat_that_nobody_could_read_costs_nothing(store):
  """A recorded learner whose member's record was garbage just then."""
  found = manifest(store, 34)
  blind = dataclasses.replace(found, members=found.members[1:])
  key = keys.manifest(keys.snapshot(34))
  store.objects[key] = snapshots.encode(blind)
  world, _ = go_on(store, 34, snapped())
  events = first_events(world)
  for header in found.learners:
    state = header.state
    name = f"learner-{state.learner}, life {state.incarnation + 1}"
    assert isinstance(events[name], Resumed)


def test_a_learner_whose_part_is_damaged_starts_anew(store, monkeypatch):
  code_versions_agree(monkeypatch)
  whole = restore.restore

  def spoil(source, found, target, config):
    whole(source, found, target, config)
    (name,) = target.list("origin/learner-1.")
    target.objects[name] = target.objects[name][:-1] + b"?"

  monkeypatch.setattr(restore, "restore", spoil)
  world, after = go_on(store, 34, snapped())
  life = manifest(store, 34).learners[1].state.incarnation
  events = first_events(world)
  # The life that would have gone on with it is nobody's.
  assert f"learner-1, life {life + 1}" not in events
  assert isinstance(events[f"learner-1, life {life + 2}"], Joined)


@pytest.mark.parametrize("what", ["fragment", "fragments", "shapes"])
def test_a_record_that_cannot_be_this_runs_is_refused(store, monkeypatch, what):
  """What another process wrote is never trusted, even with a right digest."""
  code_versions_agree(monkeypatch)
  found = manifest(store, 34)
  first, *rest = found.learners
  match what:
    case "fragment":
      odd = Attempt(35, 1, (Contribution(99, 34, 1, 12),))
      changed = dataclasses.replace(first, attempts=(odd,))
    case "fragments":
      state = dataclasses.replace(
        first.state, fragments=first.state.fragments[1:]
      )
      changed = dataclasses.replace(first, state=state)
    case "shapes":
      changed = dataclasses.replace(first, shapes="others")
  spoilt = dataclasses.replace(found, learners=(changed, *rest))
  key = keys.manifest(keys.snapshot(34))
  store.objects[key] = snapshots.encode(spoilt)
  world, _ = go_on(store, 34, snapped())
  events = first_events(world)
  life = first.state.incarnation
  assert f"learner-0, life {life + 1}" not in events
  assert isinstance(events[f"learner-0, life {life + 2}"], Joined)


def test_a_snapshot_of_a_restored_run_restores_again(store, monkeypatch):
  code_versions_agree(monkeypatch)
  _, once = go_on(store, 34, snapped())
  _, twice = go_on(once, 51, snapped())
  assert history_lib.load(twice).genesis.origin.round == 51
  result = runs.replay(twice)
  assert result["matched"] == result["commits"] == 9
  assert runs.replay(once, since=51)["matched"] == 9


# --- Refused ----------------------------------------------------------------


def test_restore_refuses_what_does_not_fit(store):
  cases = [
    (34, {"codec": CODECS | {"up": "int8"}}, "codec.up = 'int8', but the run"),
    (34, {"inner": {"learning_rate": 0.5}}, "inner.learning_rate = 0.5"),
    (35, {}, "no complete snapshot.*rounds 17, 34, 51"),
  ]
  for t, groups, words in cases:
    target = MemoryStore()
    with pytest.raises(ConfigError, match=words):
      restored_into(target, store, t, snapped(**groups))
    assert target.objects == {}


def test_restore_refuses_a_damaged_one_and_leaves_no_run(store):
  (name, *_) = store.list("snapshot/000000034.learner-2.")
  part = keys.snapshot_part(keys.snapshot(34), 2, 1, 0)
  assert name.startswith("snapshot/000000034.learner-2.1.")
  store.objects[part] = store.objects[part][1:]
  target = MemoryStore()
  with pytest.raises(ConfigError, match="arrays of learner 2 in it.*damaged"):
    restored_into(target, store, 34, snapped())
  assert keys.commit(0) not in target.objects


def test_restore_refuses_another_runs_snapshot(store):
  found = manifest(store, 34)
  commit = dataclasses.replace(found.commit, run_id="another")
  other = dataclasses.replace(found, commit=commit)
  key = keys.manifest(keys.snapshot(34))
  store.objects[key] = snapshots.encode(other)
  with pytest.raises(ConfigError, match="of run another, not of this run"):
    restored_into(MemoryStore(), store, 34, snapped())


@pytest.mark.parametrize("what", ["manifest", "parameters", "learner"])
def test_who_has_no_key_cannot_inject_a_snapshot(store, what):
  """A snapshot's objects are sealed as all others are."""
  raw, target = MemoryStore(), MemoryStore()
  key = RunKey(b"0123456789abcdef0123456789abcdef", "a file")
  sealed = SealedExchange(raw, key, "sealed")
  for name, data in sorted(store.objects.items()):  # commit 0 is the first
    sealed.put(name, data)
  prefix = keys.snapshot(34)
  name = {
    "manifest": keys.manifest(prefix),
    "parameters": keys.snapshot_params(prefix, 0),
    "learner": keys.snapshot_part(prefix, 0, 1, 0),
  }[what]
  assert restore.find(sealed, 34, snapped()) == manifest(store, 34)
  raw.objects[name] = store.objects[name]  # as it was, but not sealed
  with pytest.raises(ConfigError, match="not authentic|refused"):
    restored_into(target, sealed, 34, snapped())
  assert keys.commit(0) not in target.objects


def test_restore_never_writes_over_a_run(store):
  target = MemoryStore()
  restored_into(target, store, 34, snapped())
  before = dict(target.objects)
  with pytest.raises(ConfigError, match="holds a run already"):
    restored_into(target, store, 17, snapped())
  assert target.objects == before


def test_a_restore_cut_short_is_done_again(store):
  class Failing(MemoryStore):
    left = 10

    def put(self, key, value, *, durable=False):
      self.left -= 1
      if self.left < 0:
        raise OSError("the disk is full")
      super().put(key, value, durable=durable)

  target = Failing()
  with pytest.raises(OSError, match="full"):
    restored_into(target, store, 34, snapped())
  assert target.objects and keys.commit(0) not in target.objects
  target.left = 1000
  restored_into(target, store, 34, snapped())
  zero = messages.decode(Commit, target.objects[keys.commit(0)])
  first = messages.decode(Commit, target.objects[keys.commit(34)])
  assert first.previous == wire.sha256(target.objects[keys.commit(0)])
  assert zero.genesis.origin.round == 34
  assert zero.run_id == first.run_id != manifest(store, 34).commit.run_id


def test_garbage_among_snapshots_is_not_listed(store):
  store.objects[keys.manifest(keys.snapshot(51))] = b"garbage"
  assert [item.round for item in restore.listing(store)] == [17, 34]


# --- Without arrays, under trouble ------------------------------------------


def test_worlds_restored_from_the_swarms_snapshots(monkeypatch):
  """The protocol's part, from cuts through histories full of faults."""
  restored, resumed = 0, 0
  for seed in range(2000, 2060):
    run = swarm._Run(seed, None, None, 0)
    run.play()
    names = run.world.exchange.names("")
    source = MemoryStore({n: run.world.exchange.peek(n) for n in names})
    rounds = complete_rounds(names)
    config = run.plan.config
    if not rounds or config.stop.rounds < 1_000_000:
      continue
    there = manifest(source, rounds[-1])
    quorate = len({m.learner for m in there.members}) >= config.quorum
    if not quorate or config.live.store_deadline_s < 1.0:
      continue
    config = with_rounds(config, rounds[-1] + 20)
    world, _ = go_on(source, rounds[-1], config, compute=NullCompute)
    restored += 1
    resumed += sum(
      isinstance(life.log[0][0], Resumed) for life in world.lives if life.log
    )
  assert restored >= 5 and resumed >= 5


def test_every_snapshot_is_of_a_learner_that_was_there(store):
  """The record on the tape is the record in the snapshot."""
  for t in (17, 34, 51):
    taken = {}
    for life in history_lib.load(store).lives:
      for record in life.records:
        for command in record.commands:
          if life.learner is not None and isinstance(command, Recorded):
            taken[command.round, life.learner] = command.state
    for header in manifest(store, t).learners:
      assert taken[t, header.state.learner] == header.state
