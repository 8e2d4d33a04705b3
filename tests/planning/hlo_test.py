"""What compiled programs move: loops count as often as they run."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.planning import hlo
from ddiloco.planning.hlo import Collective

# Five layers x 1024 x 1024 in bf16, scanned, the gradient of a sum of tanh; on
# v5e:2x2, layers split four ways, 4096 rows of activations too. Of that, what
# `hlo` reads: compiled by libtpu 0.0.42, without metadata.
COMPILED_FOR_TPU = pathlib.Path(__file__).parent / "v5e_2x2.hlo"
MATRIX_BYTES = 1024 * 1024 * 2


def compiled(function, *shapes, shardings=None):
  options = {} if shardings is None else {"in_shardings": shardings}
  structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return hlo.traffic(
    jax.jit(function, **options).lower(*structs).compile().as_text()
  )


def test_a_program_for_tpus():
  found = hlo.traffic(COMPILED_FOR_TPU.read_text())
  ring = 3 / 4
  gathered = round(2 * 5 * MATRIX_BYTES * ring)  # forward and backward
  scattered = round(5 * MATRIX_BYTES * ring)
  assert found.collectives == (
    Collective("all-gather", 4, 10, gathered),
    Collective("reduce-scatter", 4, 5, scattered),
  )
  assert found.sent_bytes == gathered + scattered
  # Everything else stays in the chip's own memory: the weights' quarter comes
  # in, their gradient's quarter goes out, activations spill.
  assert found.memory_bytes > 2 * 5 * MATRIX_BYTES / 4


def scanned(w, x):
  return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def unrolled(w, x):
  for layer in range(w.shape[0]):
    x = jnp.tanh(x @ w[layer])
  return x


@pytest.mark.parametrize("layers", (2, 12))
def test_a_scan_moves_what_its_layers_move(layers):
  shapes = (layers, 256, 256), (256, 256)
  loop, rolled_out = compiled(scanned, *shapes), compiled(unrolled, *shapes)
  # A loop also slices a layer out of the stack, which may take a copy.
  weights = layers * 256 * 256 * 4
  assert rolled_out.memory_bytes <= loop.memory_bytes
  assert loop.memory_bytes <= rolled_out.memory_bytes + 3 * weights
  assert rolled_out.memory_bytes >= weights


@pytest.mark.parametrize("steps", (1, 7))
def test_collectives_of_a_loop(steps):
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

  @jax.shard_map(
    mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
  )
  def function(x):
    def body(_, x):
      return x + jax.lax.pcast(jax.lax.psum(x, "x"), "x", to="varying")

    return jax.lax.fori_loop(0, steps, body, x)

  where = NamedSharding(mesh, PartitionSpec("x"))
  found = compiled(function, (4096,), shardings=where)
  kilobytes = 4096 // 4 * 4
  sent = steps * kilobytes * 2 * 3 // 4
  assert found.collectives == (Collective("all-reduce", 4, steps, sent),)


@pytest.mark.parametrize(
  "text, members",
  [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}, use", 4),
    ("replica_groups=[16,32]<=[512], use", 32),
    ("replica_groups=[4,2]<=[2,4]T(1,0), use", 2),
    ("replica_groups=mesh['a'=16,'b'=4] {'a'}, use", 16),
    ("replica_groups=mesh['a'=16,'b'=4] {'a','b'}, use", 64),
    ("replica_groups={}, use_global", 128),
    ("channel_id=3", 1),
  ],
)
def test_members_of_a_group(text, members):
  assert hlo._group(text, 128) == members


def test_both_branches_of_a_condition_move():
  def function(x, w):
    branches = (lambda x: jnp.tanh(x @ w), lambda x: x)
    return jax.lax.cond(jnp.sum(x) > 0, *branches, x)

  found = compiled(function, (256, 256), (256, 256))
  assert found.memory_bytes >= 3 * 256 * 256 * 4


def test_what_stays_on_the_chip_is_not_moved():
  near, far = "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", "bf16[8,128]{1,0:T(8,128)}"
  assert hlo._bytes(near, beside=True) == 0
  assert hlo._bytes(far, beside=True) == hlo._bytes(near) == 2048
  assert hlo._bytes(f"({near}, {far}, u32[]{{:S(2)}})", beside=True) == 2048
