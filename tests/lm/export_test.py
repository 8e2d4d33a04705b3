"""Exports and what starts from them: the same bits, or a clear refusal."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ddiloco.config import ConfigError, InitConfig
from ddiloco.lm import export, weights
from ddiloco.lm.corpus import load_corpus
from ddiloco.lm.program import build
from tests.configs import override
from tests.launch.commands import contents
from tests.lm.tiny import flat, tiny_config, write_text

MODEL = tiny_config("unused").model
D, N, K, H, F = 32, 4, 2, 8, 64  # of tiny_config


@pytest.fixture(name="trained", scope="module")
def trained_fixture(tmp_path_factory):
  """A config, its program, and parameters unlike its initial ones."""
  config = tiny_config(write_text(tmp_path_factory.mktemp("export") / "text"))
  program = build(config, None)
  generator = np.random.default_rng(0)

  def trained(x):
    return np.asarray(x) + generator.normal(0, 0.05, x.shape).astype("f4")

  params = jax.tree.map(trained, program.params(program.init()))
  return config, program, params


def write(path, trained, format="safetensors", **facts):
  config, program, params = trained
  export.write(
    path,
    params,
    format=format,
    config=config,
    tokenizer=program.tokenizer,
    facts=facts,
  )
  return str(path)


def starting_from(config, path, **groups):
  values = {**config.to_dict(), "init": {"path": str(path)}}
  return weights.pinned(override(values, groups))


def assert_same(params, expected):
  a, b = flat(params), flat(expected)
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].dtype == np.float32
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(
  "format, mesh", [("orbax", (1, 1, 1)), ("safetensors", (2, 2, 2))]
)
def test_a_run_starts_from_the_exported_bits(tmp_path, trained, format, mesh):
  config, _, params = trained
  path = write(tmp_path / "x", trained, format, round=7)
  config = starting_from(
    config, path, learners={"devices": (int(np.prod(mesh)),), "mesh": mesh}
  )
  for learner in (None, 0, 1):
    program = build(config, learner)
    assert_same(program.params(program.init()), params)
  build(config, None).check()
  about = json.loads((tmp_path / "x" / "export.json").read_text())
  assert about["round"] == 7 and about["model"]["width"] == D
  assert about["tensors"]["blocks/1/mlp/down"] == [F, D]


def test_experts_travel_too(tmp_path, trained):
  config = override(trained[0].to_dict(), {"model": {"experts": 4}})
  program = build(config, None)
  params = program.params(program.init())
  path = write(tmp_path / "x", (config, program, params), "orbax")
  started = build(
    starting_from(dataclasses.replace(config, seed=9), path), None
  )
  assert_same(started.params(started.init()), params)
  refused(
    starting_from(config, path, model={"experts_per_token": 1}),
    "model.experts_per_token = 1",
  )


def test_initial_optimizer_state_is_that_of_any_run(tmp_path, trained):
  config, _, _ = trained
  started = build(starting_from(config, write(tmp_path / "x", trained)), 0)
  fresh = build(config, 0).init()
  assert_same(
    [x for x in jax.tree.leaves(started.init().inner) if x.dtype == "f4"],
    [x for x in jax.tree.leaves(fresh.inner) if x.dtype == "f4"],
  )


def test_half_precision_is_read_exactly(tmp_path, trained):
  config, _, params = trained
  half = {n: x.astype(ml_dtypes.bfloat16) for n, x in flat(params).items()}
  save_file(half, tmp_path / "half.safetensors")
  program = build(starting_from(config, tmp_path / "half.safetensors"), None)
  expected = {n: x.astype(np.float32) for n, x in half.items()}
  assert flat(program.init().params).keys() == expected.keys()
  for name, value in flat(program.init().params).items():
    np.testing.assert_array_equal(value, expected[name])


# --- Gemma's names ------------------------------------------------------------


def gemma_tensors(params, mlp_norm="post_attention_layernorm"):
  """The parameters in Gemma's layout: matrices [out, in], heads in rows."""
  found = {
    "model.embed_tokens.weight": params["embedding"],
    "model.norm.weight": params["final_norm/scale"],
  }
  for layer in range(MODEL.layers):
    ours, theirs = f"blocks/{layer}/", f"model.layers.{layer}."
    for name, heads in (("query", N), ("key", K), ("value", K)):
      rows = [params[f"{ours}attention/{name}"][:, i].T for i in range(heads)]
      found[f"{theirs}self_attn.{name[0]}_proj.weight"] = np.concatenate(rows)
    out = [params[f"{ours}attention/out"][i].T for i in range(N)]
    found[f"{theirs}self_attn.o_proj.weight"] = np.concatenate(out, 1)
    for name in ("gate", "up", "down"):
      found[f"{theirs}mlp.{name}_proj.weight"] = params[f"{ours}mlp/{name}"].T
    for name, where in (
      ("input_layernorm", "attention_norm"),
      (mlp_norm, "mlp_norm"),
      ("self_attn.q_norm", "attention/query_norm"),
      ("self_attn.k_norm", "attention/key_norm"),
    ):
      found[f"{theirs}{name}.weight"] = params[f"{ours}{where}/scale"]
  return {n: np.ascontiguousarray(x) for n, x in found.items()}


def gemma_logits(tensors, tokens):
  """The model as it is published, from its own layout, in f64."""
  w = {n: x.astype(np.float64) for n, x in tensors.items()}

  def norm(x, name):
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x / rms * (1.0 + w[f"{name}.weight"])

  def turn(x):  # [L, heads, H]
    angle = np.outer(np.arange(len(x)), 1e4 ** (-np.arange(0, H, 2) / H))
    angle = np.concatenate([angle, angle], -1)[:, None]
    half = np.concatenate([-x[..., H // 2 :], x[..., : H // 2]], -1)
    return x * np.cos(angle) + half * np.sin(angle)

  x = w["model.embed_tokens.weight"][tokens] * np.sqrt(D)
  for layer in range(MODEL.layers):
    at = f"model.layers.{layer}"
    y = norm(x, f"{at}.input_layernorm")
    q, k, v = (
      (y @ w[f"{at}.self_attn.{p}_proj.weight"].T).reshape(len(y), -1, H)
      for p in "qkv"
    )
    q = turn(norm(q, f"{at}.self_attn.q_norm"))
    k = turn(norm(k, f"{at}.self_attn.k_norm"))
    k, v = np.repeat(k, N // K, 1), np.repeat(v, N // K, 1)
    scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(H)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    mixed = np.einsum("nqk,knh->qnh", scores, v).reshape(len(y), -1)
    x = x + mixed @ w[f"{at}.self_attn.o_proj.weight"].T
    y = norm(x, f"{at}.post_attention_layernorm")
    gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
    cubic = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    gate = 0.5 * gate * (1 + np.tanh(cubic))
    y = gate * (y @ w[f"{at}.mlp.up_proj.weight"].T)
    x = x + y @ w[f"{at}.mlp.down_proj.weight"].T
  return norm(x, "model.norm") @ w["model.embed_tokens.weight"].T


@pytest.fixture(name="gemma", scope="module")
def gemma_fixture(trained):
  """Tensors in Gemma's layout; norms that matter, unlike fresh ones."""
  generator = np.random.default_rng(0)
  params = {
    name: x + generator.normal(0, 0.3, x.shape).astype("f4")
    if "scale" in name
    else x
    for name, x in flat(trained[2]).items()
  }
  return gemma_tensors(params)


def test_a_gemma_shaped_checkpoint_computes_what_gemma_does(
  tmp_path, trained, gemma
):
  save_file(gemma, tmp_path / "model.safetensors")
  config = starting_from(trained[0], tmp_path)
  program = build(config, None)
  tokens = np.random.default_rng(1).integers(0, 257, 24).astype(np.int32)
  logits = program.logits(program.init().params, tokens[None])[0]
  expected = gemma_logits(gemma, tokens)
  np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
  assert np.abs(expected).max() > 1


def test_files_may_be_many_and_norms_named_as_in_later_releases(
  tmp_path, trained, gemma
):
  later = {
    name.replace("post_attention", "pre_feedforward"): x
    for name, x in gemma.items()
  }
  names = sorted(later)
  for i in range(2):
    part = {name: later[name] for name in names[i::2]}
    save_file(part, tmp_path / f"model-{i}-of-2.safetensors")
  save_file(gemma, tmp_path / "one")
  one = build(starting_from(trained[0], tmp_path / "one"), None)
  many = build(starting_from(trained[0], tmp_path), None)
  assert_same(many.init().params, one.init().params)


def test_layers_may_be_stacked(tmp_path, trained, gemma):
  save_file(gemma, tmp_path / "model.safetensors")
  programs = [
    build(
      starting_from(trained[0], tmp_path, model={"scan_layers": stacked}), None
    )
    for stacked in (False, True)
  ]
  tokens = np.arange(20, dtype=np.int32)[None]
  one, other = (
    np.asarray(program.logits(program.init().params, tokens))
    for program in programs
  )
  np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# --- Refusals -----------------------------------------------------------------


def refused(config, *words):
  with pytest.raises(ConfigError) as error:
    build(config, None).init()
  for word in words:
    assert word in str(error.value), str(error.value)


def test_tensors_that_do_not_fit_are_named_with_both_shapes(
  tmp_path, trained, gemma
):
  odd = dict(gemma)
  del odd["model.layers.1.self_attn.k_norm.weight"]
  odd["lm_head.weight"] = odd["model.embed_tokens.weight"]
  odd["model.embed_tokens.weight"] = np.zeros((300, D), np.float32)
  odd["model.layers.0.mlp.up_proj.weight"] = np.zeros((D, F), np.float32)
  save_file(odd, tmp_path / "model.safetensors")
  refused(
    starting_from(trained[0], tmp_path),
    "1 missing: model.layers.1.self_attn.k_norm.weight;",
    "1 not part of the model: lm_head.weight;",
    "2 of another shape: model.layers.0.mlp.up_proj.weight is (32, 64), must "
    "be (64, 32), model.embed_tokens.weight is (300, 32), must be (288, 32).",
  )


@pytest.mark.parametrize("layers", [1, 3])
def test_stacked_layers_must_be_as_many(tmp_path, trained, gemma, layers):
  save_file(gemma, tmp_path / "model.safetensors")  # of two
  model = {"scan_layers": True, "layers": layers}
  what = "missing: model.layers.2." if layers == 3 else "not part of the model"
  refused(starting_from(trained[0], tmp_path, model=model), f"11 {what}")


def test_a_checkpoint_without_any_layer_is_refused(tmp_path, trained, gemma):
  few = {k: v for k, v in gemma.items() if ".layers." not in k}
  save_file(few, tmp_path / "model.safetensors")
  model = {"scan_layers": True}
  refused(starting_from(trained[0], tmp_path, model=model), "22 missing")


def test_only_the_first_of_many_tensors_are_named(tmp_path, trained):
  path = write(tmp_path / "x", trained)
  refused(
    starting_from(trained[0], path, model={"layers": 6}),
    "44 missing: blocks/2/attention/key",
    ", ...",
  )
  refused(
    starting_from(trained[0], path, model={"hidden": 48}),
    "6 of another shape: blocks/0/mlp/down is (64, 32), must be (48, 32)",
  )


@pytest.mark.parametrize(
  "key, value", [("logit_soft_cap", 30.0), ("local_window", 8)]
)
def test_what_shapes_do_not_tell_is_compared(tmp_path, trained, key, value):
  path = write(tmp_path / "x", trained)
  refused(
    starting_from(trained[0], path, model={key: value}),
    f"model.{key} = {value}",
    "is an export of a model with 0",
  )
  free = starting_from(trained[0], path, model={"compute_dtype": "bfloat16"})
  assert_same(build(free, None).init().params, trained[2])


@pytest.mark.parametrize("format", weights.FORMATS)
def test_changed_bytes_are_refused(tmp_path, trained, format):
  path = tmp_path / "x"
  write(path, trained, format)
  config = starting_from(trained[0], path)
  other = jax.tree.map(lambda x: x + 1, trained[2])
  shutil.rmtree(path)
  write(path, (*trained[:2], other), format)
  refused(config, "has changed", config.init.sha256[:12], "Restore it")
  assert starting_from(trained[0], path).init.sha256 != config.init.sha256
  # Nor may a resumed run be given them, though the path may be another.
  values = config.to_dict()["init"]
  assert values["path"] == str(path) and len(values["sha256"]) == 64


def test_the_digest_is_of_names_and_contents(tmp_path):
  for name, content in (("a", b"12"), ("b", b"3")):
    (tmp_path / f"{name}.safetensors").write_bytes(content)
  first = weights.digest(tmp_path)
  (tmp_path / "README.md").write_text("no tensors")
  assert weights.digest(tmp_path) == first
  (tmp_path / "a.safetensors").write_bytes(b"1")
  (tmp_path / "b.safetensors").write_bytes(b"23")
  assert weights.digest(tmp_path) != first


def test_pinning_leaves_other_configs_alone(tmp_path, trained):
  assert weights.pinned(trained[0]) is trained[0]
  config = starting_from(trained[0], write(tmp_path / "x", trained))
  assert weights.pinned(config) is config


def test_another_tokenizer_is_refused(tmp_path, trained):
  path = write_text(tmp_path / "text")
  data = {"tokenizer": "bpe", "vocab_size": 280, "path": path}
  config = tiny_config(path, data=data)
  program = build(config, None)
  params = program.params(program.init())
  write(tmp_path / "x", (config, program, params))
  assert (tmp_path / "x" / "tokenizer.json").exists()
  build(starting_from(config, tmp_path / "x"), None).check()
  (tmp_path / "text" / "00.txt").write_text("another text entirely " * 40)
  load_corpus.cache_clear()
  with pytest.raises(ConfigError, match="another tokenizer: its sha256"):
    build(starting_from(config, tmp_path / "x"), None).check()


@pytest.mark.parametrize("format", weights.FORMATS)
def test_a_flipped_bit_is_told_with_its_tensor(tmp_path, trained, format):
  """It is in the files before anybody pins them."""
  write(tmp_path / "x", trained, format)
  files = [p for p in (tmp_path / "x").rglob("*") if p.is_file()]
  file = max(files, key=lambda path: path.stat().st_size)
  told = 0
  for offset in range(2000, file.stat().st_size, 50_000):
    garbled = bytearray(file.read_bytes())
    garbled[offset] ^= 0x10
    file.write_bytes(garbled)
    try:
      refused(starting_from(trained[0], tmp_path / "x"), "x")
      told += 1
    finally:
      garbled[offset] ^= 0x10
      file.write_bytes(garbled)
  assert told > 0
  assert_same(
    build(starting_from(trained[0], tmp_path / "x"), None).init().params,
    trained[2],
  )


def test_numbers_that_are_not_finite_are_refused(tmp_path, trained, gemma):
  norm = "model.layers.1.input_layernorm.weight"
  odd = gemma | {norm: np.full_like(gemma[norm], np.nan)}
  save_file(odd, tmp_path / "model.safetensors")
  refused(starting_from(trained[0], tmp_path), norm, "not finite")


def test_the_tensors_of_an_export_stand_for_all_of_it(tmp_path, trained):
  write(tmp_path / "x", trained)
  tensors = tmp_path / "x" / weights.SAFETENSORS
  refused(
    starting_from(trained[0], tensors, model={"local_window": 3}),
    "model.local_window = 3",
  )


@pytest.mark.parametrize(
  "about, words",
  [
    ([], "no JSON object"),
    ({"model": []}, "'model' is no"),
    ({"tokenizer": [1]}, "'tokenizer' is no"),
  ],
)
def test_what_an_export_says_of_itself_is_checked(
  tmp_path, trained, about, words
):
  write(tmp_path / "x", trained)
  (tmp_path / "x" / weights.ABOUT).write_text(json.dumps(about))
  refused(
    starting_from(trained[0], tmp_path / "x"), "export.json is damaged", words
  )


def test_unreadable_checkpoints_are_refused(tmp_path, trained):
  config = trained[0]
  init = InitConfig(path=str(tmp_path / "nowhere"))
  with pytest.raises(ConfigError, match="nowhere.*does not exist"):
    weights.pinned(dataclasses.replace(config, init=init))
  (tmp_path / "empty").mkdir()
  with pytest.raises(ConfigError, match="holds neither"):
    starting_from(config, tmp_path / "empty")
  (tmp_path / "x.safetensors").write_bytes(b"no such format" * 10)
  refused(
    starting_from(config, tmp_path / "x.safetensors"),
    "x.safetensors cannot be read",
  )
  (tmp_path / "x.safetensors").unlink()
  save_file({"a": np.zeros(3, np.int8)}, tmp_path / "x.safetensors")
  refused(starting_from(config, tmp_path), "a in", "dtype I8", "F32, BF16")
  save_file({"a": np.zeros(3, "f4")}, tmp_path / "x.safetensors")
  save_file({"a": np.zeros(3, "f4")}, tmp_path / "y.safetensors")
  refused(starting_from(config, tmp_path), "a is in", "x.safetensors and in")


def test_a_broken_orbax_export_is_refused(tmp_path, trained):
  write(tmp_path / "x", trained, "orbax")
  for file in (tmp_path / "x" / "params").rglob("*"):
    if file.is_file():
      file.write_bytes(b"")
  refused(starting_from(trained[0], tmp_path / "x"), "cannot be read")


@pytest.mark.parametrize("format", weights.FORMATS)
def test_nothing_is_overwritten_or_left_behind(tmp_path, trained, format):
  (tmp_path / "x").mkdir()
  write(tmp_path / "x", trained, format)  # an empty directory may be used
  before = contents(tmp_path)
  with pytest.raises(ConfigError, match="exists already"):
    write(tmp_path / "x", trained, format)
  assert contents(tmp_path) == before
  assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_one_that_is_stopped_leaves_nothing(tmp_path, trained, monkeypatch):
  def stopped(path, params):
    path.mkdir()
    (path / "half").write_text("written")
    raise SystemExit(1)

  monkeypatch.setattr(export, "_write_orbax", stopped)
  with pytest.raises(SystemExit):
    write(tmp_path / "x", trained, "orbax")
  assert list(tmp_path.iterdir()) == []


def test_an_export_below_a_file_is_refused(tmp_path, trained):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ConfigError, match="--output=.*cannot be written"):
    write(tmp_path / "file" / "x", trained)
  with pytest.raises(ConfigError, match="--output=.*Not a directory"):
    write(tmp_path / "file" / "deep" / "x", trained)


def test_safetensors_are_readable_by_others(tmp_path, trained):
  write(tmp_path / "x", trained)
  file = tmp_path / "x" / "params.safetensors"
  assert file.stat().st_mode == (tmp_path / "x/export.json").stat().st_mode
  found = load_file(file)
  expected = flat(trained[2])
  assert found.keys() == expected.keys()
  for name in found:
    np.testing.assert_array_equal(found[name], expected[name])
