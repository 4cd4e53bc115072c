"""Pure combinatorial mathematics: Problem -> Claim -> Outcome. Knows no GPU, file or model."""
