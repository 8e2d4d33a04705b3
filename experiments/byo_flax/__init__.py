"""A program of one's own in Flax: a recurrent network from its library."""
