"""Decoupled learners and data-parallel training, at equal tokens."""
