"""The page that shows runs."""
