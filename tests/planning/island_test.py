"""An island's step on a slice: compiled for emulated devices, and for TPUs."""

import jax
import pytest

from ddiloco import config as config_lib
from ddiloco.config import ConfigError
from ddiloco.planning import aot, hlo, island, island_text, tpus
from ddiloco.planning.aot import DoesNotFit
from tests.lm.tiny import tiny_config

SLICE = tpus.parse_slice("v5e:2x2")
needs_libtpu = pytest.mark.skipif(
  not aot.available(), reason=f"no libtpu: {aot.INSTALL}"
)


def small(*, learners=None, **groups):
  islands = {
    "count": 2,
    "devices": (4,),
    "batch_size": (8,),
    "mesh": (1, -1, 2),
  }
  return tiny_config(
    "unread",
    **{
      "learners": islands | (learners or {}),
      "sync": {"num_fragments": 4, "interval_steps": 4},
      "data": {"sequence_length": 64},
      "model": {"layers": 1, "remat": True},
      **groups,
    },
  )


@pytest.fixture(name="emulated")
def emulated_fixture(monkeypatch):
  """Slices are this machine's devices, with as much memory as is asked for.

  What a program accesses stands for what it needs: CPUs tell of no peak.
  """
  monkeypatch.setattr(aot, "devices", lambda of: jax.devices()[: of.chips])
  real, limit = aot.compile_lowered, [float("inf")]

  def compile_lowered(lowered, *, quickly=False):
    needed = int(lowered.cost_analysis()["bytes accessed"])
    if needed > limit[0]:
      raise DoesNotFit(needed, limit[0])
    if quickly and limit[0] < float("inf"):  # a search
      return aot.Compiled(0, needed, needed, 0, hlo.Traffic(0, ()))
    return real(lowered)._replace(peak_bytes=needed)

  monkeypatch.setattr(aot, "compile_lowered", compile_lowered)
  return limit


def test_a_step_is_described(emulated):
  config = small()
  made = island.study(config, SLICE, search=False)
  assert (made["chips"], made["mesh"]) == (4, (1, 2, 2))
  assert made["tokens_per_step"] == 8 * 64
  memory, moved = made["memory"], made["moved"]
  assert memory["fits"] and memory["arguments_bytes"] > made["state_bytes"]
  # All shards together have parameters and both moments, in f32.
  assert made["state_bytes"] * 4 >= 3 * 4 * made["parameters"]
  assert made["state_bytes"] * 4 < 1.2 * 3 * 4 * made["parameters"]
  assert moved["sent_bytes"] > 0 and moved["memory_bytes"] > 0
  flops = made["flops"]
  assert 0 < flops["recomputed"] < flops["model"] / 3
  least = made["roofline"]
  assert least["step_s"] == least[f"{least['bound']}_s"] > 0
  works = [(row["work"], row["stands_for"]) for row in made["exchange"]["rows"]]
  assert works == [("encode", 1), ("apply", 1), ("encode", 3), ("apply", 3)]
  assert 0 < made["exchange"]["share_of_step"] < 1
  assert "fits: " in island_text.text(made)


def test_twice_the_batch_computes_and_keeps_more(emulated):
  once, twice = (
    island.study(island.on_slice(small(), SLICE, b), SLICE, search=False)
    for b in (8, 16)
  )
  assert twice["flops"]["model"] == 2 * once["flops"]["model"]
  assert twice["memory"]["peak_bytes"] > once["memory"]["peak_bytes"]
  for key in ("state_bytes", "parameters"):
    assert twice[key] == once[key]


def test_the_largest_batch_is_compiled(emulated):
  said = []
  once = island.study(small(), SLICE, search=False)
  emulated[0] = 3.3 * once["memory"]["peak_bytes"]
  made = island.study(small(), SLICE, say=said.append)
  found = made["largest_batch"]
  assert found["batch"] % 2 == 0 and found["batch"] > 8
  assert found["refused"] - found["batch"] <= max(2, 0.02 * found["batch"])
  assert f"a batch of {found['batch']} fits" in said
  assert f"a batch of {found['refused']} does not fit" in said


def test_what_does_not_fit_says_by_how_much_and_what_would(emulated):
  config = small(learners={"batch_size": (64,), "mesh": (2, -1, 1)})
  whole = island.study(config, SLICE, search=False)
  emulated[0] = 0.6 * whole["memory"]["peak_bytes"]
  made = island.study(config, SLICE)
  assert not made["memory"]["fits"] and "roofline" not in made
  made["remedies"] = island_text.remedies(made, config)
  batch = made["largest_batch"]["batch"]
  assert 0 < batch < 64
  text = island_text.text(made)
  for words in (
    "DOES NOT FIT: the step needs",
    "more than the",
    f"--config.learners.batch_size='({batch},)' fits",
    "--config.learners.mesh='(1, 4, 1)'",
  ):
    assert words in text
  again = island.on_slice(config, SLICE, batch)
  assert island.study(again, SLICE, search=False)["memory"]["fits"]


def test_nothing_fits(emulated):
  emulated[0] = 1000
  config = small(model={"layers": 1, "remat": False})
  made = island.study(config, SLICE)
  assert made["largest_batch"] == {"batch": 0, "refused": 2, "unit": 2}
  remedies = " ".join(island_text.remedies(made, config))
  assert "model.remat=True" in remedies and "a larger slice" in remedies


def test_an_exchange_that_does_not_fit(emulated, monkeypatch):
  made = island.study(small(), SLICE, search=False)
  step = made["memory"]["peak_bytes"]
  monkeypatch.setattr(island, "_work", _refuse)
  found = island.study(small(), SLICE, search=False)
  assert found["memory"]["what"] == "the exchange's work" and step
  assert "the exchange's work needs" in island_text.text(
    found | {"remedies": []}
  )


def _refuse(of, lowered):
  raise DoesNotFit(2**34, 2**33)


def test_a_mesh_that_does_not_fit_the_slice():
  config = small(
    learners={"devices": (3,), "mesh": (1, 3, 1), "batch_size": (9,)}
  )
  with pytest.raises(ConfigError, match="does not fit learner 0's 4 devices"):
    island.on_slice(config, SLICE)


def test_a_program_of_ones_own_needs_more(emulated):
  values = small().to_dict() | {"program": "experiments.byo_jax.model:build"}
  with pytest.raises(ConfigError, match="the argument devices"):
    island.study(config_lib.from_dict(values), SLICE)


def test_without_the_compiler(monkeypatch):
  monkeypatch.setattr(aot, "available", lambda: False)
  with pytest.raises(ConfigError, match=r"pip install '\.\[tpu\]'"):
    aot.devices(SLICE)


@pytest.mark.parametrize(
  "message, sizes",
  [
    (
      "HLO temporaries (41.09G) exceeds available HBM (31.25G).",
      (41.09, 31.25),
    ),
    ("Used 1.5T of 95.74G hbm. Exceeded hbm capacity by 1.4T", (1536, 95.74)),
    ("no numbers", None),
  ],
)
def test_what_the_compiler_says_of_memory(message, sizes):
  found = aot._sizes(message)
  expected = sizes and tuple(int(x * tpus.GIB) for x in sizes)
  assert found == (expected or (None, None))


@needs_libtpu
@pytest.mark.parametrize("name", ("v5e:2x4", "v5p:2x2x2", "v6e:2x4"))
def test_for_a_real_slice(name):
  made = island.study(small(), tpus.parse_slice(name), search=False)
  assert made["memory"]["fits"] and made["memory"]["code_bytes"] > 0
  kinds = {item["kind"] for item in made["moved"]["collectives"]}
  assert kinds & {"all-gather", "all-reduce", "reduce-scatter"}
  assert 0 < made["exchange"]["share_of_step"] < 1


@needs_libtpu
def test_what_no_chip_has_room_for():
  config = small(
    data={"sequence_length": 8192}, learners={"batch_size": (1 << 14,)}
  )
  with pytest.raises(DoesNotFit) as error:
    program = island._program(
      island.on_slice(config, SLICE), aot.devices(SLICE)
    )
    aot.compile_lowered(program.lower(), quickly=True)
  assert error.value.needed_bytes > error.value.usable_bytes
  assert 15 * tpus.GIB < error.value.usable_bytes < 16 * tpus.GIB
