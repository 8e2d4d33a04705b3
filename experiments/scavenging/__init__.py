"""Learners on borrowed slices: they join, train for a while, and leave."""
