"""Golden histories: the decisions of three scripts, event by event.

A file holds one record a line, `[event, [command, …]]`, as on a tape.
"""

import json
import os
import pathlib

import pytest

from ddiloco.protocol.syncer_types import StopRequested
from ddiloco.types import Apply, Refusal, Wait
from tests.protocol.scenario import (
  STEP_NS,
  Learner,
  Syncer,
  make_rules,
  plain_log,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
REWRITE = "DDILOCO_REWRITE_GOLDEN"
ADVICE = f"""
The {{name}} script is decided differently from {{path}}.
Old tapes of such runs no longer replay to the same decisions. If that is
intended, run `{REWRITE}=1 pytest {{test}}`, read the difference with
`git diff`, and say in the change log what is decided differently. If it is
not, the machine has a fault: the first record that differs is {{index}}:
  was {{was}}
  is  {{found}}"""


def learner():
  """Two answers in time, one late, one tried twice; a fetch that fails."""
  script = Learner(make_rules(4, 4, 2, checkpoint_every_steps=5))
  script.step()
  script.written(1)
  script.step()
  script.gets(1, attempt=1)
  script.written(2)
  script.step()
  script.sees(2, attempt=0)
  script.fetch_failed(2)
  script.step()
  script.fetched(2)
  script.write_failed(3)
  script.step()
  script.step()
  script.gets(3, attempt=2)
  script.step()
  script.stop()
  script.step()
  return script.log


def exact_learner():
  """Waits for the round before, is held, tries again, and goes on."""
  rules = make_rules(
    3, 3, 1, wait=Wait.EXACT, apply=Apply.AT_OVERLAP, stop_rounds=3
  )
  script = Learner(rules)
  script.step()
  script.written(1)
  script.gets(1, attempt=1)
  script.step()
  script.step()
  script.written(2)
  for _ in range(3):
    script.tick()
  script.written(2, attempt=2)
  script.gets(2, attempt=2)
  script.written(3)
  script.sees(3, attempt=1)
  script.step()
  return script.log


def syncer():
  """Quorum and grace; answers refused, superseded and late; a lost commit."""
  script = Syncer(make_rules(4, 4, 2, quorum_min=2))
  for m in range(3):
    script.member(m)
  script.offers(1, 0)
  script.checked(1, 0, reason=Refusal.CHECKSUM)
  script.answers(1, 0, attempt=2, steps=6)
  script.offers(1, 1, layout="other")
  script.answers(1, 1, attempt=2)
  script.answers(2, 1)
  script.member(1, incarnation=2)
  script.answers(2, 1, incarnation=2, steps=2, life_steps=2)
  script.offers(1, 2)
  script.wait(script.wake_in_ns())
  script.checked(1, 2)
  script.merged(1)
  script.member(2, beat=2, left=True)
  script.answers(2, 0)
  script.committed(1)
  script.merged(2)
  script.now_ns += STEP_NS
  script.feed(StopRequested(script.now_ns, "signal"))
  script.committed(2, won=False)
  return script.log


@pytest.mark.parametrize("scenario", [learner, exact_learner, syncer])
def test_history_is_the_golden_one(scenario):
  found = json.loads(json.dumps(plain_log(scenario())))
  path = GOLDEN / f"{scenario.__name__}.json"
  if os.environ.get(REWRITE) == "1":
    lines = ",\n".join(json.dumps(record) for record in found)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
  golden = json.loads(path.read_text(encoding="utf-8"))
  if found == golden:
    return
  index = next(
    (i for i, (a, b) in enumerate(zip(golden, found, strict=False)) if a != b),
    min(len(golden), len(found)),
  )
  pytest.fail(
    ADVICE.format(
      name=scenario.__name__,
      path=path.name,
      test="tests/protocol/golden_test.py",
      index=index,
      was=json.dumps(golden[index : index + 1]),
      found=json.dumps(found[index : index + 1]),
    ),
    pytrace=False,
  )
