"""The bandwidth model against Table 13 of the paper."""
