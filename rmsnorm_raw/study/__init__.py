"""The published study, remade: its cells, and the sweep that runs them."""
