"""Options of codecs: what cannot work or means nothing is refused."""

import pytest

from ddiloco import config as config_lib
from ddiloco.algo import codecs as algo
from ddiloco.config import codecs
from ddiloco.protocol.rules import codec_name


def make(**codec):
  return config_lib.from_dict({"codec": codec, "stop": {"rounds": 1}})


@pytest.mark.parametrize("name", codecs.NAMES)
def test_every_codec_goes_both_ways_with_the_options_it_has(name):
  options = {
    option: value
    for option, value in {
      "scale": "f32",
      "rounding": "stochastic",
      "topk_fraction": 0.5,
    }.items()
    if codecs.uses(name, option)
  }
  make(up=name, **options)
  make(up="f32", down=name, down_full_every=3, **options)
  # The arrays accept what the config does.
  algo.make_codec(name, **options)


def test_the_config_and_the_arrays_know_the_same_codecs():
  assert codecs.NAMES == algo.NAMES


@pytest.mark.parametrize(
  "codec, words",
  [
    ({"up": "int5"}, "codec.up = 'int5'.* f32, bf16, int8"),
    ({"down": "half"}, "codec.down = 'half'.* none, f32"),
    ({"up": "topk", "topk_fraction": 2.0}, "topk_fraction = 2.0.* at most 1"),
    ({"up": "topk", "topk_fraction": 0.0}, "topk_fraction = 0.0.* above 0"),
    ({"topk_fraction": 0.1}, "topk_fraction = 0.1.*'int4'.*one of topk"),
    ({"up": "bf16", "scale": "f32"}, "scale = 'f32'.*'bf16' .*one of int8"),
    ({"up": "f32", "rounding": "stochastic"}, "rounding = 'stochastic'.*'f32'"),
    ({"up": "sign1", "rounding": "stochastic"}, "'sign1' .*one of bf16"),
    ({"up": "topk", "rounding": "stochastic"}, "'topk' .*one of bf16"),
    ({"rounding": "up"}, "rounding = 'up'.*nearest, stochastic"),
    ({"block_size": 100}, "block_size = 100.*power of two"),
    ({"down_full_every": 3}, "down_full_every = 3.*'none'"),
    ({"down_error_feedback": False}, "down_error_feedback = False.*'none'"),
    ({"down": "int4", "down_full_every": 0}, "down_full_every = 0.*least 1"),
  ],
)
def test_meaningless_options_are_refused(codec, words):
  with pytest.raises(config_lib.ConfigError, match=words):
    make(**codec)


@pytest.mark.parametrize(
  "codec, name",
  [
    ({"up": "f32"}, "f32"),
    ({"up": "int4"}, "int4/64"),
    ({"up": "int4", "rounding": "stochastic"}, "int4/64"),
    ({"up": "sign1", "block_size": 128, "scale": "f32"}, "sign1/128/f32"),
    ({"up": "topk", "topk_fraction": 0.25}, "topk/64/0.25"),
    ({"up": "int4", "down": "topk", "topk_fraction": 0.25}, "int4/64"),
  ],
)
def test_answers_name_what_decoding_them_depends_on(codec, name):
  assert codec_name(make(**codec)) == name
