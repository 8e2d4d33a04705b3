"""What is asked of the codec group."""

from ddiloco.config.schema import CodecConfig, Config, require

NAMES = ("f32", "bf16", "int8", "int4", "e3m0", "int2", "sign1", "topk")
NONE = "none"
_SCALED = ("int8", "int4", "e3m0", "int2", "sign1")
# Options that only some codecs have. An option is refused where neither
# direction uses it.
USERS = {
  "scale": (*_SCALED, "topk"),
  "rounding": ("bf16", "int8", "int4", "e3m0", "int2"),
  "topk_fraction": ("topk",),
}


def uses(codec: str, option: str) -> bool:
  """Whether a codec has that option."""
  return codec in USERS[option]


def blocked(codec: str) -> bool:
  """Whether a codec cuts tensors into blocks."""
  return codec in (*_SCALED, "topk")


def check_codecs(config: Config) -> None:
  """Raises `ConfigError` for options that cannot work or mean nothing."""
  codec, default = config.codec, CodecConfig()
  require(
    codec.block_size >= 8 and codec.block_size & (codec.block_size - 1) == 0,
    "codec.block_size",
    codec.block_size,
    "it must be a power of two, at least 8",
    "64 is usual; 4096 for topk.",
  )
  require(
    0 < codec.topk_fraction <= 1,
    "codec.topk_fraction",
    codec.topk_fraction,
    "it must be above 0 and at most 1",
    "It is the share of every block's values that is kept.",
  )
  for option, users in USERS.items():
    value = getattr(codec, option)
    require(
      value == getattr(default, option)
      or bool({codec.up, codec.down} & {*users}),
      f"codec.{option}",
      value,
      f"codec.up = {codec.up!r} and codec.down = {codec.down!r} do not use it",
      f"Leave it out, or choose one of {', '.join(users)}.",
    )
  for option in ("down_error_feedback", "down_full_every"):
    value = getattr(codec, option)
    require(
      codec.down != NONE or value == getattr(default, option),
      f"codec.{option}",
      value,
      "codec.down = 'none': every version is published in full",
      "Leave it out, or choose a codec for the way down.",
    )
