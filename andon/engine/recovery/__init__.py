"""How a run goes on when its members change."""
