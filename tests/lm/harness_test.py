"""lm-evaluation-harness on a local task: its scores are our own losses."""

import importlib.util
import json
import math
import os
import types

import pytest

from ddiloco.config import ConfigError
from ddiloco.lm.program import build
from ddiloco.lm.scoring import Scorer
from tests.lm.tiny import run, tiny_config, write_text

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: pip install 'ddiloco[lm_eval]'",
  ),
  # Of its dependencies, not of ours.
  pytest.mark.filterwarnings("ignore"),
]

CHOICES = [
  {"question": "Document", "choices": [" 1", " 2", " zebra"], "answer": 0},
  {"question": "words0 words1", "choices": [" w2", " xxx"], "answer": 1},
  {"question": "", "choices": ["Document", "tnemucoD"], "answer": 0},
  {"question": "a " * 30, "choices": ["b " * 30, "a " * 30], "answer": 1},
]
TEXT = ("w12 w7 w3 " * 100)[: 16 * 40]

CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_bytes}}]
"""
TEXT_TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/text.jsonl}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
GENERATE_TASK = """
task: local_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/generate.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{continuation}}}}"
generation_kwargs: {{until: ["{stop}"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(name="lm", scope="module")
def lm_fixture(tmp_path_factory):
  """The adapter, a program and its parameters after a few steps."""
  folder = tmp_path_factory.mktemp("lm_eval")
  os.environ["HF_HOME"] = str(folder / "hub")
  os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
  from ddiloco.lm import harness

  config = tiny_config(write_text(folder / "text"))
  program, state, _ = run(config, steps=20)
  return harness, program, program.params(state)


def write_rows(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_multiple_choice_is_decided_by_our_scores(lm, tmp_path):
  harness, program, params = lm
  write_rows(tmp_path / "choice.jsonl", CHOICES)
  (tmp_path / "a.yaml").write_text(CHOICE_TASK.format(folder=tmp_path))
  measure = harness.Measure(
    ["local_choice"], task_dir=str(tmp_path), limit=None
  )
  scorer = Scorer(program, params)
  right, right_bytes = [], []
  for row in CHOICES:
    context = [256, *row["question"].rstrip().encode()]
    spaces = " " * (len(row["question"]) - len(row["question"].rstrip()))
    nats = [
      scorer.continuations([(context, list((spaces + c).encode()))])[0].nats
      for c in row["choices"]
    ]
    right.append(nats.index(max(nats)) == row["answer"])
    mean = [n / len(c) for n, c in zip(nats, row["choices"], strict=True)]
    right_bytes.append(mean.index(max(mean)) == row["answer"])
  found = measure(program, params)
  assert found["local_choice/acc"] == pytest.approx(sum(right) / 4)
  assert found["local_choice/acc_bytes"] == pytest.approx(sum(right_bytes) / 4)
  some = harness.Measure(["local_choice"], task_dir=str(tmp_path), limit=1)
  assert some(program, params)["local_choice/acc"] == float(right[0])


def test_bits_per_byte_are_those_of_the_held_out_loss(lm, tmp_path):
  """The same text, once as a task and once as the held-out document."""
  harness, _, params = lm
  write_rows(tmp_path / "text.jsonl", [{"text": TEXT}])
  (tmp_path / "a.yaml").write_text(TEXT_TASK.format(folder=tmp_path))
  path = write_text(tmp_path / "text", documents=3)
  (tmp_path / "text" / "99.txt").write_text(TEXT)
  config = tiny_config(
    path, data={"heldout_documents": 1}, eval={"sequences": 100}
  )
  program = build(config, None)
  measure = harness.Measure(["local_text"], task_dir=str(tmp_path), limit=None)
  found = measure(program, params)["local_text/bits_per_byte"]
  assert found == pytest.approx(
    program.evaluate(params)["bits_per_byte"], rel=1e-5
  )
  assert found < 0.9 * math.log2(257)


def test_generation_is_greedy_and_cut_before_its_stop(lm, tmp_path):
  harness, program, params = lm
  scorer = Scorer(program, params)
  prompt = [256, *b"Document"]
  (text,) = scorer.generate([prompt], lambda i, t: len(t) >= 12)
  stop = text[-1]
  row = {"prompt": "Document", "continuation": text[: text.index(stop)]}
  write_rows(tmp_path / "generate.jsonl", [row])
  task = GENERATE_TASK.format(folder=tmp_path, stop=stop)
  (tmp_path / "a.yaml").write_text(task)
  measure = harness.Measure(
    ["local_generate"], task_dir=str(tmp_path), limit=None
  )
  assert measure(program, params)["local_generate/exact_match"] == 1.0
  model = harness.Model(program, params)
  options = {"until": [], "max_gen_toks": 7}
  request = types.SimpleNamespace(args=("Document", options))
  assert model.generate_until([request]) == [text[:7]]
  options["do_sample"] = True
  with pytest.raises(ConfigError, match="only greedy"):
    model.generate_until([request])


@pytest.mark.slow  # reads all the tasks that the harness has
def test_unknown_tasks_are_refused_with_the_nearest(lm, tmp_path):
  harness, _, _ = lm
  with pytest.raises(ConfigError, match="'arc_esy'.*arc_easy"):
    harness.Measure(["piqa", "arc_esy"], task_dir=None, limit=None)
  with pytest.raises(ConfigError, match="not a directory"):
    harness.Measure(["piqa"], task_dir=str(tmp_path / "no"), limit=None)
  with pytest.raises(ConfigError, match="needs a program with logits"):
    harness.Model(object(), {})
