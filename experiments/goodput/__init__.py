"""The goodput model against Table 1 of the paper."""
