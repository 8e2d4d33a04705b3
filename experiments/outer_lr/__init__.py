"""The outer optimizer: rate, momentum, learners and merge rule."""
