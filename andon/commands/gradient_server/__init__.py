"""`andon gradient-server`: protocol 2 for workers of any language."""
