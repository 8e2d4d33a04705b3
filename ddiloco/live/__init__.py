"""A live run: wall clock, TensorStore exchange, processes and signals."""
