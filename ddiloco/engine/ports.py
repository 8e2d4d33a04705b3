"""What the engine needs from the outside world: an exchange and a program.

A *job* is a generator that yields requests (`Call`, `Ready`, `Pause`) and
returns one machine event. Whoever drives the engine decides when each request
happens: threads in a live run, a virtual clock in a simulation. Jobs never
touch a clock, a thread or a store themselves. A job that has to go on in
another lane returns the `Work` to do there instead.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

State = Any  # The program's whole training state, a pytree of device arrays.
Params = Any  # A pytree of f32 device arrays.
Batch = Any


class ExchangeError(Exception):
  """The store could not be reached, or refused, until the deadline."""


class ExchangeRefused(ExchangeError):
  """The store refused, and asking it again cannot help."""


class DamagedRun(Exception):
  """The exchange holds something that cannot belong to this run."""


class Item(NamedTuple):
  """A stored object. `generation` changes with every write of the key."""

  value: bytes
  generation: bytes


class Exchange(Protocol):
  """A key-value store shared by all actors of a run. Thread-safe.

  Every method returns or raises `ExchangeError` before its deadline.
  """

  def put(self, key: str, value: bytes, *, durable: bool = False) -> None:
    """Writes an object; `durable` survives a crash of the machine."""

  def put_if_absent(
    self, key: str, value: bytes, *, durable: bool = False
  ) -> bool:
    """Creates an object. True if the stored object is the caller's."""

  def compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None
  ) -> bytes | None:
    """Replaces an object of that generation (None: absent).

    Returns the new generation, or None if somebody else was faster.
    """

  def get(self, key: str) -> Item | None:
    """Reads an object; None if there is none."""

  def list(self, prefix: str) -> list[str]:
    """The keys that start with `prefix`, sorted."""

  def delete(self, key: str) -> None:
    """Deletes an object; an absent one is no error."""

  def delete_prefix(self, prefix: str) -> None:
    """Deletes every object whose key starts with `prefix`."""


class Call(NamedTuple):
  """A request of a job: one operation of the exchange.

  The driver sends back the method's result, or throws `ExchangeError`. The
  life is worth nothing without a `vital` one: a driver may go on trying it,
  for as long as the store is away, until the life is asked to stop.
  """

  method: str
  args: tuple[Any, ...]
  durable: bool = False
  vital: bool = False

  def on(self, exchange: Exchange) -> Any:
    """Performs the operation."""
    options = {"durable": True} if self.durable else {}
    return getattr(exchange, self.method)(*self.args, **options)


class Ready(NamedTuple):
  """A request of a job: wait until these device arrays are computed."""

  arrays: Any


class Pause(NamedTuple):
  """A request of a job: go on after so long. The answer is the clock's ns."""

  wait_ns: int


class StepResult(NamedTuple):
  """A dispatched inner step."""

  metrics: dict[str, Any]  # device scalars
  tokens: int
  samples: int


Job = Generator[Call | Ready | Pause, Any, Any]


def drive(job: Job, answer: Callable[[Any], Any]) -> Any:
  """The result of a job whose requests `answer` answers, one by one."""
  try:
    request = next(job)
    while True:
      try:
        given = answer(request)
      except ExchangeError as error:
        request = job.throw(error)
      else:
        request = job.send(given)
  except StopIteration as stop:
    return stop.value


def run_calls(job: Job, exchange: Exchange) -> Any:
  """The result of a job that requests nothing but operations."""
  return drive(job, lambda call: call.on(exchange))


class Program(Protocol):
  """What a user brings: a model that trains on its own data.

  All array work is dispatched asynchronously; `step` may donate `state`, and
  where a fragment is part of a tensor it is written into that tensor in place.
  `params` may have arrays of any kind that `sync.frozen` names: they are not
  exchanged, and whether they are trained is the program's affair.
  Optional: `check()` raises `ConfigError` before a run is created;
  `abstract_params()` returns `jax.ShapeDtypeStruct`s for what `params` returns
  (`launch.fragments` then works for a model of any size); and
  `evaluate(params) -> dict` of numbers is what `launch.evaluate` reports.
  `overwritten(state, pieces) -> state` is called when commits have just
  overwritten these parameters (see `ddiloco.algo.fragments.Piece`), so that
  the moments of an inner optimizer can follow `inner.on_overwrite`.
  `reads_init = True` says that `init()` starts from `init.path` where it is
  set; for other programs it is refused.
  `launch.compile` needs `lower()`, the jitted step lowered for shapes alone,
  and `flops_per_sample()`, what it computes (see `ddiloco.lm.flops.Flops`);
  and a build function with the argument `devices`. `launch.plan` finds more
  with one that has the argument `abstract`: a program without any device.
  """

  samples_per_step: int  # what `batch` is asked for, by this learner

  def init(self) -> State:
    """The initial state; the same bits for the same config."""

  def params(self, state: State) -> Params:
    """The exchanged parameters: a pytree of f32 arrays."""

  def with_params(self, state: State, params: Params) -> State:
    """The state with these parameters and everything else unchanged."""

  def batch(self, first_sample: int, count: int) -> Batch:
    """A pure function of (seed, data shard, first sample index, count)."""

  def tokens(self, batch: Batch) -> int:
    """How many tokens of the batch are trained on."""

  def step(
    self, state: State, batch: Batch, clock: int
  ) -> tuple[State, dict[str, Any]]:
    """One inner step; `clock` is what the schedule reads (see config)."""
