"""What of a model's configuration cannot work, or would mean nothing."""

from ddiloco.config.schema import (
  Config,
  ModelConfig,
  island_mesh,
  require,
)

_OF_EXPERTS = (
  "experts_per_token",
  "capacity_factor",
  "shared_hidden",
  "balance_loss",
  "router_z_loss",
)


def check_model(config: Config) -> None:
  """Raises `ConfigError` for the first such thing."""
  _check_heads(config.model)
  if config.model.experts:
    _check_experts(config.model)
  else:
    _check_dense(config)
  _check_images(config)


def _check_heads(model: ModelConfig) -> None:
  require(
    model.heads % model.kv_heads == 0,
    "model.heads",
    model.heads,
    f"model.kv_heads = {model.kv_heads} does not divide it",
    "Every key-value head serves the same number of query heads.",
  )
  require(
    model.head_width % 2 == 0,
    "model.head_width",
    model.head_width,
    "rotary embeddings turn pairs",
    "Use an even width.",
  )


def _check_experts(model: ModelConfig) -> None:
  require(
    2 <= model.experts,
    "model.experts",
    model.experts,
    "one expert leaves a router nothing to choose",
    "Use at least 2, or 0 for a dense model.",
  )
  require(
    model.experts_per_token <= model.experts,
    "model.experts_per_token",
    model.experts_per_token,
    f"there are model.experts = {model.experts}",
    "Lower it.",
  )
  require(
    model.capacity_factor > 0,
    "model.capacity_factor",
    model.capacity_factor,
    "it must be positive",
    "1.25 is usual; model.experts / model.experts_per_token = "
    f"{model.experts / model.experts_per_token:g} never drops a token.",
  )


def _check_dense(config: Config) -> None:
  model, default = config.model, ModelConfig()
  for key in _OF_EXPERTS:
    value = getattr(model, key)
    require(
      value == getattr(default, key),
      f"model.{key}",
      value,
      "model.experts = 0: there is no router",
      "Set model.experts, or leave the key at its default.",
    )
  for learner in range(config.learners.count):
    mesh = island_mesh(config, learner)
    require(
      len(mesh) == 3 or mesh[3] == 1,
      "learners.mesh",
      mesh,
      "model.experts = 0: there are no experts to spread over its fourth axis",
      "Use its data or fsdp axis.",
    )


def _check_images(config: Config) -> None:
  model, source = config.model, config.data.source
  require(
    (model.image_size > 0) == (source == "easy_vqa"),
    "model.image_size",
    model.image_size,
    f"data.source = {source!r} has "
    + ("images" if source == "easy_vqa" else "none"),
    "easy_vqa's images have 64 pixels a side; 0 is a model of text.",
  )
  require(
    model.image_size > 0 or model.patch_size == ModelConfig().patch_size,
    "model.patch_size",
    model.patch_size,
    "model.image_size = 0: there are no patches",
    "Leave it at its default.",
  )
  require(
    model.image_size % model.patch_size == 0,
    "model.patch_size",
    model.patch_size,
    f"model.image_size = {model.image_size} is no multiple of it",
    "Patches cover an image exactly.",
  )
