"""Users' scripts: `andon.init` and `andon run`."""
