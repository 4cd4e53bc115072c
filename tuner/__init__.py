"""The product: joins measurements and solvers into plans, checks them and writes launch files."""
