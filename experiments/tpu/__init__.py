"""Large models on slices of Cloud TPUs."""
