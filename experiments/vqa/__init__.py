"""Questions about images: see `config`."""
