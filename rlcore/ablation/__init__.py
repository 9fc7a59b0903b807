"""What an ablation is made of, as pure functions: points from a grid, rungs, who goes on, curves, the table."""
