"""A corpus with languages as labels, from the translations of a package."""
