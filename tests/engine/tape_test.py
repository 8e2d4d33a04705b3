"""Tapes: nothing lost or doubled, and decisions that can be made again."""

import pytest

from ddiloco.engine.ports import ExchangeError
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import keys, learner, learner_types, syncer, tape
from tests.engine.memory import Killed, MemoryExchange, run_job
from tests.engine.recovery_test import exact_world, free_world
from tests.engine.regression import free_config, make_world

HEADER = tape.Header(
  run_id="run",
  actor="learner-0",
  incarnation=1,
  seed=0,
  config="{}",
  config_sha256="",
  code_version="",
  backend="cpu",
  devices=1,
  processes=1,
  threads=2,
  cpu_features="",
  libraries=(("jax", "0"),),
  started_unix_ns=1,
  started_ns=2,
)


def read(exchange, actor, incarnation):
  """One life's tape as it lies in the exchange."""
  prefix = keys.tape(actor, incarnation, 0)[:-9]
  return tape.join(
    tape.decode_segment(exchange.objects[name].value)
    for name in exchange.names(prefix)
  )


def tick(now_ns):
  return learner_types.Tick(now_ns)


# --- The writer -------------------------------------------------------------


def test_records_come_back_in_order_with_the_header_first():
  exchange, writer = MemoryExchange(), TapeWriter(HEADER)
  for i in range(7):
    writer.record(tick(i), (learner_types.Stop(str(i)),))
    if i % 3 == 2:
      run_job(writer.flush(), exchange)
  assert not writer.empty
  run_job(writer.flush(), exchange)
  assert writer.empty
  header, records = read(exchange, "learner-0", 1)
  assert header == HEADER
  assert [r.event for r in records] == [tick(i) for i in range(7)]
  assert [r.commands[0].reason for r in records] == list("0123456")


def test_flushing_nothing_writes_nothing():
  exchange, writer = MemoryExchange(), TapeWriter(HEADER)
  run_job(writer.flush(), exchange)
  assert writer.empty and not exchange.objects


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("segment", [0, 1])
def test_a_failed_write_is_repeated_unchanged(when, segment):
  """Also where it had succeeded: the exchange asserts equal bytes."""
  exchange, writer = MemoryExchange(), TapeWriter(HEADER)
  key = keys.tape("learner-0", 1, segment)
  fault = exchange.once(when, "put", key, ExchangeError("no reply"))
  failures = 0
  for i in range(5):
    writer.record(tick(i), ())
    try:
      run_job(writer.flush(), exchange)
    except ExchangeError:
      failures += 1
      assert not writer.empty
  assert fault.happened and failures == 1
  header, records = read(exchange, "learner-0", 1)
  assert header == HEADER
  assert [r.event.now_ns for r in records] == list(range(5))


def test_nothing_is_lost_however_long_the_store_is_down():
  exchange, writer = MemoryExchange(), TapeWriter(HEADER)

  def down(method, key):
    raise ExchangeError("no reply")

  up, exchange.before = exchange.before, down
  for i in range(50):
    writer.record(tick(i), ())
    with pytest.raises(ExchangeError):
      run_job(writer.flush(), exchange)
  exchange.before = up
  run_job(writer.flush(), exchange)
  _, records = read(exchange, "learner-0", 1)
  assert [r.index for r in records] == list(range(50))


# --- The tapes of a run -----------------------------------------------------


def free_run():
  world = free_world()
  world.run_to_round(8)
  world.learners[1].kill()
  world.syncers[0].kill()
  world.start_syncer()
  world.join(1)
  return world.run()


def behind_run():
  """A learner that misses what retention keeps."""
  world = make_world(free_config(2, stop={"rounds": 30}))
  world.learners[1].blind = True
  world.run_to_round(20)
  world.learners[1].blind = False
  return world.run()


@pytest.fixture(scope="module", params=[free_run, behind_run, exact_world])
def finished(request):
  world = request.param()
  return world.run()


def names_of(node):
  writer = node.actor.tape
  return writer._actor, writer._incarnation


def test_a_finished_life_has_its_whole_tape_in_the_exchange(finished):
  for node in finished.lives:
    if node.dead:
      continue
    header, records = read(finished.exchange, *names_of(node))
    assert (header.actor, header.incarnation) == names_of(node)
    assert [r.event for r in records] == [event for event, _ in node.log]
    for record, (_, commands) in zip(records, node.log, strict=True):
      assert record.commands == tuple(map(tape.recorded, commands))


def test_decisions_can_be_made_again_from_the_tape(finished):
  rules = finished.rules
  for node in finished.lives:
    machine = syncer if node in finished.syncers else learner
    _, records = read(finished.exchange, *names_of(node))
    state, commands = machine.start(records[0].event, rules)
    for index, record in enumerate(records):
      if index:
        state, commands = machine.step(state, record.event, rules)
      assert tuple(map(tape.recorded, commands)) == record.commands
    if not node.dead:
      assert state == node.state


@pytest.mark.parametrize("make", [exact_world, free_world])
def test_what_depends_on_a_record_is_never_there_before_it(make):
  """Whenever a life is cut off, its tape explains all it has published."""
  world = make()
  checks = []

  def look(method, key):
    if method == "put" and key.endswith(".header"):
      round_, m, life, attempt, _ = key.removeprefix(keys.ANSWERS).split(".")
      _, records = read(world.exchange, f"learner-{m}", int(life))
      encodes = [
        (c.round, c.attempt)
        for r in records
        for c in r.commands
        if isinstance(c, learner_types.Encode)
      ]
      checks.append((int(round_), int(attempt)) in encodes)
    if method == "put_if_absent" and key.startswith(keys.COMMITS):
      epoch = world.syncers[-1].state.epoch
      _, records = read(world.exchange, "syncer", epoch)
      digests = [
        c.round
        for r in records
        for c in r.commands
        if isinstance(c, tape.CommitDigest)
      ]
      checks.append(keys.commit_round(key) in digests)

  world.exchange.after = look
  world.run()
  assert len(checks) > 2 * world.committed - 2 and all(checks)


def test_a_dead_lifes_tape_ends_with_what_it_published_last():
  world = exact_world()
  commit = keys.commit(5)
  world.exchange.once("after", "put_if_absent", commit, Killed("here"))
  world.run_until(lambda: world.syncers[0].dead)
  _, records = read(world.exchange, "syncer", 1)
  digests = [c for c in records[-1].commands if hasattr(c, "sha256")]
  assert [c.round for c in digests] == [5]
