"""Writes a package's translated messages as text, one directory a language.

  pip install django
  python -m experiments.languages.prepare --package=django --output=runs/text \
    --languages=de,fr,ru,ja
  python -m launch.shards --config=experiments/quickstart/config.py \
    --config.data.source=text --config.data.path=runs/text \
    --config.data.partition=language --config.data.shards=4

Reads the compiled catalogues (*.mo) that the installed package has; nothing is
downloaded. Django 5.2 has 99 languages, of 25 to 50 kB each: enough to see what
shards of unlike languages do to small models.
"""

import gettext
import importlib.util
import pathlib
from collections.abc import Collection

from absl import flags

from ddiloco.config import ConfigError
from launch import command

PACKAGE = flags.DEFINE_string("package", "django", "An installed package.")
OUTPUT = flags.DEFINE_string("output", None, "The directory to create.")
LANGUAGES = flags.DEFINE_list("languages", [], "Which; default: all it has.")

_MESSAGES = 40  # in a document; short ones leave something to hold out


def messages(package: str) -> dict[str, list[str]]:
  """Each language's translations, without repetition, in a fixed order."""
  spec = importlib.util.find_spec(package)
  if spec is None or not spec.submodule_search_locations:
    raise ConfigError(
      f"--package={package} is no installed package. Run: pip install {package}"
    )
  found: dict[str, dict[str, None]] = {}
  for folder in spec.submodule_search_locations:
    for path in sorted(pathlib.Path(folder).rglob("LC_MESSAGES/*.mo")):
      with open(path, "rb") as file:
        catalogue = gettext.GNUTranslations(file)
      own = found.setdefault(path.parts[-3], {})
      # Public since Python 3 in all but name; keys are messages or plurals.
      for key in sorted(catalogue._catalog, key=str):
        if key and (text := catalogue._catalog[key].strip()):
          own[text] = None
  if not found:
    raise ConfigError(f"--package={package} has no translations (*.mo).")
  return {language: list(found[language]) for language in sorted(found)}


def write(
  package: str, output: pathlib.Path, languages: Collection[str] = ()
) -> dict[str, int]:
  """Writes `output`/<language>/<number>.txt; returns the bytes of each."""
  known = messages(package)
  for language in languages:
    if language not in known:
      raise ConfigError(
        f"--languages: {package} is not translated to {language!r}. It is to "
        + ", ".join(known)
        + "."
      )
  if output.exists():
    raise ConfigError(f"--output={output} exists already. Name a new one.")
  sizes = {}
  for language in languages or known:
    folder, texts = output / language, known[language]
    folder.mkdir(parents=True)
    for i in range(0, len(texts), _MESSAGES):
      document = "\n".join(texts[i : i + _MESSAGES]) + "\n"
      path = folder / f"{i // _MESSAGES:04d}.txt"
      path.write_text(document, encoding="utf-8")
      sizes[language] = sizes.get(language, 0) + len(document.encode())
  return sizes


def main() -> int:
  """Writes the corpus and says how much there is of each language."""
  if not OUTPUT.value:
    raise ConfigError("--output is missing: name a directory to create.")
  sizes = write(PACKAGE.value, pathlib.Path(OUTPUT.value), LANGUAGES.value)
  for language, size in sizes.items():
    print(f"{language:8} {size:8,} bytes")
  return 0


if __name__ == "__main__":
  command.run(main)
