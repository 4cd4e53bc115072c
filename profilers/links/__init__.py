"""Links between ranks: which groups there are, and how long collectives take over them."""
