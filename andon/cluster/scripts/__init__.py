"""Scripts of the users: `andon.init` and `andon run`."""
