"""The quickstart's config is valid, complete and open to overrides."""

from ddiloco.config import Config, from_dict
from experiments.quickstart.config import get_config


def test_the_config_is_valid_and_complete():
  config = get_config()
  built = from_dict(config.to_dict())
  assert built.to_dict().keys() == Config().to_dict().keys()
  assert built.inner.decay == built.stop.tokens > 0
  assert built.learners.count == 3


def test_keys_take_overrides_of_their_types():
  config = get_config().lock()
  config.learners.devices = (2, 1)
  config.stop.tokens = 1000
  config.sync.wait = "exact"
  built = from_dict(config.to_dict())
  assert built.learners.devices == (2, 1)
  assert built.sync.wait == "exact"
