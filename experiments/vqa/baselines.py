"""What the held-out questions are worth to somebody who sees no image.

  python -m experiments.vqa.baselines

prints the accuracy of the commonest answer of all, and of the commonest answer
to the very same question, both counted on the training questions.
"""

import collections
import pathlib

from ddiloco.config import from_dict
from ddiloco.lm import vqa
from experiments.vqa.config import get_config


def accuracies(folder: pathlib.Path) -> dict[str, float]:
  """The accuracy of each baseline."""
  train, heldout = (
    vqa.read_questions(folder / split / "questions.json")
    for split in ("train", "test")
  )
  answers = collections.Counter(entry.answer for entry in train)
  by_question = collections.defaultdict(collections.Counter)
  for entry in train:
    by_question[entry.question][entry.answer] += 1

  def first(counted: collections.Counter) -> str:
    # Of equals the first in the alphabet, whatever the order of the file.
    return min(counted, key=lambda answer: (-counted[answer], answer))

  def share(answer_of) -> float:
    right = sum(answer_of(entry) == entry.answer for entry in heldout)
    return right / len(heldout)

  return {
    "commonest answer": share(lambda entry: first(answers)),
    "commonest answer to the question": share(
      lambda entry: first(by_question.get(entry.question, answers))
    ),
  }


def main() -> None:
  """Prints a line for each."""
  data = from_dict(get_config().to_dict()).data
  for name, value in accuracies(vqa.folder(data)).items():
    print(f"{value:.4f}  {name}")


if __name__ == "__main__":
  main()
