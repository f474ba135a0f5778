"""The configuration: schema, presets, reading."""
