"""Models of what a run will be worth before anybody pays for it."""
