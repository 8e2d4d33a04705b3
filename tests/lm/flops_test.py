"""The counted operations of a step, against XLA's count of its products."""

import pytest

from ddiloco.lm.program import build
from tests.lm.tiny import tiny_config

ROWS, LENGTH = 4, 256
MODEL = {
  "width": 256,
  "layers": 3,
  "heads": 4,
  "kv_heads": 2,
  "head_width": 64,
  "hidden": 1024,
}
EXPERTS = {"experts": 8, "hidden": 512}


def counts(model, data=None):
  """Ours, and XLA's of the same step before it is compiled."""
  config = tiny_config(
    "unread",
    learners={"count": 1, "batch_size": (ROWS,)},
    model={**MODEL, **model},
    data={"sequence_length": LENGTH, **(data or {})},
  )
  program = build(config, 0)
  flops = program.flops_per_sample()
  return ROWS * flops.all, program.lower().cost_analysis()["flops"]


@pytest.mark.parametrize(
  "model, data",
  [
    ({}, {}),
    ({"remat": True}, {}),
    ({"compute_dtype": "bfloat16"}, {}),
    (EXPERTS, {}),
    ({**EXPERTS, "shared_hidden": 512}, {}),
    ({**EXPERTS, "shared_hidden": 512, "remat": True}, {}),
    ({"image_size": 64}, {"source": "easy_vqa", "path": ""}),
  ],
  ids=str,
)
def test_operations_are_those_of_the_lowered_step(model, data):
  ours, theirs = counts(model, data)
  # XLA also counts what is no product: norms, softmax, the optimizer.
  assert ours < theirs < 1.03 * ours


def test_a_scan_is_why_we_count_ourselves():
  ours, theirs = counts({"scan_layers": True})
  assert theirs < 0.5 * ours
  assert ours == counts({})[0]
