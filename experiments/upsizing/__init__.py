"""What newcomers cost (Fig. 12), and what extra compute brings (Table 4)."""
