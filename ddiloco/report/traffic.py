"""Bytes of answers up and of parameters down, by round."""

import collections

from ddiloco.report.run import Run

UpDown = tuple[dict[int, int], dict[int, int]]


def traffic(run: Run) -> UpDown:
  """(up, down): bytes by the round they belong to.

  Up are the parts and headers of every answer written, also of those the
  syncer never looked at: these are taken to be as long as the others. Down
  are parameters, those a life starts from included.
  """
  up: collections.Counter[int] = collections.Counter()
  down: collections.Counter[int] = collections.Counter()
  syncer, whole = run.syncer, sum(run.fragment_bytes)
  for lives in run.learners.values():
    for life in lives:
      for t, attempt, fragments in life.encodes:
        key = (t, life.learner, life.incarnation, attempt)
        if key in syncer.answer_bytes:
          up[t] += syncer.answer_bytes[key]
        elif (t, attempt) in life.written:
          up[t] += syncer.due_bytes(fragments) + syncer.header_bytes
      if life.joined_ns:
        down[life.joined_round] += whole
      for t, fetches in life.fetched.items():
        down[t] += sum(run.fragment_bytes[p] for f in fetches for p in f)
  return dict(sorted(up.items())), dict(sorted(down.items()))
