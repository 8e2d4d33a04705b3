"""A donation is kept whatever becomes of the transfer's traces."""

from ddiloco.config import RecoveryConfig
from ddiloco.engine import recovery, startup
from ddiloco.engine.null_arrays import NullStateBytes
from ddiloco.engine.ports import ExchangeError, Pause
from ddiloco.protocol import keys
from ddiloco.protocol.schedule import Schedule
from tests.engine.memory import MemoryExchange, run_job
from tests.engine.regression import free_config, make_world

TRAVEL = NullStateBytes()
NONCE = "n"


def asked(exchange, newest):
  """What learner 1 goes on from; learner 0 gives as soon as it is asked."""
  job = recovery.find_source(
    newest,
    None,
    learner=1,
    nonce=NONCE,
    travel=TRAVEL,
    schedule=Schedule(3, 3, 1),
    options=RecoveryConfig(),
    heartbeat_ns=10**9,
  )
  request, answer = next(job), None
  while True:
    try:
      if isinstance(request, Pause):
        _give(exchange, newest)
        answer = 0
      else:
        answer = request.on(exchange)
    except ExchangeError as error:
      request = job.throw(error)
      continue
    try:
      request = job.send(answer)
    except StopIteration as stop:
      return stop.value


def _give(exchange, newest):
  header = {
    "run_id": newest.commit.run_id,
    "learner": 0,
    "incarnation": 1,
    "step": 9,
    "seen": newest.commit.round,
    "state": TRAVEL.digest,
  }
  run_job(recovery.publish(header, (0, 1, NONCE), TRAVEL.pack(None)), exchange)


def test_a_donation_outlives_a_failed_clean_up():
  world = make_world(free_config(2))
  world.run_to_round(9)
  exchange: MemoryExchange = world.exchange
  world.learners[0].beat(left=False)
  down = ExchangeError("the store is down")
  fault = exchange.once("before", "delete_prefix", keys.TRANSFERS, down)
  newest = run_job(startup.find_newest(world.schedule), exchange)
  source = asked(exchange, newest)
  assert fault.happened
  assert source.donor == (0, 1, 9) and source.refusals == ()
  assert exchange.names(keys.TRANSFERS)  # the next life deletes them
