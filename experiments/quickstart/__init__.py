"""Studies and measurements; each folder says how to run it."""
