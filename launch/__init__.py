"""Entry points. They parse flags and call the library; no logic here."""
