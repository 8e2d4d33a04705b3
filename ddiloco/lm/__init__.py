"""The language model that the project's own runs train."""
