"""What `launch.local` shows while a run goes on."""

import pathlib
import shutil
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ddiloco.config import Config
from ddiloco.live.children import Child
from ddiloco.live.monitor import View

_PLAIN_EVERY_S = 5.0
_QUIET_S = 10.0  # without a commit before somebody is named
_RUNNING = "running"
_FULL_BYTES = 1 << 20  # with less space than this left, a disk counts as full


class Progress:
  """A table on a terminal, plain lines elsewhere."""

  def __init__(
    self, config: Config, children: dict[str, Child], workdir: pathlib.Path
  ):
    self._config, self._children = config, children
    self._workdir = workdir
    self._console = Console(stderr=True)
    self._begun_s = self._line_s = time.monotonic()
    self._live: Live | None = None
    if self._console.is_terminal:
      self._live = Live(console=self._console, refresh_per_second=4)

  def __enter__(self) -> "Progress":
    if self._live is not None:
      self._live.start()
    return self

  def __exit__(self, *error: object) -> None:
    if self._live is not None:
      self._live.stop()

  def say(self, text: str) -> None:
    """A line that stays."""
    if self._live is not None:
      self._console.print(text, markup=False, highlight=False)
    else:
      print(text, file=sys.stderr, flush=True)

  def update(self, view: View) -> None:
    """Shows how far the run is."""
    now_s = time.monotonic()
    if self._live is not None:
      self._live.update(self._table(view))
    elif now_s - self._line_s >= _PLAIN_EVERY_S:
      self._line_s = now_s
      self.say(self._line(view))

  def _line(self, view: View) -> str:
    elapsed_s = time.monotonic() - self._begun_s
    return f"[{elapsed_s:5.0f} s] {self._goal(view)}{self._missing(view)}"

  def _goal(self, view: View) -> str:
    stop = self._config.stop
    rounds = f"round {view.round}" + (f"/{stop.rounds}" if stop.rounds else "")
    tokens = 0 if view.commit is None else view.commit.tokens
    share = f" of {stop.tokens:,}" if stop.tokens else ""
    counted = len(view.commit.counted) if view.commit else 0
    return f"{rounds}, {tokens:,}{share} tokens, {counted} learners merged"

  def _missing(self, view: View) -> str:
    """Names who or what is missing when rounds stop closing."""
    quiet_s = time.monotonic() - max(view.commit_s, self._begun_s)
    if quiet_s < _QUIET_S or view.commit is None:
      starting = [c.name for c in self._children.values() if not c.ready]
      return f"; starting: {', '.join(starting)}" if starting else ""
    if shutil.disk_usage(self._workdir).free < _FULL_BYTES:
      return (
        f"; no commit for {quiet_s:.0f} s: the disk of {self._workdir} is "
        "full. Free some space and the run goes on"
      )
    syncers = [c for c in self._children.values() if c.merges]
    if 0 < sum(c.running for c in syncers) < self._config.syncer.shards:
      down = ", ".join(c.name for c in syncers if not c.running)
      return f"; no commit for {quiet_s:.0f} s: {down} is down"
    alive = [c.name for c in self._children.values() if c.running and c.ready]
    alive += [
      f"learner {i}"
      for i, state in self._elsewhere(view).items()
      if state == _RUNNING
    ]
    return (
      f"; no commit for {quiet_s:.0f} s: quorum is "
      f"{self._config.quorum}, alive are {', '.join(alive) or 'none'}"
    )

  def _table(self, view: View) -> Table:
    table = Table(title=self._goal(view) + self._missing(view))
    for column in ("", "state", "life", "steps", "tokens", "restarts"):
      table.add_column(column, justify="left" if not column else "right")
    for child in self._children.values():
      member = (
        view.members.get(child.learner) if child.learner is not None else None
      )
      state = "over" if child.over else "down"
      if child.running:
        state = _RUNNING if child.ready else "starting"
      table.add_row(
        child.name,
        state,
        str(member.incarnation) if member else "",
        f"{member.steps:,}" if member else "",
        f"{member.tokens:,}" if member else "",
        str(child.restarts),
      )
    for learner, state in self._elsewhere(view).items():
      member = view.members[learner]
      table.add_row(
        f"learner {learner}",
        f"{state} on {member.host}" if state == _RUNNING else state,
        str(member.incarnation),
        f"{member.steps:,}",
        f"{member.tokens:,}",
        "",
      )
    return table

  def _elsewhere(self, view: View) -> dict[int, str]:
    """The state of the learners that others have started, by number."""
    own = {child.learner for child in self._children.values()}
    within_s = self._config.live.dead_after_s
    found = {}
    for learner in view.elsewhere(own):
      gone = "left" if view.members[learner].left else "silent"
      live = view.is_live(learner, within_s)
      found[learner] = _RUNNING if live else gone
    return found
