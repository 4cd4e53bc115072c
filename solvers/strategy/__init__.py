"""Which strategy to run, chosen together with its layout."""
